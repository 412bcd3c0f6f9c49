"""What the theory costs: drawing weights against the product they feed, and the layers against `nn.Dropout`.

Every figure is a ratio of two times taken alternately in one process, the median of many. Run
`python -m benchmarks.theory`; it prints a Markdown table and writes `benchmarks/results/theory.json`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from benchmarks import history
from dropbayes.layers import BernoulliNoise, Linear
from dropbayes.likelihoods import Gaussian
from dropbayes.objective import negative_elbo
from dropbayes.precision import Prior
from dropbayes.recurrent import LSTM
from dropbayes.variational import Bernoulli, Concrete, Mixture, multiplicative_gaussian

ROWS, UNITS = 256, 1024


def ratio(candidate: Callable[[], object], reference: Callable[[], object], *, repeats: int = 41) -> dict[str, float]:
    """The median of time(candidate) / time(reference) over interleaved pairs, with its quartiles."""
    times: dict[bool, list[float]] = {True: [], False: []}
    for repeat in range(repeats + 3):
        for is_candidate in (True, False) if repeat % 2 else (False, True):  # neither always goes first
            start = time.perf_counter()
            (candidate if is_candidate else reference)()
            if repeat >= 3:  # the first calls warm caches up
                times[is_candidate].append(1e3 * (time.perf_counter() - start))
    ratios = [a / b for a, b in zip(times[True], times[False], strict=True)]
    low, middle_ratio, high = statistics.quantiles(ratios, n=4)
    return {
        "ratio": middle_ratio,
        "lower_quartile": low,
        "upper_quartile": high,
        "candidate_ms": statistics.median(times[True]),
        "reference_ms": statistics.median(times[False]),
    }


def families() -> dict[str, object]:
    kept = torch.randn(UNITS, UNITS)
    locs = torch.stack([kept, 0.1 * kept, torch.zeros_like(kept)])
    return {
        "Bernoulli, σ = 0": Bernoulli(kept, 0.9),
        "Bernoulli, σ = 0.1": Bernoulli(kept, 0.9, std=0.1),
        "N(1, σ²) on weights": multiplicative_gaussian(kept, 0.3),
        "Concrete": Concrete(kept, torch.tensor(-2.0)),
        "mixture of 3": Mixture(torch.full((3,), 1 / 3), locs, torch.full((1, 1, 1), 0.1)),
        "mixture of 3, rank 2": Mixture(
            torch.full((3,), 1 / 3), locs, torch.full((1, 1, 1), 0.1), 0.1 * torch.randn(3, UNITS, UNITS, 2)
        ),
    }


def sampling_costs() -> dict[str, dict[str, float]]:
    """Drawing a 1024 x 1024 matrix against the product of 256 rows with it."""
    x, weight = torch.randn(ROWS, UNITS), torch.randn(UNITS, UNITS)
    costs = {}
    with torch.no_grad():
        for name, q in families().items():
            costs[f"draw W, {name} / x W"] = ratio(q.sample, lambda: x @ weight)  # type: ignore[attr-defined]
        for name, q in families().items():
            product = lambda q=q: q.product(x)  # noqa: E731
            costs[f"x W with a W per row, {name} / x W"] = ratio(product, lambda: x @ weight)
    return costs


def training_step(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Callable[[], None]:
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        (net(x) - y).square().mean().backward()
        optimizer.step()

    return step


def training_costs() -> dict[str, dict[str, float]]:
    """A training step with layers that draw against the same step written with torch's own modules."""
    x, y = torch.randn(ROWS, UNITS), torch.randn(ROWS, 1)
    noise = BernoulliNoise(0.1)
    ours = nn.Sequential(Linear(UNITS, UNITS, noise=noise), nn.ReLU(), Linear(UNITS, 1, noise=noise))
    theirs = nn.Sequential(nn.Dropout(0.1), nn.Linear(UNITS, UNITS), nn.ReLU(), nn.Dropout(0.1), nn.Linear(UNITS, 1))
    small_x = torch.randn(ROWS, 8)
    small = nn.Sequential(Linear(8, 50, noise=noise), nn.ReLU(), Linear(50, 1, noise=noise))
    plain = nn.Sequential(nn.Dropout(0.1), nn.Linear(8, 50), nn.ReLU(), nn.Dropout(0.1), nn.Linear(50, 1))
    sequences = torch.randn(32, 35, 128)

    def elbo_step(net: nn.Module, x: torch.Tensor) -> Callable[[], None]:
        def step() -> None:
            net.zero_grad()
            loss = negative_elbo(net, net(x), y, likelihood=Gaussian(1.0), prior=Prior(), n_data=1000)
            loss.backward()

        return step

    def loss_step(net: nn.Module, x: torch.Tensor) -> Callable[[], None]:
        def step() -> None:
            net.zero_grad()
            (net(x) - y).square().mean().backward()

        return step

    def recurrent_step(net: nn.Module) -> Callable[[], None]:
        def step() -> None:
            net.zero_grad()
            net(sequences)[0].square().mean().backward()

        return step

    return {
        "training step, layers.Linear / nn.Dropout + nn.Linear (1024)": ratio(
            training_step(ours, x, y), training_step(theirs, x, y)
        ),
        "training step, layers.Linear / nn.Dropout + nn.Linear (8-50-1)": ratio(
            training_step(small, small_x, y), training_step(plain, small_x, y), repeats=401
        ),
        "gradient of negative_elbo / of the squared error alone (1024)": ratio(
            elbo_step(theirs, x), loss_step(theirs, x)
        ),
        "gradient of negative_elbo / of the squared error alone (8-50-1)": ratio(
            elbo_step(plain, small_x), loss_step(plain, small_x), repeats=401
        ),
        "training step, recurrent.LSTM / nn.LSTM without dropout (128, 35 steps, 32 rows)": ratio(
            recurrent_step(LSTM(128, 128, batch_first=True)), recurrent_step(nn.LSTM(128, 128, batch_first=True))
        ),
    }


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    costs = sampling_costs() | training_costs()
    print("| what | ratio | quartiles | ms | reference ms |\n|---|---|---|---|---|")
    for name, cost in costs.items():
        quartiles = f"{cost['lower_quartile']:.2f} to {cost['upper_quartile']:.2f}"
        print(
            f"| {name} | {cost['ratio']:.2f} | {quartiles} | {cost['candidate_ms']:.2f} | {cost['reference_ms']:.2f} |"
        )
    history.write("theory", {"costs": costs})


if __name__ == "__main__":
    main()
