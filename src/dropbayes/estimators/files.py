r"""The estimators as model files."""

from __future__ import annotations

import os
from dataclasses import asdict, fields
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from typing import Any

import numpy as np
from torch import Tensor

from dropbayes.estimators.missing import MissingValues
from dropbayes.population import Member, Population
from dropbayes.population.heads import head_of
from dropbayes.population.records import ACTIVATIONS, STACKED
from dropbayes.runtime import storage

_STACKED = (*STACKED, "history")


def save(estimator: Any, path: str | os.PathLike[str], *, own: dict[str, Any], own_tensors: dict[str, Tensor]) -> None:
    """Writes a fitted estimator, with the state that only its class has."""
    parameters = estimator.get_params(deep=False)
    if not isinstance(parameters["random_state"], int | np.integer | None):
        parameters["random_state"] = None  # a generator has no JSON form; the fitted model does not need it
    missing = estimator.missing_values_
    population, names = estimator.population_, getattr(estimator, "feature_names_in_", None)
    settings = {
        "parameters": _as_json(parameters),
        "members": [_as_json(asdict(member)) for member in population.members],
        "seed": estimator.seed_,
        "rows_tested": int(estimator.rows_tested_),
        "n_features": int(estimator.n_features_in_),
        "feature_names": None if names is None else [str(name) for name in names],
        "search_scores": [float(s) if np.isfinite(s) else None for s in getattr(estimator, "search_scores_", [])],
        "missing": None if missing is None else {"fill": missing.fill.tolist(), "columns": missing.columns.tolist()},
        **own,
    }
    tensors = {f"weight.{i}": w for i, w in enumerate(population.weights)}
    tensors |= {f"bias.{i}": b for i, b in enumerate(population.biases)}
    tensors |= {name: getattr(population, name) for name in _STACKED}
    tensors |= own_tensors
    storage.save(path, tensors, kind=type(estimator).__name__, settings=settings, version=_version())


def load(kind: type, path: str | os.PathLike[str]) -> tuple[Any, storage.ModelFile]:
    """The estimator of the given class in a file, and the file."""
    file = storage.load(path, kinds=[kind.__name__])
    try:
        return _restored(kind, file), file
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"`path` holds a {file.kind} with missing or unknown parts: {error}.") from None


def _restored(kind: type, file: storage.ModelFile) -> Any:
    settings, tensors = file.settings, file.tensors
    parameters = {name: _from_json(value) for name, value in settings["parameters"].items()}
    if parameters["activation"] not in ACTIVATIONS:
        raise ValueError(f"`path` has the unknown activation {parameters['activation']!r}.")
    estimator = kind(**parameters)
    known = {f.name for f in fields(Member)}
    members = [
        Member(**{name: _from_json(value) for name, value in member.items() if name in known})
        for member in settings["members"]
    ]
    n_layers = sum(name.startswith("weight.") for name in tensors)
    estimator.population_ = Population(
        members=tuple(members),
        weights=tuple(tensors[f"weight.{i}"] for i in range(n_layers)),
        biases=tuple(tensors[f"bias.{i}"] for i in range(n_layers)),
        **{name: tensors[name] for name in _STACKED},
        head=head_of(estimator._head()),
        activation=parameters["activation"],
    )
    estimator.seed_, estimator.n_features_in_ = settings["seed"], settings["n_features"]
    estimator.rows_tested_ = settings["rows_tested"]
    estimator.search_scores_ = np.asarray([-np.inf if s is None else s for s in settings["search_scores"]])
    missing = settings.get("missing")  # older files have none
    estimator.missing_values_ = missing and MissingValues(
        np.asarray(missing["fill"], dtype=np.float64), np.asarray(missing["columns"], dtype=np.int64)
    )
    if settings["feature_names"] is not None:
        estimator.feature_names_in_ = np.asarray(settings["feature_names"], dtype=object)
    return estimator


def _as_json(value: Any) -> Any:
    """Tuples marked, so that they come back as tuples; numpy numbers as Python's."""
    if isinstance(value, dict):
        return {key: _as_json(part) for key, part in value.items()}
    if isinstance(value, tuple):
        return {"tuple": [_as_json(part) for part in value]}
    if isinstance(value, list):
        return [_as_json(part) for part in value]
    return value.item() if isinstance(value, np.generic) else value


def _from_json(value: Any) -> Any:
    if isinstance(value, dict) and value.keys() == {"tuple"}:
        return tuple(_from_json(part) for part in value["tuple"])
    return [_from_json(part) for part in value] if isinstance(value, list) else value


def _version() -> str:
    try:
        return installed_version("dropbayes")
    except PackageNotFoundError:
        return "unknown"
