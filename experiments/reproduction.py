"""Runs an experiment by name with given settings, and writes its files."""

from __future__ import annotations

import importlib
import json
import pathlib
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from dropbayes.runtime.devices import available_device
from experiments import NAMES
from experiments.record import Findings, Record

KEPT = pathlib.Path(__file__).parent / "results"

__all__ = ["experiment_module", "reproduce", "settings_of", "show"]


def reproduce(
    name: str,
    *,
    settings: Any = None,
    out: str | pathlib.Path = "out",
    folder: str | pathlib.Path | None = None,
    device: str = "auto",
    figures_only: bool = False,
    command: str | None = None,
) -> Findings:
    """The findings of one experiment, whose files are written to the folder `out/name`.

    Args:
        name: One of `NAMES`.
        settings: An instance of the module's `Settings`; the full size by default.
        out: The folder that holds a folder for each experiment.
        folder: The folder of this experiment; by default the one of its name in `out`.
        device: "auto", "cpu", "cuda" ...
        figures_only: Whether to draw from saved stages without computing any: those in the folder, or those of the
            run whose results are kept in `experiments/results`.
        command: The command that the page names as its origin.
    """
    settings = settings_of(name) if settings is None else settings
    module = experiment_module(name)
    place = pathlib.Path(out) / name if folder is None else pathlib.Path(folder)
    record = Record(place, settings, saved_only=figures_only, kept=KEPT / name if figures_only else None)
    computing_on = available_device("cpu" if getattr(module, "CPU_ONLY", False) else device)
    findings: Findings = module.run(settings, record, device=computing_on)
    record.write(findings, command=command or f"python -m experiments {name}", device=computing_on)
    return findings


def experiment_module(name: str) -> Any:
    """The module that holds the `Settings` of an experiment and its `run`."""
    return importlib.import_module(f"experiments.{'uci.run' if name == 'uci' else name}")


def show(findings: Findings) -> None:
    """Prints the findings as Markdown."""
    print(f"# {findings.title}\n")
    print("\n\n".join([*findings.sentences, *findings.tables.values()]))


def settings_of(name: str, *, quick: bool = False, changes: Sequence[str] = ()) -> Any:
    """The settings of an experiment.

    Args:
        name: One of `NAMES`.
        quick: Whether to take the small version.
        changes: The fields to change, as strings `KEY=VALUE` with values in JSON (a bare word is a string).
    """
    if name not in NAMES:
        raise ValueError(f"`name` must be one of {', '.join(NAMES)}; got {name!r}.")
    settings_class = experiment_module(name).Settings
    settings = settings_class.quick() if quick else settings_class()
    known = {field.name for field in fields(settings)}
    for change in changes:
        key, _, text = change.partition("=")
        if key not in known:
            raise ValueError(f"`--set` must name one of {', '.join(sorted(known))}; got {key!r}.")
        try:
            value = json.loads(text)
        except json.JSONDecodeError:
            value = text
        if isinstance(getattr(settings, key), tuple):
            value = tuple(value) if isinstance(value, list) else (value,)
        settings = replace(settings, **{key: value})
    return settings
