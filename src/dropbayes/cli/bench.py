"""`dropbayes bench`: how much faster predictions are than by the usual implementations, on this machine."""

from __future__ import annotations

import copy
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dropbayes.cli.messages import count, out, print_json, table
from dropbayes.predictive import predict
from dropbayes.runtime.progress import ProgressBar

__all__ = ["bench", "plain_loop", "repeated_batch"]


def _perceptron(width: int = 50) -> nn.Module:
    return nn.Sequential(
        nn.Dropout(0.05), nn.Linear(13, width), nn.ReLU(),
        nn.Dropout(0.05), nn.Linear(width, width), nn.ReLU(), nn.Dropout(0.05), nn.Linear(width, 1),
    )  # fmt: skip


def _convolution() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(512, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10),
    )  # fmt: skip


def _transformer() -> nn.Module:
    return nn.Sequential(
        nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True), nn.Flatten(), nn.Linear(16 * 64, 1)
    )


# name: the network and the shape of its input
_CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "perceptron, 1 row": (_perceptron, (1, 13)),
    "perceptron, 100 rows": (_perceptron, (100, 13)),
    "perceptron, 1000 rows": (_perceptron, (1000, 13)),
    "convolutions, 32 images": (_convolution, (32, 1, 28, 28)),
    "transformer, 16 sequences": (_transformer, (16, 16, 64)),
}


@torch.inference_mode()
def plain_loop(net: nn.Module, x: Tensor, n_draws: int) -> tuple[Tensor, Tensor]:
    """The moments by a loop of forward passes, as most people write it."""
    draws = torch.stack([net(x) for _ in range(n_draws)])
    return draws.mean(0), draws.var(0)


@torch.inference_mode()
def repeated_batch(net: nn.Module, x: Tensor, n_draws: int) -> tuple[Tensor, Tensor]:
    """The moments by one forward pass over a repeated batch, as other libraries compute them."""
    draws = net(x.repeat(n_draws, *(1,) * (x.dim() - 1))).unflatten(0, (n_draws, -1))
    return draws.mean(0), draws.var(0)


def _measure(name: str, n_draws: int, repeats: int) -> dict[str, Any]:
    """The median times of the implementations, measured alternately."""
    make, shape = _CASES[name]
    torch.manual_seed(0)
    net, x = make().eval(), torch.randn(shape)
    noisy = copy.deepcopy(net).train()  # what the usual implementations run
    methods: dict[str, Callable[[], Any]] = {
        "predict": lambda: predict(net, x, n_draws=n_draws),
        "loop": lambda: plain_loop(noisy, x, n_draws),
        "repeated": lambda: repeated_batch(noisy, x, n_draws),
    }
    method = predict(net, x, n_draws=n_draws).method  # a warm-up run as well, which is not timed
    times: dict[str, list[float]] = {method: [] for method in methods}
    for _ in range(repeats):
        for method, run in methods.items():
            start = time.perf_counter()
            run()
            times[method].append(time.perf_counter() - start)
    medians = {method: statistics.median(values) for method, values in times.items()}
    return {
        "case": name,
        "predict_ms": 1e3 * medians["predict"],
        "against_loop": medians["loop"] / medians["predict"],
        "against_repeated_batch": medians["repeated"] / medians["predict"],
        "method": method,
    }


def bench(*, n_draws: int, repeats: int, as_json: bool) -> None:
    """Measures and prints ratios; see `dropbayes bench --help`."""
    rows = []
    with ProgressBar("measure", len(_CASES), unit="cases") as bar:
        for name in _CASES:
            rows.append(_measure(name, n_draws, repeats))
            bar.advance_to(len(rows))
    about = {"torch": torch.__version__, "machine": platform.machine(), "threads": torch.get_num_threads()}
    if as_json:
        print_json({**about, "n_draws": n_draws, "repeats": repeats, "cases": rows})
        return
    cells = [
        [
            row["case"],
            f"{row['predict_ms']:.1f} ms",
            f"{row['against_loop']:.1f}×",
            f"{row['against_repeated_batch']:.1f}×",
            row["method"],
        ]
        for row in rows
    ]
    heads = ["network", "predict", "a loop", "a repeated batch", "how"]
    console = out()
    console.print(table(f"How many times faster than ..., with {n_draws} draws", heads, cells, numbers=(1, 2, 3)))
    where = f"torch {about['torch']}, threads: {about['threads']}, {about['machine']}"
    console.print(f"\nmedians of {count(repeats, 'run')} in turns; {where}", style="dim")
