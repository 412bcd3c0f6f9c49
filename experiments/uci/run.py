"""The UCI table of the paper: with the authors' protocol (`faithful`), or with `DropoutRegressor` at an effort.

    python -m experiments.uci --method faithful --device cuda --out out/uci
    python -m experiments.uci --method best --sets yacht,boston --splits 0-4
    python -m experiments.uci --method standard --splits gap
    python -m experiments.uci --quick
    python -m experiments.uci --csv my.csv --target y --method best

Results are one JSON file per method and set. An interrupted run continues with the splits that are missing;
`python -m experiments.uci.page` makes the page of the reproduction from the files.
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from dropbayes.estimators.parameters import EFFORTS
from dropbayes.runtime import files
from experiments.record import Findings, Record, markdown_table
from experiments.reproduction import reproduce
from experiments.uci import data as uci_data
from experiments.uci import effort as uci_effort
from experiments.uci import faithful as uci_faithful
from experiments.uci.page import result_line, summary, table_row

METHODS: dict[str, Any] = {"faithful": uci_faithful, **dict.fromkeys(EFFORTS, uci_effort)}


@dataclass(frozen=True)
class Settings:
    """The sets, splits and method of a run; the published protocol by default.

    Attributes:
        method: "faithful", or an effort of the estimator: "quick", "standard" or "best".
        sets: The names of the sets, the smallest first.
        splits: "all", a count, a range as 0-4 or a list as 0,7; "gap" or "gap:0-4" for the gap splits.
        csv: A table of your own instead of the sets.
        target: The column of that table to predict.
        small: Whether to take fewer draws and steps than the method has.
        budget_seconds: The time after which no set is begun that would take longer; 0 for no limit.
        splits_per_chunk: The number of splits after which results are written; 0 for all at once.
    """

    method: str = "faithful"
    sets: tuple[str, ...] = uci_data.SMALLEST_FIRST
    splits: str = "all"
    csv: str = ""
    target: str = ""
    small: bool = False
    budget_seconds: float = 0.0
    splits_per_chunk: int = 0

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"`method` must be one of {', '.join(METHODS)}; got {self.method!r}.")
        if bool(self.csv) != bool(self.target):
            raise ValueError("`csv` and `target` go together: name the file and the column to predict.")

    @classmethod
    def quick(cls) -> Settings:
        """Five small sets, five splits each, with fewer draws and steps."""
        return cls(sets=("yacht", "boston", "energy", "concrete", "wine"), splits="5", small=True)

    @classmethod
    def tiny(cls) -> Settings:
        """One split of one set."""
        return cls(method="quick", sets=("yacht",), splits="1", small=True)

    @property
    def gap(self) -> bool:
        """Whether the splits leave a gap in one input, instead of being random."""
        return self.splits.split(":")[0] == "gap"

    @property
    def chosen_splits(self) -> str:
        """The splits as `split_numbers` reads them."""
        return (self.splits.partition(":")[2] or "all") if self.gap else self.splits


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
        results: dict[str, Any] = json.loads(path.read_text())
        return results
    return {"splits": [], "seconds": 0.0}


def write_results(path: pathlib.Path, results: dict[str, Any]) -> None:
    """Writes a results file, in a folder that is made where it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_text(path, json.dumps(results, indent=1) + "\n")


def hardware(device: str) -> str:
    """The name of the processor that runs the networks."""
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
        splits: The indices of the splits to run.
        out: The folder of the results.
        device: "auto", "cpu", "cuda" ...
        settings: The method's settings; its own for the set by default.
        splits_per_chunk: The number of splits to train before results are written; all by default.
        progress: Whether to show a bar.
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
            "command": "python -m experiments.uci " + shlex.join(sys.argv[1:]),
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


def run(settings: Settings, record: Record, *, device: torch.device) -> Findings:
    """Runs the method on every set; the splits that the record's folder has already are not run again."""
    began, rate, left_out = time.perf_counter(), 0.0, []
    method, results = METHODS[settings.method], {}
    progress = None if importlib.util.find_spec("tqdm") else False
    for name in [pathlib.Path(settings.csv).stem] if settings.csv else settings.sets:
        dataset = _dataset(name, settings)
        splits = split_numbers(settings.chosen_splits, len(dataset.splits))
        options = settings_of(settings.method, dataset, quick=settings.small)
        done = {entry["split"] for entry in read_results(_path(record.folder, settings.method, name))["splits"]}
        missing = set(splits) - done
        if missing and record.saved_only:
            raise FileNotFoundError(
                f"{str(record.folder)!r} must hold the results of {name}; {len(missing)} splits are missing."
            )
        cost = method.network_steps(dataset, len(missing), options)
        start = time.perf_counter()
        if settings.budget_seconds and start - began + rate * cost > settings.budget_seconds:
            left_out.append(f"{name}: left out, {start - began:.0f} s spent and {rate * cost:.0f} s expected.")
            continue
        results[name] = run_set(
            dataset, settings.method, splits, out=record.folder, device=str(device), settings=options,
            splits_per_chunk=settings.splits_per_chunk or None, progress=progress,
        )  # fmt: skip
        rate = (time.perf_counter() - start) / cost if cost else rate
        print(result_line(results[name], gap=settings.gap), file=sys.stderr, flush=True)
    return _findings(settings, results, left_out)


def _dataset(name: str, settings: Settings) -> uci_data.Dataset:
    if settings.csv:
        return uci_data.from_csv(settings.csv, target=settings.target)
    return uci_data.load(name, gap=settings.gap)


def _findings(settings: Settings, results: Mapping[str, Any], left_out: Sequence[str]) -> Findings:
    kind = "gap" if settings.gap else "random 90/10"
    sentence = (
        f"Method: {settings.method}; means over {kind} splits ± the standard error over splits, in the units of the "
        "target. Everything is chosen inside the training rows of a split."
    )
    metrics = {name: summary(entry) for name, entry in results.items()}
    rows = [table_row(entry, gap=settings.gap) for entry in results.values()]
    tables = {"Beside published results": markdown_table(rows)} if rows else {}
    return Findings("The UCI table", [sentence, *left_out], metrics, tables)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="experiments.uci", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--method", choices=sorted(METHODS), default="faithful")
    parser.add_argument("--sets", help="names with commas; by default all nine, the smallest first")
    parser.add_argument(
        "--splits", help="'all', a count, a range as 0-4 or a list as 0,7; 'gap' or 'gap:0-4' for the gap splits"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=pathlib.Path, help="the folder of the results; by default out/uci")
    parser.add_argument("--budget-seconds", type=float, default=0.0, help="start no set that would overrun it")
    parser.add_argument("--splits-per-chunk", type=int, default=0, help="write results after this many splits")
    parser.add_argument("--quick", action="store_true", help="the five small sets, 5 splits, fewer draws and steps")
    parser.add_argument("--csv", default="", help="a table of your own instead of the nine sets")
    parser.add_argument("--target", default="", help="the column of --csv to predict")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> Findings:
    """Runs the experiment from the command line."""
    arguments = _arguments(argv)
    base = Settings.quick() if arguments.quick else Settings()
    try:
        settings = replace(
            base, method=arguments.method, splits=arguments.splits or base.splits, csv=arguments.csv,
            sets=tuple(arguments.sets.split(",")) if arguments.sets else base.sets, target=arguments.target,
            budget_seconds=arguments.budget_seconds, splits_per_chunk=arguments.splits_per_chunk,
        )  # fmt: skip
    except ValueError as error:
        raise SystemExit(str(error).replace("`csv` and `target`", "`--csv` and `--target`")) from None
    folder = arguments.out or pathlib.Path("out") / ("uci-quick" if arguments.quick else "uci")
    return reproduce(
        "uci", settings=settings, folder=folder / "gap" if settings.gap else folder, device=arguments.device,
        command=shlex.join(["python", "-m", "experiments.uci", *(sys.argv[1:] if argv is None else argv)]),
    )  # fmt: skip
