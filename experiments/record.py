"""The record of an experiment: saved stages to resume from, figures, results and a page with its findings."""

from __future__ import annotations

import datetime
import hashlib
import json
import pathlib
import platform
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from typing import Any

import numpy as np
import torch

from dropbayes.runtime import files
from dropbayes.runtime.validation import NumpyArray

__all__ = ["Array", "Arrays", "Findings", "Record", "markdown_lines", "markdown_table", "results_text"]

Array = NumpyArray
Arrays = dict[str, Array]


@dataclass(frozen=True)
class Findings:
    """The results of an experiment.

    Attributes:
        title: The title of the page.
        sentences: The results in words, for the page.
        metrics: The numbers by name, possibly nested, for `results.json`.
        tables: The Markdown tables by heading.
        figures: The plotting functions by file name, called only if matplotlib is installed.
    """

    title: str
    sentences: Sequence[str]
    metrics: Mapping[str, Any]
    tables: Mapping[str, str] = field(default_factory=dict)
    figures: Mapping[str, Callable[[], Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Record:
    """A folder of results. It stores the result of each stage, so that an interrupted run continues where it stopped.

    Args:
        folder: The folder for all files.
        settings: The experiment's settings.
        saved_only: Whether to draw from saved stages alone: a missing one is then an error.
        kept: A folder of stages of an earlier run, for those that are not in `folder`.
    """

    folder: pathlib.Path
    settings: Any
    saved_only: bool = False
    kept: pathlib.Path | None = None

    def stage(self, name: str, compute: Callable[[], Arrays], *, key: Any = None) -> Arrays:
        """The arrays `compute` returns, from the folder if a run with the same `key` left them there.

        Args:
            name: The name of the stage and of its file.
            compute: The function that computes the arrays.
            key: The values that the arrays depend on; the experiment's settings by default.
        """
        path = self.folder / f"{name}.npz"
        stamp = _stamp(self.settings if key is None else key)
        for folder in filter(None, (self.folder, self.kept)):
            if (folder / path.name).exists():
                with np.load(folder / path.name) as saved:
                    if str(saved["stamp"]) == stamp:
                        return {key: saved[key] for key in saved.files if key != "stamp"}
        if self.saved_only:
            raise FileNotFoundError(
                f"{str(path)!r} must hold the stage {name!r} of these settings and data; it is missing or of others. "
                "Run the experiment without --figures-only, with the same --quick and --set options."
            )
        arrays = compute()
        self.folder.mkdir(parents=True, exist_ok=True)
        with files.replacement(path) as file:
            np.savez_compressed(file, stamp=np.array(stamp), **arrays)  # type: ignore[arg-type]
        return arrays

    def checkpoint(self, name: str) -> pathlib.Path:
        """The file in which a long training of this name keeps its state, another one for other settings."""
        self.folder.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256(_stamp(self.settings).encode()).hexdigest()[:8]
        return self.folder / f"{name}-{digest}.checkpoint"

    def write(self, findings: Findings, *, command: str, device: torch.device) -> list[str]:
        """Writes figures, `results.json` and `page.md`; returns the names of the figures, none without matplotlib."""
        self.folder.mkdir(parents=True, exist_ok=True)
        figures = _draw(self.folder, findings)
        path = self.folder / "results.json"
        about = {
            "command": command,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU",
            "torch": torch.__version__,
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        }
        kept = path if path.exists() or self.kept is None else self.kept.with_suffix(".json")
        if self.saved_only and kept.exists():  # figures drawn elsewhere are still of the run that computed them
            about = json.loads(kept.read_text())["about"]
        report = {
            "about": about,
            "settings": _plain(self.settings),
            "sentences": list(findings.sentences),
            "tables": dict(findings.tables),
            "metrics": _plain(findings.metrics),
        }
        files.write_text(path, json.dumps(report, indent=1, ensure_ascii=False) + "\n")
        images = "".join(f"\n![{name}]({name}.png)\n" for name in figures)
        files.write_text(self.folder / "page.md", f"# {findings.title}\n\n{results_text(report)}\n{images}")
        return figures


def results_text(report: Mapping[str, Any]) -> str:
    """The findings of a run in Markdown, and what made them."""
    about = report["about"]
    made = f"Made by `{about['command']}` on {about['device']}, torch {about['torch']}, {about['date']}."
    tables = [f"**{heading}**\n\n{table}" for heading, table in report["tables"].items()]
    return "\n\n".join([" ".join(report["sentences"]), *tables, made])


def _stamp(key: Any) -> str:
    return json.dumps(_plain(key), sort_keys=True)


def _plain(value: Any) -> Any:
    """`value` as JSON types, with numbers to 6 digits."""
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple, np.ndarray)):
        return [_plain(entry) for entry in value]
    if isinstance(value, (float, np.floating)):
        return float(f"{value:.6g}") if np.isfinite(value) else None
    return value.item() if isinstance(value, np.generic) else value


def _draw(folder: pathlib.Path, findings: Findings) -> list[str]:
    try:
        import matplotlib
    except ModuleNotFoundError:
        print("No figures: matplotlib is not installed. Later: the same command with --figures-only.", file=sys.stderr)
        return []
    style = {
        "font.size": 9, "axes.titlesize": 10, "axes.spines.top": False, "axes.spines.right": False,
        "legend.frameon": False, "axes.titlelocation": "left",
    }  # fmt: skip
    with matplotlib.rc_context(style):
        for name, make in findings.figures.items():
            make().savefig(folder / f"{name}.png", dpi=140)
    return list(findings.figures)


def markdown_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table of `rows`, columns named by the first.

    Example:
        >>> print(markdown_table([{"network": "ReLU", "error": 0.25}]))
        | network | error |
        |---|---|
        | ReLU | 0.25 |
    """
    return markdown_lines(list(rows[0]), [[_cell(row.get(name, "")) for name in rows[0]] for row in rows])


def markdown_lines(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table of texts under a header."""
    lines = [f"| {' | '.join(line)} |" for line in (header, *rows)]
    return "\n".join([lines[0], "|---" * len(header) + "|", *lines[1:]])


def _cell(value: Any) -> str:
    if not isinstance(value, (float, np.floating)):
        return str(value)
    number = float(value)
    return "–" if not np.isfinite(number) else f"{number:.4g}" if abs(number) < 1000 else f"{number:,.0f}"
