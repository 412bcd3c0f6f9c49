"""What a benchmark leaves behind: its last figures, the figures of every run before, the goals it missed."""

from __future__ import annotations

import datetime
import json
import pathlib
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dropbayes.runtime import files

RESULTS = pathlib.Path(__file__).parent / "results"


@dataclass(frozen=True)
class Goal:
    """A figure and the bound it should keep, one of `at_least` and `at_most`."""

    name: str
    measured: float
    at_least: float | None = None
    at_most: float | None = None

    @property
    def met(self) -> bool:
        above = self.at_least is None or self.measured >= self.at_least
        return above and (self.at_most is None or self.measured <= self.at_most)

    def __str__(self) -> str:
        bound = f"at least {self.at_least:g}" if self.at_least is not None else f"at most {self.at_most:g}"
        return f"{self.name}: {self.measured:.3g} (goal: {bound})"


def environment() -> dict[str, Any]:
    """The commit, the processor and the versions that figures belong to."""
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": _commit(),
        "cpu": _cpu_model(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def write(
    name: str, measurements: Mapping[str, Any], goals: Sequence[Goal] = (), *, folder: pathlib.Path = RESULTS
) -> None:
    """Writes the figures to `NAME.json`, adds them to `history/NAME.jsonl` and prints the goals that were missed."""
    document = {"about": environment(), **measurements}
    past = folder / "history" / f"{name}.jsonl"
    past.parent.mkdir(parents=True, exist_ok=True)
    before = past.read_text() if past.exists() else ""
    files.write_text(past, before + json.dumps(document) + "\n")
    files.write_text(folder / f"{name}.json", json.dumps(document, indent=1) + "\n")
    missed = [goal for goal in goals if not goal.met]
    if goals:
        print(f"\n{len(goals) - len(missed)} of {len(goals)} goals met" + ("; missed:" if missed else "."))
    for goal in missed:
        print(f"- {goal}")


def _commit() -> str:
    """The commit of the working tree, marked where files differ from it."""
    described = _output(
        "git", "-C", str(RESULTS.parent), "describe", "--always", "--dirty=, with changes", "--exclude=*"
    )
    return described or "unknown"


def _cpu_model() -> str:
    for command in (("lscpu",), ("sysctl", "machdep.cpu.brand_string")):
        for line in _output(*command).splitlines():
            title, _, model = line.partition(":")
            if title.strip() in ("Model name", "machdep.cpu.brand_string"):
                return f"{model.strip()} ({platform.machine()})"
    return platform.processor() or platform.machine()


def _output(*command: str) -> str:
    """What a program prints; nothing where there is no such program."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
