"""Model folders, replaced atomically.

The networks are in `model.safetensors`, the columns, the calibration and the origin in `columns.json`, and a
readable summary in `card.md`.
"""

import contextlib
import hashlib
import html
import importlib.resources
import json
import os
import pathlib
import re
import tempfile
from typing import Any

import numpy as np

from dropbayes.estimators.columns import Column, Schema
from dropbayes.estimators.columns.schema import as_json, from_json
from dropbayes.estimators.ensembles import ClassEnsemble, Ensemble, RegressionEnsemble
from dropbayes.estimators.recalibration import Recalibration, with_recalibration
from dropbayes.runtime import files

FORMAT = 3

Origin = dict[str, Any]  #: The origin of a fit as JSON values: file, rows, settings, versions, scores, calibration.

MODEL, COLUMNS, CARD = "model.safetensors", "columns.json", "card.md"


def check_place(path: pathlib.Path) -> None:
    """Raises unless a model may be written there: a new folder, an empty one, or one that holds a model."""
    if path.exists() and not path.is_dir():
        raise FileExistsError(f"{str(path)!r} is a file; name a folder for the model.")
    entries = {entry.name for entry in path.iterdir()} if path.is_dir() else set()
    if entries and not {MODEL, COLUMNS} <= entries <= {MODEL, COLUMNS, CARD}:
        raise FileExistsError(f"{str(path)!r} is not empty and does not hold a model alone; choose another folder.")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"the folder {str(path.parent)!r} does not exist; make it first.")
    if os.path.ismount(path):
        raise OSError(f"{str(path)!r} is a mount point, which cannot be replaced; name a folder in it.")
    place = path.resolve().parent
    try:
        tempfile.TemporaryDirectory(dir=place).cleanup()
    except OSError as error:
        raise OSError(f"the folder {str(place)!r} cannot be written to: {error.strerror}; choose another.") from None


def write(path: files.AnyPath, estimator: Ensemble, schema: Schema, origin: Origin) -> str:
    """Writes the folder of a model and returns the digest of its networks; a previous one stays if anything fails."""
    path = pathlib.Path(os.path.abspath(path))
    check_place(path)
    with files.folder_replacement(path) as new:
        with_recalibration(estimator, None).save(new / MODEL)
        digest = files.digest(new / MODEL)
        _write_description(new, schema, origin, digest, path.name)
    return digest


def write_origin(path: pathlib.Path, schema: Schema, origin: Origin, digest: str) -> None:
    """Writes the origin of a model, calibration included, into its folder; the networks there must have the digest."""
    if files.digest(path / MODEL) != digest:
        raise ValueError(f"{str(path)!r} was replaced since the model was read; calibrate the new model.")
    _write_description(path, schema, origin, digest, path.name)


def _write_description(path: pathlib.Path, schema: Schema, origin: Origin, digest: str, name: str) -> None:
    values = signed({"format": FORMAT, "sha256": digest, **as_json(schema), "origin": origin})
    files.write_text(path / COLUMNS, json.dumps(values, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    files.write_text(path / CARD, card(schema, origin, name=name))


def signed(values: dict[str, Any]) -> dict[str, Any]:
    """The values of `columns.json` with their own digest."""
    others = {name: value for name, value in values.items() if name != "digest"}
    return {**others, "digest": hashlib.sha256(json.dumps(others, sort_keys=True).encode()).hexdigest()}


def read(path: files.AnyPath, attempts: int = 10) -> tuple[Ensemble, Schema, Origin, str]:
    """The networks in a folder, recalibrated, their columns, the origin of the fit, and the digest of the networks.

    A model that is replaced meanwhile is read again, at most so many times.
    """
    path = pathlib.Path(path)
    before = _description_bytes(path)
    try:
        stored = _read_once(path)
    except (ValueError, OSError):
        if not attempts or _description_bytes(path) == before:
            raise
        return read(path, attempts - 1)
    return read(path, attempts - 1) if attempts and _description_bytes(path) != before else stored


def _description_bytes(path: pathlib.Path) -> bytes:
    with contextlib.suppress(OSError):
        return (path / COLUMNS).read_bytes()
    return b""


def _read_once(path: pathlib.Path) -> tuple[Ensemble, Schema, Origin, str]:
    if not path.exists():
        raise FileNotFoundError(f"there is no model folder {str(path)!r}; fit a model first.")
    if not path.is_dir() or not (path / COLUMNS).is_file() or not (path / MODEL).is_file():
        raise ValueError(f"{str(path)!r} is not a model folder: it must hold {COLUMNS} and {MODEL}.")
    description = _read_description(path)
    if files.digest(path / MODEL) != description["sha256"]:
        raise ValueError(f"{str(path / MODEL)!r} is not the file that {COLUMNS} belongs to; fit the model again.")
    try:
        schema, origin = from_json(description), dict(description["origin"])
        calibration = None
        if (known := origin.get("calibration")) is not None:
            calibration = Recalibration(known["method"], tuple(map(float, known["values"])), int(known["n_rows"]))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{str(path / COLUMNS)!r} lacks parts or has unknown ones; fit the model again.") from None
    kind = RegressionEnsemble if schema.task == "regression" else ClassEnsemble
    try:
        ensemble = kind.load(path / MODEL)
    except ValueError as error:
        raise ValueError(f"{str(path / MODEL)!r}: {error}") from None
    if ensemble.n_features_in_ != len(schema.inputs):
        fault = f"the network has {ensemble.n_features_in_} inputs, {COLUMNS} names {len(schema.inputs)}"
        raise ValueError(f"{str(path)!r}: {fault}; fit the model again.")
    return with_recalibration(ensemble, calibration), schema, origin, description["sha256"]


def _read_description(path: pathlib.Path) -> dict[str, Any]:
    """The values of `columns.json`, unchanged since they were written."""
    name = repr(str(path / COLUMNS))
    try:
        values: dict[str, Any] = json.loads((path / COLUMNS).read_text(encoding="utf-8"))
        number, _ = values["format"], values["sha256"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(f"{name} is damaged or was not written by dropbayes; fit the model again.") from None
    if type(number) is not int or number != FORMAT:
        remedy = "fit the model again, or upgrade dropbayes"
        raise ValueError(f"{name} has the format {number!r}; this version reads {FORMAT}: {remedy}.")
    if values.get("digest") != signed(values)["digest"]:
        raise ValueError(f"{name} was changed since it was written; fit the model again.")
    return values


def range_text(column: Column) -> str:
    """The range of a column's values in the training rows."""
    if column.kind == "category":
        return ", ".join(column.categories[:8]) + (", …" if len(column.categories) > 8 else "")
    if column.kind == "boolean":
        return "true or false"
    if column.low is None or column.high is None:
        return ""
    if column.kind == "date":
        return " to ".join(str(np.datetime64(int(day), "D")) for day in (column.low, column.high))
    return f"{column.low:.6g} to {column.high:.6g}"


def card(schema: Schema, origin: Origin, *, name: str) -> str:
    """The card as Markdown; `name` is that of the model's folder."""
    import jinja2  # a prediction need not wait for it

    environment = jinja2.Environment(trim_blocks=True, undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    environment.filters.update(plain=_escape, json=json.dumps)
    environment.globals.update(range_text=range_text, calibration_text=calibration_text)
    template = importlib.resources.files("dropbayes.app.models").joinpath("card.md").read_text(encoding="utf-8")
    return environment.from_string(template).render(schema=schema, origin=origin, name=name)


def _escape(text: str) -> str:
    """The text on one line, in which a reader of Markdown finds no HTML, link, code or cell."""
    return re.sub(r"([\\`\[|])", r"\\\1", html.escape(" ".join(text.splitlines()), quote=False))


def calibration_text(origin: Origin) -> str:
    """How a model was calibrated, if it was."""
    if (calibration := origin.get("calibration")) is None:
        return ""
    factor = f", factor {calibration['values'][0]:.4g}" if calibration["method"] == "scale" else ""
    return f"{calibration['method']}{factor}, on {calibration['n_rows']:,} rows of {calibration['file']}"
