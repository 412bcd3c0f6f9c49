"""Model folders: the network in `model.safetensors`, what it reads in `columns.json`; replaced whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import secrets
import shutil
from dataclasses import dataclass
from typing import Any

from dropbayes import files
from dropbayes.tables import Schema
from dropbayes.tables.columns import as_json, from_json

__all__ = ["COLUMNS", "FORMAT", "MODEL", "Model", "check_place", "load", "save"]

FORMAT = 1
MODEL, COLUMNS = "model.safetensors", "columns.json"


@dataclass(frozen=True, eq=False)
class Model:
    """A fitted estimator with what it reads and how it came about.

    Attributes:
        estimator: A `DropoutRegressor` or `DropoutClassifier`.
        schema: Its columns.
        origin: What it was fitted on and with: file, rows, settings, versions.
        path: Its folder.
    """

    estimator: Any
    schema: Schema
    origin: dict[str, Any]
    path: pathlib.Path


def check_place(path: pathlib.Path) -> None:
    """Raises unless a model may be written there: a new folder, an empty one, or one that holds a model."""
    if path.exists() and not path.is_dir():
        raise FileExistsError(f"{str(path)!r} is a file; name a folder for the model.")
    if path.is_dir() and any(path.iterdir()) and {entry.name for entry in path.iterdir()} != {MODEL, COLUMNS}:
        raise FileExistsError(f"{str(path)!r} holds other files than a model; name a new folder for the model.")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"the folder {str(path.parent)!r} does not exist; make it first.")


def save(model: Model) -> None:
    """Writes the folder of a model; the previous one stays as it was if anything fails."""
    path = pathlib.Path(os.path.abspath(model.path))
    check_place(path)
    mark = secrets.token_hex(4)
    part, old = path.with_name(f".{path.name}.{mark}.part"), path.with_name(f".{path.name}.{mark}.old")
    try:
        part.mkdir()
        model.estimator.save(part / MODEL)
        description = {
            "format": FORMAT,
            "sha256": _digest(part / MODEL),
            **as_json(model.schema),
            "origin": model.origin,
        }
        files.write_text(part / COLUMNS, json.dumps(description, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
        if path.exists():
            os.rename(path, old)
        try:
            os.rename(part, path)
        except BaseException:
            if old.exists():
                os.rename(old, path)
            raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def load(path: str | os.PathLike[str]) -> Model:
    """The model in a folder.

    Raises:
        ValueError: It is no model, a damaged one, or of a later format.
    """
    path = pathlib.Path(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no model folder {str(path)!r}; make one with dropbayes fit.")
    if not path.is_dir() or not (path / COLUMNS).is_file() or not (path / MODEL).is_file():
        raise ValueError(f"{str(path)!r} is no model folder: it must hold {COLUMNS} and {MODEL}. See dropbayes fit.")
    description = _described(path)
    if _digest(path / MODEL) != description["sha256"]:
        raise ValueError(f"{str(path / MODEL)!r} is not the file that {COLUMNS} belongs to; fit the model again.")
    from dropbayes.estimators import DropoutClassifier, DropoutRegressor

    schema = description["schema"]
    kind = DropoutRegressor if schema.task == "regression" else DropoutClassifier
    try:
        estimator = kind.load(path / MODEL)
    except ValueError as error:
        raise ValueError(f"{str(path / MODEL)!r}: {error}") from None
    if estimator.n_features_in_ != len(schema.inputs):
        raise ValueError(
            f"{str(path)!r}: the network has {estimator.n_features_in_} inputs, {COLUMNS} names {len(schema.inputs)}; "
            "fit the model again."
        )
    return Model(estimator, schema, description["origin"], path)


def _described(path: pathlib.Path) -> dict[str, Any]:
    try:
        values = json.loads((path / COLUMNS).read_text(encoding="utf-8"))
        number = values["format"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(f"{str(path / COLUMNS)!r} is damaged or no file of dropbayes; fit the model again.") from None
    if number not in range(1, FORMAT + 1):
        raise ValueError(
            f"{str(path / COLUMNS)!r} has the format {number!r}; this version reads 1 to {FORMAT}. Upgrade."
        )
    try:
        return {"schema": from_json(values), "sha256": str(values["sha256"]), "origin": dict(values["origin"])}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{str(path / COLUMNS)!r} lacks parts or has unknown ones; fit the model again.") from None


def _digest(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
