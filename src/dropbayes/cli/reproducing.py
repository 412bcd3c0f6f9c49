"""`dropbayes reproduce`: an experiment of the paper."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Sequence
from typing import Any

from dropbayes.cli.messages import complain, out, print_json, table
from dropbayes.experiments import NAMES

__all__ = ["NAMES", "describe", "reproduce", "reproduce_uci"]


def describe(name: str) -> None:
    """Prints the options of one experiment: its settings with their values in full and with --quick."""
    if name == "uci":
        reproduce_uci(["--help"], folder="")
        return
    import dataclasses
    import inspect

    from dropbayes.experiments.reproduction import experiment_module

    module = experiment_module(name)
    full, quick = module.Settings(), module.Settings.quick()
    meanings = _meanings(inspect.getdoc(module.Settings) or "")
    rows = [
        [field.name, str(getattr(full, field.name)), str(getattr(quick, field.name)), meanings.get(field.name, "")]
        for field in dataclasses.fields(full)
    ]
    console = out()
    console.print(f"dropbayes reproduce {name} [--quick] [--out FOLDER] [--device NAME] [--set KEY=VALUE] ...\n")
    console.print((inspect.getdoc(module) or "").split("\n\n")[0] + "\n", markup=False)
    console.print(table("Settings, changed with --set", ["key", "value", "with --quick", "meaning"], rows))


def _meanings(docstring: str) -> dict[str, str]:
    """The sentences that a docstring gives each of its arguments."""
    meanings: dict[str, str] = {}
    name = ""
    for line in re.split(r"(?:Args|Attributes):\n", docstring, maxsplit=1)[-1].splitlines():
        text = line.strip()
        indent = len(line) - len(line.lstrip())
        if indent == 4 and ":" in text:
            name, _, meaning = text.partition(":")
            meanings[name] = meaning.strip()
        elif name and text:
            meanings[name] += f" {text}"
    return meanings


def reproduce(
    name: str, *, quick: bool, folder: str, device: str, changes: Sequence[str], figures_only: bool, as_json: bool
) -> None:
    """Runs one experiment; see `dropbayes reproduce --help`."""
    from dropbayes.experiments import reproduction

    settings = reproduction.settings_of(name, quick=quick, changes=changes)
    command = " ".join(["dropbayes reproduce", name, *(["--quick"] if quick else [])])
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        findings = reproduction.reproduce(
            name, settings=settings, out=folder, device=device, figures_only=figures_only, command=command
        )
    _say(name, findings, f"{folder}/{name}", as_json=as_json)


def _say(name: str, findings: Any, folder: str, *, as_json: bool) -> None:
    if as_json:
        print_json({"name": name, "title": findings.title, "metrics": findings.metrics, "folder": folder})
        return
    from rich.markdown import Markdown
    from rich.markup import escape

    console = out()
    console.print(f"[bold]{escape(findings.title)}[/bold]\n")
    for sentence in findings.sentences:
        console.print(Markdown(sentence))
        console.print()
    for heading, text in findings.tables.items():
        console.print(f"[bold]{escape(heading)}[/bold]")
        console.print(Markdown(text))
    console.print(f"files in [bold]{escape(folder)}[/bold]")


def reproduce_uci(arguments: Sequence[str], *, folder: str, as_json: bool = False) -> int:
    """Runs the table of the UCI sets with options of its own; returns the exit code."""
    from dropbayes.experiments.uci import run as uci

    try:
        with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
            findings = uci.main([*arguments, "--out", folder])
    except SystemExit as ended:  # argparse has said what was wrong; the module itself ends with a sentence
        if isinstance(ended.code, str):
            complain(ended.code)
            return 2
        return int(ended.code or 0)
    _say("uci", findings, folder, as_json=as_json)
    return 0
