"""The UCI table of the paper: with the authors' protocol (`faithful`), then with `DropoutRegressor` at an effort.

    python -m dropbayes.experiments.uci --method faithful --device cuda --out out/uci
    python -m dropbayes.experiments.uci --method best --sets yacht,boston --splits 0-4
    python -m dropbayes.experiments.uci --method standard --splits gap
    python -m dropbayes.experiments.uci --quick
    python -m dropbayes.experiments.uci --csv my.csv --target y --method best

Results are one JSON file per method and set. A run that was interrupted goes on with the splits that are missing;
`python -m dropbayes.experiments.uci.page` turns the files into a table.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import pathlib
import platform
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from dropbayes.estimators.effort import EFFORTS
from dropbayes.experiments.uci import data as uci_data
from dropbayes.experiments.uci import effort as uci_effort
from dropbayes.experiments.uci import faithful as uci_faithful
from dropbayes.experiments.uci.page import result_line
from dropbayes.runtime import files

METHODS: dict[str, Any] = {"faithful": uci_faithful, **dict.fromkeys(EFFORTS, uci_effort)}
QUICK_SETS, QUICK_SPLITS = ("yacht", "boston", "energy", "concrete", "wine"), 5


def split_numbers(text: str, n_splits: int) -> list[int]:
    """The splits a command line names: "all", a number of first ones, "a-b" or a list with commas.

    Example:
        >>> split_numbers("3", 20), split_numbers("2-4", 20), split_numbers("0,7", 20)
        ([0, 1, 2], [2, 3, 4], [0, 7])
    """
    if text == "all":
        return list(range(n_splits))
    if text.isdigit():
        return list(range(min(int(text), n_splits)))
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not first.isdigit() or (last and not last.isdigit()):
            raise ValueError(f"`splits` must be 'all', a count, a range as 0-4 or a list as 0,7; got {text!r}.")
        numbers += range(int(first), int(last or first) + 1)
    return [n for n in dict.fromkeys(numbers) if n < n_splits]


def _path(out: pathlib.Path, method: str, name: str) -> pathlib.Path:
    return out / f"{method}-{name}.json"


def read_results(path: pathlib.Path) -> dict[str, Any]:
    """The results of a file, or empty ones."""
    if path.exists():
        found: dict[str, Any] = json.loads(path.read_text())
        return found
    return {"splits": [], "seconds": 0.0}


def write_results(path: pathlib.Path, results: dict[str, Any]) -> None:
    """Writes a results file, in a folder that is made where it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_text(path, json.dumps(results, indent=1) + "\n")


def hardware(device: str) -> str:
    """The processor the networks run on, in words."""
    if device != "cpu" and torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def run_set(
    dataset: uci_data.Dataset,
    method: str,
    splits: Sequence[int],
    *,
    out: pathlib.Path,
    device: str = "auto",
    settings: Any = None,
    splits_per_chunk: int | None = None,
    progress: bool | None = None,
) -> dict[str, Any]:
    """The results of one method on one set; only the splits that are not in its file yet are run.

    Args:
        dataset: The set.
        method: "faithful", or an effort of the estimator: "quick", "standard" or "best".
        splits: Which of its splits.
        out: The folder of the results.
        device: "auto", "cpu", "cuda" ...
        settings: The method's settings; its own for the set by default.
        splits_per_chunk: Splits trained at once, then written; all by default.
        progress: Shows a bar.
    """
    path = _path(out, method, dataset.name)
    results = read_results(path)
    settings = settings or settings_of(method, dataset)
    if results["splits"] and results["settings"] != json.loads(json.dumps(vars(settings))):
        raise ValueError(
            f"{path} holds results of other settings. Name another folder with --out, or delete the file to start anew."
        )
    done = {entry["split"] for entry in results["splits"]}
    missing = [split for split in splits if split not in done]
    size = splits_per_chunk or max(1, len(missing))
    for start in range(0, len(missing), size):
        begun = time.perf_counter()
        chunk = missing[start : start + size]
        new = METHODS[method].results(dataset, chunk, settings=settings, device=device, progress=progress)
        results = {
            "method": method,
            "set": dataset.name,
            "settings": vars(settings),
            "hardware": hardware(device),
            "torch": torch.__version__,
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "command": "python -m dropbayes.experiments.uci " + shlex.join(sys.argv[1:]),
            "seconds": results["seconds"] + time.perf_counter() - begun,
            "splits": sorted([*results["splits"], *new], key=lambda entry: entry["split"]),
        }
        write_results(path, results)
    return results


def settings_of(method: str, dataset: uci_data.Dataset, *, quick: bool = False) -> Any:
    """The settings of a method for a set; small ones for a first look."""
    settings = METHODS[method].settings_for(dataset)
    if method in EFFORTS:
        return replace(settings, effort="quick" if quick else method)
    return replace(settings, **METHODS[method].QUICK) if quick else settings


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="dropbayes.experiments.uci", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--method", choices=sorted(METHODS), default="faithful")
    parser.add_argument("--sets", help="names with commas; by default all nine, the smallest first")
    parser.add_argument(
        "--splits", help="'all', a count, a range as 0-4 or a list as 0,7; 'gap' or 'gap:0-4' for the gap splits"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=pathlib.Path, help="the folder of the results; by default out/uci")
    parser.add_argument("--budget-seconds", type=float, default=float("inf"), help="start no set that would overrun it")
    parser.add_argument("--splits-per-chunk", type=int, help="write the results after this many splits; default all")
    parser.add_argument("--quick", action="store_true", help="the five small sets, 5 splits, fewer draws and steps")
    parser.add_argument("--csv", type=pathlib.Path, help="a table of your own instead of the nine sets")
    parser.add_argument("--target", help="the column of --csv to predict")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the experiment from the command line."""
    arguments = _arguments(argv)
    if (arguments.csv is None) != (arguments.target is None):
        raise SystemExit("`--csv` and `--target` go together: name the file and the column to predict.")
    method, quick = METHODS[arguments.method], arguments.quick
    names = (arguments.sets or ",".join(QUICK_SETS if quick else uci_data.SMALLEST_FIRST)).split(",")
    out = arguments.out or pathlib.Path("out") / ("uci-quick" if quick else "uci")
    chosen = arguments.splits or (str(QUICK_SPLITS) if quick else "all")
    gap = chosen.split(":")[0] == "gap"
    if gap:
        chosen, out = chosen.partition(":")[2] or "all", out / "gap"
    progress = None if importlib.util.find_spec("tqdm") else False
    began, rate = time.perf_counter(), 0.0
    for name in [arguments.csv.stem] if arguments.csv else names:
        dataset = (
            uci_data.from_csv(arguments.csv, target=arguments.target) if arguments.csv else uci_data.load(name, gap=gap)
        )
        splits = split_numbers(chosen, len(dataset.splits))
        settings = settings_of(arguments.method, dataset, quick=quick)
        done = {entry["split"] for entry in read_results(_path(out, arguments.method, name))["splits"]}
        cost = method.network_steps(dataset, len(set(splits) - done), settings)
        start = time.perf_counter()
        if start - began + rate * cost > arguments.budget_seconds:
            print(f"{name}: left out, {start - began:.0f} s spent and {rate * cost:.0f} s expected", flush=True)
            continue
        results = run_set(
            dataset,
            arguments.method,
            splits,
            out=out,
            device=arguments.device,
            settings=settings,
            splits_per_chunk=arguments.splits_per_chunk,
            progress=progress,
        )
        rate = (time.perf_counter() - start) / cost if cost else rate
        print(result_line(results, gap=gap), flush=True)
