"""What the tests of the command line share: a way to call it, two tiny models, and checks of what it says."""

import contextlib
import csv
import functools
import io
import pathlib
import re
import sys
from dataclasses import dataclass
from unittest import mock

import numpy as np
import typer

from dropbayes.app.cli import main
from dropbayes.app.models.model import Model
from dropbayes.app.tables import open_table
from dropbayes.estimators.columns import encode

TINY = ["--hidden", "4", "--n-steps", "5", "--n-networks", "2", "--n-draws", "3", "--drop-prob", "0.1", "--weight-decay", "1e-4", "--noise", "constant"]  # fmt: skip
# A process makes its parser once, for one call; here hundreds of calls share one, of which none changes it.
get_group = functools.cache(typer.main.get_group)


@dataclass(frozen=True)
class Result:
    code: int
    out: bytes
    err: str

    @property
    def text(self) -> str:
        return self.out.decode()


def run(*arguments: object, stdin: bytes = b"") -> Result:
    """The exit code and the streams of one call, in this process."""
    out, err = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.TextIOWrapper(io.BytesIO(), "utf-8")
    previous, sys.stdin = sys.stdin, io.TextIOWrapper(io.BytesIO(stdin), "utf-8")
    try:
        once = mock.patch.object(typer.main, "get_group", get_group)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), once:
            code = main([str(argument) for argument in arguments])
    finally:
        sys.stdin = previous
    out.flush()
    err.flush()
    return Result(code, out.buffer.getvalue(), err.buffer.getvalue().decode())


def table(n_rows: int, seed: int = 0) -> str:
    """A table with a number that is sometimes missing, a category, a boolean, a number target and a class target."""
    generator = np.random.default_rng(seed)
    lines = ["size,city,new,price,kind"]
    for row in range(n_rows):
        size, city, new = generator.normal(), ("Oslo", "Rome")[generator.integers(2)], bool(generator.integers(2))
        price = 2 * size + (city == "Rome") + 0.1 * generator.normal()
        kind = ("low", "middle", "high")[int(price > -1) + int(price > 1)]
        lines.append(f"{'' if row % 9 == 4 else f'{size:.4f}'},{city},{str(new).lower()},{price:.4f},{kind}")
    return "\n".join(lines) + "\n"


def make_models(folder: pathlib.Path) -> None:
    """Writes `train.csv`, and the models `numbers` and `classes` fitted to it."""
    (folder / "train.csv").write_text(table(60))
    for target, name in (("price", "numbers"), ("kind", "classes")):
        other = "kind" if target == "price" else "price"
        options = ["--target", target, "--ignore", other, *TINY, "--noise", "student"]
        result = run("fit", folder / "train.csv", "--out", folder / name, *options)
        assert result.code == 0, result.err


def rows_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text, newline="")))


def column(rows: list[dict[str, str]], name: str) -> np.ndarray:
    return np.array([float(row[name]) for row in rows])


def inputs(model: Model, path: pathlib.Path) -> np.ndarray:
    with open_table(path) as source:
        return np.concatenate([encode(model.schema, block, at=str).x for block in source.blocks()])


def check(result, code, pattern, *, out=None):
    """One line on standard error that says what was expected, details below it, nothing on standard output."""
    lines = [line for line in result.err.splitlines() if not line.startswith(("dropbayes: note: ", "  "))]
    assert result.code == code, result.err
    assert len(lines) == 1 and lines[0].startswith("dropbayes: error: "), result.err
    assert re.search(pattern, lines[0]), lines[0]
    assert "Traceback" not in result.err and "\x1b" not in result.err
    assert result.out == b"" if out is None else result.out.startswith(out) or result.out == b""
