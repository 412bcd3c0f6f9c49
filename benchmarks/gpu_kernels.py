"""The kernels on this GPU: right, and how fast against what torch does.

Times are medians in one process. Masks and attention are timed on the device alone (a captured graph, replayed), for
in a large network launches overlap with work; small perceptrons are timed as a caller sees them. Run
`python -m benchmarks.gpu_kernels [part ...]`, parts being mask, perceptron and attention; with `--compile` it only
compiles (parts can do that in parallel). It prints one line per measurement and writes
`benchmarks/results/gpu_kernels.json`. Without a GPU there is nothing to measure.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import history
from dropbayes.sampling.masks import Keys, keep_mask

SAMPLERS = ("stratified", "independent")
SECONDS, CALLS = (0.0, 1) if "--compile" in sys.argv else (0.15, 25)  # of one measurement


def milliseconds(run: Callable[..., Any], *arguments: Any, **keywords: Any) -> float:
    """The median time of a call on the device, launch gaps included."""
    run(*arguments, **keywords)
    torch.cuda.synchronize()
    times: list[float] = []
    began = time.perf_counter()
    while not times or (time.perf_counter() - began < SECONDS and len(times) < 200):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        run(*arguments, **keywords)
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last))
    return statistics.median(times)


def wall_milliseconds(run: Callable[..., Any], *arguments: Any, **keywords: Any) -> float:
    """The median time of a call as a caller sees it, until its result is there."""
    run(*arguments, **keywords)
    times = []
    for _ in range(CALLS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        run(*arguments, **keywords)
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times)


def replay_milliseconds(run: Callable[..., Any], *arguments: Any, **keywords: Any) -> float:
    """The median time of a call on the device alone: captured as a graph and replayed ten times in a row."""
    run(*arguments, **keywords)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(*arguments, **keywords)

    def replay() -> None:
        for _ in range(10):
            graph.replay()

    return milliseconds(replay) / 10


def relative_error(result: Tensor, expected: Tensor) -> float:
    return float((result.double() - expected.double()).norm() / expected.double().norm())


def mask(report: Callable[..., None]) -> None:
    from dropbayes.sampling.kernels import all as kernels

    # draws, rows, units
    shapes = {"100,663,296": (32, 16, 256 * 768), "lone row": (32, 1, 197 * 768)}
    for (name, (n_draws, n_rows, inner)), dtype in (
        (item, dtype) for item in shapes.items() for dtype in (torch.float32, torch.bfloat16)
    ):
        x = torch.randn(n_draws, n_rows, inner, device="cuda").to(dtype)
        dropout = replay_milliseconds(F.dropout, x, 0.1, True)
        for sampler in SAMPLERS:
            for rows in (None, range(n_rows)):
                keys = Keys(3, n_draws, sampler)
                arguments = {"drop_prob": 0.1, "draws": range(n_draws), "rows": rows, "outer": 1, "inner": inner}  # fmt: skip
                y = kernels.dropout(x, keys, 0, **arguments)[0]
                few = range(2)
                kept = keep_mask(keys, 0, drop_prob=0.1, draws=few, rows=rows, shape=(inner,), dtype=dtype, device=x.device)  # fmt: skip
                kept = kept if rows else kept[:, None]
                equal = torch.equal(y[:2].view(2, n_rows, inner), x[:2] * (kept * (1 / 0.9)))
                took = replay_milliseconds(kernels.dropout, x, keys, 0, **arguments)
                report(
                    "mask", f"{name} {str(dtype)[6:]} {sampler} {'row' if rows else 'shared'}", right=equal,
                    ms=took, of_dropout=took / dropout,
                )  # fmt: skip


def perceptron(report: Callable[..., None]) -> None:
    from dropbayes.sampling.kernels.all import affine_layers, perceptron_moments

    def small(*widths: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(widths):
            layers += [nn.Dropout(0.1), nn.Linear(before, after), nn.ReLU()]
        return nn.Sequential(*layers[:-1]).cuda().eval()

    for widths in ((13, 50, 1), (13, 50, 50, 1), (13, 100, 1), (20, 60, 60, 5)):
        net, n_draws = small(*widths), 100
        affines = affine_layers(list(net))
        for n_rows in (1, 1000, 100_000) if widths == (13, 50, 1) else (1000, 20_000):
            x = torch.randn(n_rows, widths[0], device="cuda")
            repeated = x.repeat(n_draws, 1)
            dense = wall_milliseconds(net, repeated)
            repeat = wall_milliseconds(repeated_variance, small(*widths).train(), repeated, n_draws)
            for sampler in SAMPLERS if len(widths) == 3 and widths[1] == 50 else SAMPLERS[:1]:
                for rows in (None, range(n_rows)):
                    for integrate in (True, False):
                        keys = Keys(3, n_draws, sampler)
                        arguments = {"draws": range(n_draws), "rows": rows, "integrate_last": integrate}
                        name = f"{'-'.join(map(str, widths))} N={n_rows} {sampler} {'row' if rows else 'shared'}{' integrated' if integrate else ''}"  # fmt: skip
                        try:
                            took = wall_milliseconds(perceptron_moments, affines, x, keys, **arguments)
                        except Exception as error:
                            report("perceptron", name, error=f"{type(error).__name__}: {error}"[:200])
                            continue
                        mean, variance = perceptron_moments(affines, x[:64], keys, **arguments)
                        a, b = moments_of_draws(list(net), x[:64], keys, range(n_draws), rows and rows[:64], integrate)
                        report(
                            "perceptron", name, errors=(relative_error(mean, a), relative_error(variance, b)),
                            ms=took, of_dense=took / dense, of_repeat=took / repeat,
                        )  # fmt: skip


def repeated_variance(net: nn.Module, x: Tensor, n_draws: int) -> Tensor:
    return net(x).view(n_draws, -1).var(0)


def moments_of_draws(
    layers: list[nn.Module], x: Tensor, keys: Keys, draws: range, rows: range | None, integrate_last: bool
) -> tuple[Tensor, Tensor]:
    """The moments in double precision, one operation after another."""
    h, site, integrated = x.double().expand(len(draws), *x.shape), 0, torch.zeros((), device=x.device)
    for place, layer in enumerate(layers):
        if isinstance(layer, nn.Dropout) and integrate_last and place == len(layers) - 2:
            squares = layers[-1].weight.double().square()
            integrated = (h.square() @ squares.t()).mean(0) * layer.p / (1 - layer.p)
        elif isinstance(layer, nn.Dropout):
            kept = keep_mask(keys, site, drop_prob=layer.p, draws=draws, rows=rows, shape=(h.shape[-1],), dtype=h.dtype, device=h.device)  # fmt: skip
            h, site = h * (kept if rows else kept[:, None]) / (1 - layer.p), site + 1
        elif isinstance(layer, nn.Linear):
            h = h @ layer.weight.double().t() + layer.bias.double()
        else:
            h = layer(h)
    return h.mean(0), h.var(0, unbiased=False) + integrated


def attention(report: Callable[..., None]) -> None:
    from dropbayes.sampling.kernels import all as kernels
    from dropbayes.sampling.kernels.attention import keep_bits

    # draws, rows, heads, steps
    shapes = {"BERT": (32, 16, 12, 128), "ViT": (32, 8, 12, 197), "GPT-2": (8, 4, 12, 1024)}
    for (name, (n_draws, n_rows, heads, steps)), dtype in (
        (item, dtype) for item in shapes.items() for dtype in (torch.float32, torch.bfloat16)
    ):
        q, k, v = (
            torch.randn(n_draws * n_rows, steps, heads, 64, device="cuda").to(dtype).transpose(1, 2) for _ in range(3)
        )
        plain = replay_milliseconds(F.scaled_dot_product_attention, q, k, v)
        dropout = replay_milliseconds(F.scaled_dot_product_attention, q, k, v, dropout_p=0.1)
        for sampler in SAMPLERS:
            for rows in (None, range(n_rows)):
                keys = Keys(3, n_draws, sampler)
                arguments: dict[str, Any] = {"keys": keys, "site": 1, "drop_prob": 0.1, "rows": rows, "draws": range(n_draws)}  # fmt: skip
                y = kernels.attention(q, k, v, **arguments)[:n_rows]
                kept = keep_mask(keys, 1, drop_prob=0.1, draws=range(1), rows=rows, shape=(heads, steps, steps), dtype=torch.float32, device=q.device)  # fmt: skip
                kept = kept[0] if rows else kept
                few = [t[:n_rows].double() for t in (q, k, v)]
                weights = (few[0] @ few[1].transpose(-2, -1) / 8).softmax(-1) * kept / 0.9
                bits = replay_milliseconds(keep_bits, keys, 1, drop_prob=0.1, draws=range(n_draws), rows=rows, lines=heads * steps, length=steps, device=q.device)  # fmt: skip
                took = replay_milliseconds(kernels.attention, q, k, v, **arguments)
                report(
                    "attention", f"{name} {str(dtype)[6:]} {sampler} {'row' if rows else 'shared'}",
                    error=relative_error(y, weights @ few[2]), ms=took, bits_ms=bits, speed=plain / took,
                    plain_ms=plain, dropout_speed=plain / dropout,
                )  # fmt: skip
                del few, weights
        call = milliseconds(kernels.attention, q, k, v, **arguments)
        report("attention", f"{name} {str(dtype)[6:]} with its launch", ms=call)


PARTS = {"mask": mask, "perceptron": perceptron, "attention": attention}


@torch.no_grad()
def main() -> None:
    measurements: list[dict[str, Any]] = []

    def report(part: str, case: str, **values: Any) -> None:
        measurements.append({"part": part, "case": case, **values})
        shown = (f"{k}={v:.3g}" if isinstance(v, float) else f"{k}={v}" for k, v in values.items())
        print(part, case, *shown, flush=True)

    for name in [part for part in sys.argv[1:] if part in PARTS] or PARTS:
        began = time.perf_counter()
        PARTS[name](report)
        print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)
    if "--compile" in sys.argv:
        return
    history.write("gpu_kernels", {"measurements": measurements})


if __name__ == "__main__":
    main()
