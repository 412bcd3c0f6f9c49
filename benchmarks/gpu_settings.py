"""On a GPU: the cost of `batch_invariant=True`, of masks without Triton, and of an epoch of one step.

Run `python -m benchmarks.gpu_settings [--only TEXT ...] [--device cpu]`; times are medians in one process, in
milliseconds, and ratios to the default and to the repeated batch.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch

import dropbayes as db
from benchmarks.gpu import Clock, in_training, repeated
from benchmarks.networks import CASES, perceptron
from dropbayes.training import fit

EXACT = ("MLP 13-50-1, N=1,000", "MLP 2-1024x5-1, p=.1", "U-Net", "mixer", "LSTM 2x512", "residual MLP", "experts")
PLAIN = ("U-Net", "mixer", "GPT-2", "1-d convolutions", "residual MLP")


def batch_invariant(name: str, clock: Clock) -> str:
    case = CASES[name]
    net, x = case.make().to(clock.device).eval(), case.inputs(case.rows).to(clock.device)
    default, _ = clock.median_ms(lambda: db.predict(net, x, n_draws=case.draws))
    exact, _ = clock.median_ms(
        lambda: db.predict(net, x, n_draws=case.draws, sampling=db.Sampling(batch_invariant=True))
    )
    return f"{name}: default {default:.3g}, exact rows {exact:.3g} ({exact / default:.2f} times)"


def without_triton(name: str, clock: Clock) -> str:
    case = CASES[name]
    net, x = case.make().to(clock.device).eval(), case.inputs(case.rows).to(clock.device)
    noisy = in_training(net)
    with torch.inference_mode():
        repeat, _ = clock.median_ms(lambda: noisy(repeated(x, case.draws)))
        row, _ = clock.median_ms(lambda: db.predict(net, x, n_draws=case.draws, masks="row"))
        shared, _ = clock.median_ms(lambda: db.predict(net, x, n_draws=case.draws))
    return f"{name}: repeat {repeat:.3g}, row {row / repeat:.2f} times, shared {shared / repeat:.2f} times"


def epoch_ms(device: torch.device, *, few: int = 100, many: int = 1100) -> float:
    """The time of an epoch of one step of the network of the CO2 experiment, without what precedes the first."""
    x = torch.randn(272, 1, device=device)

    def seconds(epochs: int) -> float:
        net = perceptron(1, *[1024] * 5, 1, drop_prob=0.1).to(device)
        began = time.perf_counter()
        fit(net, x, x.sin(), likelihood=db.Gaussian(10.0), epochs=epochs, batch_size=272, device=device, progress=False)
        return time.perf_counter() - began

    seconds(few)
    return 1e3 * (min(seconds(many) for _ in range(3)) - min(seconds(few) for _ in range(3))) / (many - few)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[""], help="Parts of the names of the networks to run.")
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    clock = Clock(torch.device(arguments.device), quick=False)
    for name in (name for name in EXACT if any(part in name for part in arguments.only)):
        print(batch_invariant(name, clock), flush=True)
    if clock.device.type == "cuda":
        print(f"an epoch of one step: {epoch_ms(clock.device):.3g}", flush=True)
    sys.modules["triton"] = None  # type: ignore[assignment]  # as if it were not installed
    for name in (name for name in PLAIN if any(part in name for part in arguments.only)):
        print(f"without Triton: {without_triton(name, clock)}", flush=True)


if __name__ == "__main__":
    main()
