"""One pass instead of a hundred: the linear method against 10,000 draws, and its cost in forward passes.

Run `python -m benchmarks.one_pass` (minutes, on a CPU); it prints the tables of docs/one_pass.md and writes
`benchmarks/results/one_pass.json`. The networks are those of the test zoo, one for each mechanism of randomness.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import dropbayes as db
from benchmarks import history
from benchmarks.history import Goal
from benchmarks.networks import perceptron
from benchmarks.one_pass_gpu import HEAD, cells, compared, table
from tests.sampling.zoo import ZOO, build
from tests.sampling.zoo.hugging_face import huggingface

N_DRAWS = 10_000
REPEATS, CONTROLLED_DRAWS, CONTROLLED_SEEDS = 15, 30, 20


def against_draws(net: nn.Module, x: Any, row_axis: int = 0, method: str = "linear") -> dict[str, float]:
    sampling = db.Sampling(row_axis=row_axis)
    found = db.predict(net, x, method=method, sampling=sampling)  # type: ignore[arg-type]
    return compared(found, db.predict(net, x, n_draws=N_DRAWS, sampling=sampling))


def zoo() -> dict[str, dict[str, float]]:
    """Every network of the zoo that has a derivative."""
    found = {}
    for name, specimen in ZOO.items():
        with contextlib.suppress(NotImplementedError):  # refused: it drops where derivatives are switched off
            found[name] = against_draws(*build(name), row_axis=specimen.row_axis)
    return found


def vit(drop_prob: float) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    config = huggingface().ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=8, patch_size=4,
        hidden_dropout_prob=drop_prob, attention_probs_dropout_prob=drop_prob,
    )  # fmt: skip
    return huggingface().ViTForImageClassification(config).eval(), {"pixel_values": torch.randn(20, 3, 8, 8)}


def rates() -> dict[str, dict[str, float]]:
    """Where it fails: large drop probabilities, and the means of transformers."""
    found = {}
    for drop_prob in (0.05, 0.1, 0.2, 0.5, 0.7):
        torch.manual_seed(0)
        net, x = perceptron(8, 128, 128, 128, 1, drop_prob=drop_prob), torch.randn(200, 8)
        for method in ("linear", "moments"):
            found[f"perceptron 3x128, p {drop_prob:g}, {method}"] = against_draws(net, x, method=method)
    for drop_prob in (0.1, 0.3):
        found[f"vision transformer, p {drop_prob:g}, linear"] = against_draws(*vit(drop_prob))
    return found


def seconds(function: Callable[[], Any]) -> float:
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return sorted(times)[REPEATS // 2]


def costs() -> dict[str, float]:
    """The time of a prediction of one output, in forward passes of the network."""
    torch.manual_seed(0)
    images = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Dropout2d(0.1), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(),
        nn.Dropout2d(0.1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(32, 1),
    )  # fmt: skip
    layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.1, batch_first=True)
    text = nn.Sequential(nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), nn.Flatten(), nn.LazyLinear(1))
    cases: dict[str, tuple[nn.Module, Tensor]] = {
        "perceptron 784-512-512-512-1, 512 rows": (
            perceptron(784, 512, 512, 512, 1, drop_prob=0.1),
            torch.randn(512, 784),
        ),
        "convolutions, 32 images of 32x32": (images, torch.randn(32, 3, 32, 32)),
        "transformer of 3 layers, 16 sequences of 64": (text, torch.randn(16, 64, 128)),
    }
    found = {}
    for name, (net, x) in cases.items():
        net.eval()
        with torch.no_grad():
            net(x)
            forward = seconds(lambda net=net, x=x: net(x))  # type: ignore[misc]
        db.predict(net, x, method="linear")
        found[name] = seconds(lambda net=net, x=x: db.predict(net, x, method="linear")) / forward  # type: ignore[misc]
    return found


def controls() -> dict[str, dict[str, float]]:
    """The gain of the control variate: the mean squared error without it over that with it, for mean and variance."""
    found = {}
    for drop_prob in (0.1, 0.3, 0.5):
        torch.manual_seed(0)
        net, x = perceptron(3, 50, 50, 2, drop_prob=drop_prob), torch.randn(12, 3)
        truth = db.predict(net, x, n_draws=2 * N_DRAWS)
        for sampler in ("independent", "stratified"):
            sampling = db.Sampling(sampler=sampler, integrate_last_layer=False)
            errors = torch.zeros(2, 2, dtype=torch.float64)
            for seed in range(CONTROLLED_SEEDS):
                for way, method in enumerate(("sampling", "controlled")):
                    few = db.predict(net, x, method=method, n_draws=CONTROLLED_DRAWS, seed=seed, sampling=sampling)  # type: ignore[arg-type]
                    pairs = ((few.mean, truth.mean), (few.epistemic, truth.epistemic))
                    errors[way] += torch.stack([(one - other).square().mean().double() for one, other in pairs])
            mean, variance = (errors[0] / errors[1]).tolist()
            found[f"p {drop_prob:g}, {sampler} masks"] = {"mean": mean, "variance": variance}
    return found


def is_close(one: dict[str, float]) -> bool:
    """Within 5 % in the median and 15 % from the 10th to the 90th percentile."""
    return abs(one["median"] - 1) <= 0.05 and one["low"] >= 0.85 and one["high"] <= 1.15


def main() -> None:
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {"zoo": zoo(), "rates": rates(), "costs": costs(), "controls": controls()}
    for part in ("zoo", "rates"):
        print(table(([name, *cells(one)] for name, one in found[part].items()), HEAD), end="\n\n")
    print(table(([name, f"{cost:.1f}"] for name, cost in found["costs"].items()), ["network", "forward passes"]))
    gains = ([name, f"{one['mean']:.1f}", f"{one['variance']:.1f}"] for name, one in found["controls"].items())
    print(table(gains, ["masks", "gain of the mean", "gain of the variance"]))
    close = sum(map(is_close, found["zoo"].values()))
    goals = [Goal("networks of the zoo within 5 % and 15 %", close, at_least=30)]
    goals += [Goal(f"forward passes, {name}", cost, at_most=3.5) for name, cost in found["costs"].items()]
    history.write("one_pass", {**found, "close": close}, goals)


if __name__ == "__main__":
    main()
