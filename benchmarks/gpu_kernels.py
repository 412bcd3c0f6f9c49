"""The kernels on this GPU: right, and how fast against what torch does.

Times are medians in one process, on the device alone (a captured graph, replayed): in a large network launches overlap
with work. Run `python -m benchmarks.gpu_kernels [part ...]`, parts being mask and attention; with `--compile` it only
compiles (parts can do that in parallel). It prints one line per measurement and writes
`benchmarks/results/gpu_kernels.json`. Without a GPU there is nothing to measure.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import history
from dropbayes.sampling.masks import Keys, keep_mask

SAMPLERS = ("stratified", "independent")
SECONDS = 0.0 if "--compile" in sys.argv else 0.15  # of one measurement


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


PARTS = {"mask": mask, "attention": attention}


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
