"""Parquet in, Parquet out, one part at a time: each is written whole or not at all, and a second run writes the rest.

The rows are cut into parts by the input alone. An engine only decides where and when a part is made; a worker that dies
costs the part it was at, which is made again.
"""

import contextlib
import functools
import itertools
import json
import os
import pathlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyarrow import parquet

from dropbayes.app.distributed.engines import ENGINES
from dropbayes.app.models.predictor import Predictor
from dropbayes.app.tables import write_tables
from dropbayes.runtime import files
from dropbayes.runtime.devices import cpu_threads
from dropbayes.runtime.progress import ProgressBar
from dropbayes.runtime.validation import check_choice


@dataclass(frozen=True)
class Part:
    """Some consecutive rows of one input file, and the file their prediction goes to."""

    source: str
    first: int
    n_rows: int
    output: str

    @property
    def is_written(self) -> bool:
        """Whether its file is there, whole."""
        try:
            return parquet.read_metadata(self.output).num_rows == self.n_rows
        except (OSError, pa.ArrowException):
            return False

    def blocks(self, block_rows: int = 4096) -> Iterator[pa.Table]:
        """Its rows in batches, from the row groups of its file that hold them."""
        with parquet.ParquetFile(self.source, pre_buffer=False) as file:
            sizes = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
            ends = list(itertools.accumulate(sizes))
            stop = self.first + self.n_rows
            groups = [g for g, end in enumerate(ends) if end > self.first and end - sizes[g] < stop]
            position = ends[groups[0]] - sizes[groups[0]]
            for batch in file.iter_batches(block_rows, row_groups=groups, use_threads=False):
                low, high = max(self.first - position, 0), min(stop - position, batch.num_rows)
                if low < high:
                    yield pa.Table.from_batches([batch.slice(low, high - low)])
                position += batch.num_rows


def write_part(predictor: Predictor, prefix: str | None, part: Part) -> int:
    """Predicts and writes one part on one core, as there are as many workers; returns its number of rows."""

    def predicted() -> Iterator[pa.Table]:
        position = part.first
        for table in part.blocks():
            try:
                yield predictor.add_columns(table, prefix=prefix)
            except ValueError as error:
                raise ValueError(f"{part.source!r}, counted from its row {position}: {error}") from None
            position += table.num_rows

    with cpu_threads(1):
        write_tables(part.output, predicted())
    return part.n_rows


def predict_parquet(
    predictor: Predictor,
    source: files.AnyPath,
    folder: files.AnyPath,
    *,
    engine: str = "processes",
    n_workers: int | None = None,
    address: str | None = None,
    prefix: str | None = None,
    part_rows: int = 2**15,
    progress: bool | None = None,
) -> int:
    """Predicts the rows of a Parquet file, or of all in a folder, into a folder of Parquet files in the same order.

    Each file of the folder holds some rows with the columns that `dropbayes predict` adds. Parts that an earlier run
    finished are left as they are; a folder with the prediction of another model, other settings or other rows, or that
    another run fills, is refused. Returns the number of rows predicted in this run.

    Args:
        predictor: The model.
        source: A Parquet file, or a folder of them, taken in the order of their names.
        folder: The folder to write to.
        engine: "processes", "ray", "dask" or "spark".
        n_workers: The workers at a time; one per core by default.
        address: The address of a cluster; by default the engine runs on this machine.
        prefix: The prefix of the new columns' names; by default the target and `_`.
        part_rows: The most rows of a part.
        progress: Whether to show a bar; by default in a terminal.
    """
    check_choice("engine", engine, ENGINES)
    if part_rows < 1 or (n_workers is not None and n_workers < 1):
        raise ValueError(f"`part_rows` and `n_workers` must be at least 1; got {part_rows} and {n_workers}.")
    source, folder = pathlib.Path(source), pathlib.Path(folder)
    if not source.exists():
        raise FileNotFoundError(f"there is no file or folder {str(source)!r}.")
    sources = [source.resolve()]
    if source.is_dir():  # in which folders may have such names, too, and what is unfinished begins with "." or "_"
        paths = [path.relative_to(source) for path in source.rglob("*.parquet") if path.is_file()]
        sources = sorted((source / path).resolve() for path in paths if not any(part[0] in "._" for part in path.parts))
    if not sources:
        raise ValueError(f"{str(source)!r} holds no Parquet file.")
    if source.is_dir() and folder.resolve().is_relative_to(source.resolve()):
        raise ValueError(f"`folder` must lie outside the input {str(source)!r}, of which it would be a part.")
    parts = plan_parts(sources, folder, part_rows)
    with _claimed(folder, predictor, sources, prefix, part_rows):
        missing = [part for part in parts if not part.is_written]
        workers = min(n_workers or os.cpu_count() or 1, max(len(missing), 1))
        total, rows_missing = (sum(part.n_rows for part in some) for some in (parts, missing))
        with ProgressBar("predict", total, unit="rows", initial=total - rows_missing, show=progress) as bar:
            if missing:
                make = functools.partial(write_part, predictor, prefix)  # small, and picklable
                with contextlib.closing(ENGINES[engine](make, missing, workers, address)) as finished:
                    for rows in finished:
                        bar.advance(rows)
    if lacking := [part for part in missing if not part.is_written]:
        raise OSError(f"{len(lacking)} parts were reported as written but are not in {str(folder)!r}; is it shared?")
    return rows_missing


def plan_parts(sources: Sequence[pathlib.Path], folder: pathlib.Path, part_rows: int) -> list[Part]:
    """The parts of some files, numbered in the order of their rows."""
    parts: list[Part] = []
    for source in sources:
        try:
            n_rows = parquet.read_metadata(source).num_rows
        except pa.ArrowException:
            raise ValueError(f"{str(source)!r} is not a whole Parquet file.") from None
        for first in range(0, n_rows, part_rows):
            output = folder / f"part-{len(parts):06d}.parquet"
            parts.append(Part(str(source), first, min(part_rows, n_rows - first), str(output)))
    if not parts:
        raise ValueError(f"{str(sources[0].parent)!r}: no file has a row.")
    return parts


@contextlib.contextmanager
def _claimed(
    folder: pathlib.Path, predictor: Predictor, sources: Sequence[pathlib.Path], prefix: str | None, part_rows: int
) -> Iterator[None]:
    """Holds the folder for a prediction by a description of it; raises if something or someone else is in it."""
    plan = folder / "_prediction.json"
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{str(folder)!r} is a file; name a folder for the parts.")
    if not plan.exists() and folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{str(folder)!r} is not empty and holds no prediction; choose another folder.")
    digests = [(source.name, files.digest(source)) for source in sources]
    settings = {"n_draws": predictor.n_draws, "seed": predictor.seed, "coverage": predictor.coverage}
    model = {"format": 2, "model": predictor.fingerprint, **settings, "prefix": prefix}
    text = json.dumps({**model, "part_rows": part_rows, "sources": digests}, indent=1) + "\n"
    if plan.exists() and plan.read_text() != text:
        fault = f"{str(folder)!r} holds the prediction of another model, other settings or other rows"
        raise FileExistsError(f"{fault}; choose another folder, or remove it.")
    folder.mkdir(exist_ok=True)
    if not plan.exists():
        files.write_text(plan, text)
    with open(plan, "r+b") as file:  # a killed run holds it no longer
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FileExistsError(f"another run fills {str(folder)!r}; wait for its end, or choose another.") from None
        except (ImportError, OSError):  # Windows, or a file system without locks
            pass
        _remove_leftovers(folder)
        yield
        _remove_leftovers(folder)


def _remove_leftovers(folder: pathlib.Path) -> None:
    """Removes the unfinished parts of killed workers."""
    for leftover in folder.glob(".part-*"):
        leftover.unlink(missing_ok=True)
