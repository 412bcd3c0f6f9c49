"""What the tests of the command line share: a way to call it, and two tiny models."""

import contextlib
import io
import pathlib
import sys
from dataclasses import dataclass

import numpy as np

from dropbayes.cli import main

TINY = ["--hidden", "4", "--n-steps", "5", "--n-networks", "2", "--n-draws", "3", "--drop-prob", "0.1", "--weight-decay", "1e-4"]  # fmt: skip


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
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
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
        result = run("fit", folder / "train.csv", "--target", target, "--ignore", other, "--out", folder / name, *TINY)
        assert result.code == 0, result.err
