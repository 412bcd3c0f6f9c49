"""The command that runs one of the paper's experiments.

python -m dropbayes.experiments NAME [--quick] [--out DIR] [--device auto] [--set KEY=VALUE] [--figures-only]
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import time
from collections.abc import Sequence

from dropbayes.experiments import NAMES
from dropbayes.experiments.reproduction import reproduce, settings_of, show


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
    settings = settings_of(options.name, quick=options.quick, changes=options.set)
    start = time.perf_counter()
    command = " ".join(["python -m dropbayes.experiments", options.name, *(["--quick"] if options.quick else [])])
    findings = reproduce(
        options.name, settings=settings, out=options.out, device=options.device, figures_only=options.figures_only,
        command=command,
    )  # fmt: skip
    show(findings)
    print(
        f"\n{time.perf_counter() - start:.0f} s; files in {pathlib.Path(options.out) / options.name}", file=sys.stderr
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
