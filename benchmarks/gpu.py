"""A prediction on a GPU against what others do, on networks people have.

*loop*: n_draws forwards with dropout on, stacked. *repeat*: one forward of the batch repeated n_draws times. *dense*: the
same without dropout, the floor for anything that makes every product. *row* and *shared*: `predict(masks=...)`. *floor*:
the network up to its first dropout once, and the rest for every draw, where the network is easy to cut. *first*: the
first prediction on the network, its inspection and kernels not yet compiled included.

All times of a case are taken in one process, after a few calls of each to warm up; they are medians of wall-clock times
between synchronised states, in milliseconds. Run `python -m benchmarks.gpu [--only TEXT ...] [--quick] [--device cpu]`;
it prints a Markdown table, names every goal that is missed, and (unless quick) writes `benchmarks/results/gpu.json`.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import pathlib
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import dropbayes as db
from benchmarks import history
from benchmarks.networks import CASES, Case

CASE_SECONDS, ALL_SECONDS = 25, 460  # a case that takes longer is given up; the rest is then not run
MEASUREMENT_SECONDS, MOST_REPEATS = 0.4, 21
WARM_UP_CALLS = 3  # the first inspects the network and compiles kernels
MOST_MEMORY = 1 / 8  # of the card, beyond what the network itself takes
AUTOCAST = {"float32": None, "bfloat16": torch.bfloat16}


def in_training(net: nn.Module) -> nn.Module:
    """What others run: dropout on, normalisation frozen.

    Copied outside of inference mode: parameters made in it ask for no gradient, and torch multiplies by them otherwise.
    """
    net = copy.deepcopy(net).train()
    for module in net.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase):
            module.eval()
    return net


class Clock:
    """Times calls on one device, and the memory they take."""

    def __init__(self, device: torch.device, quick: bool) -> None:
        self.device, self.repeats = device, 1 if quick else MOST_REPEATS

    def synchronise(self) -> None:
        """Waits until the device has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def median_ms(self, run: Callable[[], Any]) -> tuple[float, float | None]:
        """The median time of a call after the first few, and the most megabytes that a call adds."""
        began = time.perf_counter()
        for _ in range(WARM_UP_CALLS):
            run()
            self.synchronise()
            if time.perf_counter() - began > MEASUREMENT_SECONDS:
                break
        before = 0
        if self.device.type == "cuda":
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        times: list[float] = []
        while not times or (sum(times) < 1e3 * MEASUREMENT_SECONDS and len(times) < self.repeats):
            began = time.perf_counter()
            run()
            self.synchronise()
            times.append(1e3 * (time.perf_counter() - began))
        peak = (torch.cuda.max_memory_allocated() - before) / 2**20 if self.device.type == "cuda" else None
        return statistics.median(times), peak


def repeated(x: Tensor, n_draws: int) -> Tensor:
    return x.repeat(n_draws, *(1,) * (x.dim() - 1))


def ways(case: Case, net: nn.Module, noisy: nn.Module, x: Tensor, n_draws: int) -> dict[str, Callable[[], Any]]:
    def floor() -> Tensor:
        assert case.split is not None
        prefix, suffix = case.split(noisy)
        return suffix(repeated(prefix(x), n_draws))

    runs: dict[str, Callable[[], Any]] = {
        "row": lambda: db.predict(net, x, n_draws=n_draws, masks="row"),
        "shared": lambda: db.predict(net, x, n_draws=n_draws, masks="shared"),
        "repeat": lambda: noisy(repeated(x, n_draws)),
        "dense": lambda: net(repeated(x, n_draws)),
        "loop": lambda: torch.stack([noisy(x) for _ in range(n_draws)]),
    }
    return runs | ({"floor": floor} if case.split else {})


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raises TimeoutError in the block once the time is over."""

    def expire(*_: Any) -> None:
        raise TimeoutError(f"more than {seconds} s")

    previous = signal.signal(signal.SIGALRM, expire)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def measure(name: str, precision: str, clock: Clock, quick: bool) -> dict[str, Any]:
    case, result = CASES[name], {"case": name, "precision": precision}
    rows, n_draws = (min(case.rows, 2), min(case.draws, 4)) if quick else (case.rows, case.draws)
    result |= {"rows": rows, "draws": n_draws, "errors": {}}
    torch.manual_seed(0)
    dtype = AUTOCAST[precision]
    try:
        with limited(CASE_SECONDS), contextlib.ExitStack() as stack:
            net, x = case.make().to(clock.device).eval(), case.inputs(rows).to(clock.device)
            noisy = in_training(net)
            stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.autocast(clock.device.type, dtype, enabled=dtype is not None))
            net(x)  # torch's own first call is not ours
            clock.synchronise()
            began = time.perf_counter()
            result["method"] = db.predict(net, x, n_draws=n_draws, masks="row").method
            clock.synchronise()
            result["first_ms"] = 1e3 * (time.perf_counter() - began)
            for way, run in ways(case, net, noisy, x, n_draws).items():
                try:
                    result[f"{way}_ms"], result[f"{way}_mb"] = clock.median_ms(run)
                except (RuntimeError, ValueError, NotImplementedError, TypeError) as error:
                    result["errors"][way] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    except (TimeoutError, ImportError, RuntimeError, ValueError, NotImplementedError, TypeError) as error:
        result["errors"]["case"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    gc.collect()
    if clock.device.type == "cuda":
        torch.cuda.empty_cache()
    return result


def missed_goals(result: dict[str, Any]) -> list[str]:
    """Every goal that a case misses, in words."""
    missed = [f"{way} failed: {text}" for way, text in result["errors"].items()]
    for way in ("row", "shared"):
        ours = result.get(f"{way}_ms")
        if ours is None:
            continue
        for other, most in (("loop", 1.0), ("repeat", 1.05), ("floor", 1.15)):
            theirs = result.get(f"{other}_ms")
            if theirs and ours > most * theirs:
                missed.append(f"{way} takes {ours / theirs:.2f} of {other} (at most {most})")
        most_mb = MOST_MEMORY * torch.cuda.get_device_properties(0).total_memory / 2**20 if result[f"{way}_mb"] else 0
        if (result[f"{way}_mb"] or 0) > most_mb:
            missed.append(f"{way} takes {result[f'{way}_mb']:.0f} MB (at most {most_mb:.0f})")
    return missed


def table_line(result: dict[str, Any]) -> str:
    def shown(key: str) -> str:
        return f"{result[key]:.3g}" if result.get(key) is not None else "-"

    ratio = f"{result['repeat_ms'] / result['row_ms']:.2f}" if {"repeat_ms", "row_ms"} <= result.keys() else "-"
    cells = [f"{result['case']}, {result['precision']}", str(result["rows"]), str(result["draws"])]
    cells += [shown(f"{way}_ms") for way in ("loop", "repeat", "dense", "floor", "row", "shared", "first")]
    cells += [ratio, shown("repeat_mb"), shown("row_mb"), shown("shared_mb"), result.get("method", "-")]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[], help="Parts of the names of the cases to run.")
    parser.add_argument("--precision", nargs="*", default=list(AUTOCAST), choices=list(AUTOCAST))
    parser.add_argument("--quick", action="store_true", help="Two rows, four draws, one repetition: does it run?")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=pathlib.Path, default=history.RESULTS, help="The folder to write to.")
    arguments = parser.parse_args()
    names = [name for name in CASES if not arguments.only or any(part in name for part in arguments.only)]
    device = torch.device(arguments.device)
    clock, began, results = Clock(device, arguments.quick), time.perf_counter(), []
    print("| network | rows | draws | loop | repeat | dense | floor | row | shared | first | repeat / row | MB repeat | MB row | MB shared | method |")  # fmt: skip
    print("|" + "---|" * 15)
    for precision in arguments.precision:
        for name in names:
            if time.perf_counter() - began > ALL_SECONDS:
                results.append({"case": name, "precision": precision, "rows": 0, "draws": 0, "errors": {"case": "not run: out of time"}})  # fmt: skip
                continue
            results.append(measure(name, precision, clock, arguments.quick))
            print(table_line(results[-1]), flush=True)
    print("\nGoals missed:")
    for result in results:
        result["missed"] = missed_goals(result)
        for text in result["missed"]:
            print(f"- {result['case']}, {result['precision']}: {text}")
    if not arguments.quick:
        history.write("gpu", {"cases": results}, folder=arguments.out)


if __name__ == "__main__":
    main()
