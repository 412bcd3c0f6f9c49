"""The command that runs one of the paper's experiments.

python -m experiments NAME [--quick] [--out FOLDER] [--device auto] [--set KEY=VALUE] [--figures-only] [--json]
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import pathlib
import sys
import time
from collections.abc import Sequence

from experiments import NAMES
from experiments.reproduction import experiment_module, reproduce, settings_of, show
from experiments.uci import run as uci


def _parser(name: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments",
        description=__doc__,
        epilog=_settings_table(name) if name in NAMES and name != "uci" else "uci has options of its own: uci --help",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--quick", action="store_true", help="a small version, minutes on two cores")
    parser.add_argument("--out", default="out", help="the folder for results (default: %(default)s)")
    parser.add_argument("--device", default="auto", help='"auto", "cpu", "cuda" (default: %(default)s)')
    parser.add_argument("--figures-only", action="store_true", help="draw from what an earlier run saved")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change one of the settings")
    parser.add_argument("--json", action="store_true", help="print the metrics as JSON")
    return parser


def _settings_table(name: str) -> str:
    settings = experiment_module(name).Settings
    full, quick = settings(), settings.quick()
    rows = [("setting", "value", "with --quick")] + [
        (field.name, str(getattr(full, field.name)), str(getattr(quick, field.name)))
        for field in dataclasses.fields(full)
    ]
    return "\n".join(f"  {key:24} {value:40} {small}" for key, value, small in rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    as_json = "--json" in arguments
    if arguments[:1] == ["uci"]:
        with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
            findings = uci.main([argument for argument in arguments[1:] if argument != "--json"])
    else:
        options = _parser(next(iter(arguments), None)).parse_args(arguments)
        start = time.perf_counter()
        changes = [f"--set {change}" for change in options.set]
        command = " ".join(["python -m experiments", options.name, *["--quick"] * options.quick, *changes])
        with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
            findings = reproduce(
                options.name,
                settings=settings_of(options.name, quick=options.quick, changes=options.set),
                out=options.out,
                device=options.device,
                figures_only=options.figures_only,
                command=command,
            )
        folder = pathlib.Path(options.out) / options.name
        print(f"{time.perf_counter() - start:.0f} s; files in {folder}", file=sys.stderr)
    if as_json:
        print(json.dumps({"name": arguments[0], "title": findings.title, "metrics": findings.metrics}, indent=2))
    else:
        show(findings)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
