"""The command that runs one of the paper's experiments.

python -m dropbayes.experiments NAME [--quick] [--out DIR] [--device auto] [--set KEY=VALUE] [--figures-only]
"""

from __future__ import annotations

import argparse
import importlib
import json
import pathlib
import sys
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from dropbayes.experiments.record import Findings, Record, device_of

NAMES = ("adversarial", "co2", "convolution", "reinforcement", "recurrent", "rotation", "solar", "toy")


def reproduce(
    name: str,
    *,
    settings: Any = None,
    out: str | pathlib.Path = "out",
    device: str = "auto",
    figures_only: bool = False,
    command: str | None = None,
) -> Findings:
    """The findings of one experiment, whose files are written to the folder `out/name`.

    Args:
        name: One of `NAMES`.
        settings: The module's `Settings`; the full size by default.
        out: The folder that holds a folder for each experiment.
        device: "auto", "cpu", "cuda" ...
        figures_only: Draw from saved stages without computing any.
        command: What to name on the page.
    """
    if name not in NAMES:
        raise ValueError(f"`name` must be one of {', '.join(NAMES)}; got {name!r}.")
    module = importlib.import_module(f"dropbayes.experiments.{name}")
    settings = module.Settings() if settings is None else settings
    record = Record(pathlib.Path(out) / name, settings, saved_only=figures_only)
    findings: Findings = module.run(settings, record, device=device_of(device))
    record.write(findings, command=command or f"python -m dropbayes.experiments {name}")
    return findings


def changed(settings: Any, changes: Sequence[str]) -> Any:
    """`settings` with fields set from texts `KEY=VALUE`, values in JSON (a bare word is a string)."""
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m dropbayes.experiments", description=__doc__)
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--quick", action="store_true", help="a small version, minutes on two cores")
    parser.add_argument("--out", default="out", help="the folder for results (default: %(default)s)")
    parser.add_argument("--device", default="auto", help='"auto", "cpu", "cuda" (default: %(default)s)')
    parser.add_argument("--figures-only", action="store_true", help="draw from what an earlier run saved")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change one of the settings")
    options = parser.parse_args(arguments)
    module = importlib.import_module(f"dropbayes.experiments.{options.name}")
    settings = changed(module.Settings.quick() if options.quick else module.Settings(), options.set)
    start = time.perf_counter()
    command = " ".join(["python -m dropbayes.experiments", options.name, *(["--quick"] if options.quick else [])])
    findings = reproduce(
        options.name, settings=settings, out=options.out, device=options.device, figures_only=options.figures_only,
        command=command,
    )  # fmt: skip
    print(f"# {findings.title}\n")
    print("\n\n".join([*findings.sentences, *findings.tables.values()]))
    print(
        f"\n{time.perf_counter() - start:.0f} s; files in {pathlib.Path(options.out) / options.name}", file=sys.stderr
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
