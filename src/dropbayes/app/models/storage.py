"""Model folders, replaced atomically.

The networks are in `model.safetensors`, the columns, the calibration and the origin in `columns.json`, and a
readable summary in `card.md`.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import secrets
import shutil
from typing import Any

from dropbayes.app.models.card import card
from dropbayes.columns import Schema
from dropbayes.columns.schema import as_json, from_json
from dropbayes.estimators.ensembles import ClassEnsemble, RegressionEnsemble
from dropbayes.estimators.recalibration import Recalibration, with_recalibration, without_recalibration
from dropbayes.runtime import files

__all__ = ["CARD", "COLUMNS", "FORMAT", "MODEL", "check_place", "read", "write", "write_origin"]

FORMAT = 2
"""Format 2 added dates, notations, ranges and calibration; format 1 is read."""

MODEL, COLUMNS, CARD = "model.safetensors", "columns.json", "card.md"


def check_place(path: pathlib.Path) -> None:
    """Raises unless a model may be written there: a new folder, an empty one, or one that holds a model."""
    if path.exists() and not path.is_dir():
        raise FileExistsError(f"{str(path)!r} is a file; name a folder for the model.")
    entries = {entry.name for entry in path.iterdir()} if path.is_dir() else set()
    if entries and not {MODEL, COLUMNS} <= entries <= {MODEL, COLUMNS, CARD}:
        raise FileExistsError(f"{str(path)!r} is not empty and does not hold a model; choose another folder.")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"the folder {str(path.parent)!r} does not exist; make it first.")


def write(path: str | os.PathLike[str], estimator: Any, schema: Schema, origin: dict[str, Any]) -> None:
    """Writes the folder of a model; the previous one is unchanged if anything fails.

    Args:
        path: The folder.
        estimator: A fitted `DropoutRegressor` or `DropoutClassifier`.
        schema: Its columns.
        origin: The origin of the fit, as JSON values.
    """
    path = pathlib.Path(os.path.abspath(path))
    check_place(path)
    mark = secrets.token_hex(4)
    new, old = path.with_name(f".{path.name}.{mark}.part"), path.with_name(f".{path.name}.{mark}.old")
    try:
        new.mkdir()
        without_recalibration(estimator).save(new / MODEL)
        files.write_text(new / COLUMNS, _description(schema, origin, _digest(new / MODEL)))
        files.write_text(new / CARD, card(schema, origin, name=path.name))
        if path.exists():
            os.rename(path, old)
        try:
            os.rename(new, path)
        except BaseException:
            if old.exists():
                os.rename(old, path)
            raise
    finally:
        shutil.rmtree(new, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def write_origin(path: pathlib.Path, schema: Schema, origin: dict[str, Any]) -> None:
    """Writes the origin of a model, calibration included, into its folder; the networks are unchanged."""
    files.write_text(path / COLUMNS, _description(schema, origin, _digest(path / MODEL)))
    files.write_text(path / CARD, card(schema, origin, name=path.name))


def _description(schema: Schema, origin: dict[str, Any], digest: str) -> str:
    values = {"format": FORMAT, "sha256": digest, **as_json(schema), "origin": origin}
    return json.dumps(values, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def read(path: str | os.PathLike[str]) -> tuple[Any, Schema, dict[str, Any]]:
    """The estimator of a folder, with its recalibration if any, its columns and its origin.

    Raises:
        ValueError: The folder holds no model, a damaged one, or one of a later format.
    """
    path = pathlib.Path(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no model folder {str(path)!r}; fit a model first.")
    if not path.is_dir() or not (path / COLUMNS).is_file() or not (path / MODEL).is_file():
        raise ValueError(f"{str(path)!r} is not a model folder: it must hold {COLUMNS} and {MODEL}.")
    description = _read_description(path)
    if _digest(path / MODEL) != description["sha256"]:
        raise ValueError(f"{str(path / MODEL)!r} is not the file that {COLUMNS} belongs to; fit the model again.")
    schema = description["schema"]
    kind = RegressionEnsemble if schema.task == "regression" else ClassEnsemble
    try:
        estimator = kind.load(path / MODEL)
    except ValueError as error:
        raise ValueError(f"{str(path / MODEL)!r}: {error}") from None
    if estimator.n_features_in_ != len(schema.inputs):
        raise ValueError(
            f"{str(path)!r}: the network has {estimator.n_features_in_} inputs, {COLUMNS} names {len(schema.inputs)}; "
            "fit the model again."
        )
    return with_recalibration(estimator, description["calibration"]), schema, description["origin"]


def _read_description(path: pathlib.Path) -> dict[str, Any]:
    try:
        values = json.loads((path / COLUMNS).read_text(encoding="utf-8"))
        number = values["format"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(
            f"{str(path / COLUMNS)!r} is damaged or was not written by dropbayes; fit the model again."
        ) from None
    if number not in range(1, FORMAT + 1):
        raise ValueError(
            f"{str(path / COLUMNS)!r} has the format {number!r}; this version reads 1 to {FORMAT}. Upgrade."
        )
    try:
        origin = dict(values["origin"])
        return {
            "schema": from_json(values), "sha256": str(values["sha256"]), "origin": origin,
            "calibration": _calibration(origin.get("calibration")),
        }  # fmt: skip
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{str(path / COLUMNS)!r} lacks parts or has unknown ones; fit the model again.") from None


def _calibration(values: Any) -> Recalibration | None:
    if values is None:
        return None
    return Recalibration(values["method"], tuple(float(value) for value in values["values"]), int(values["n_rows"]))


def _digest(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
