r"""The estimators as model files."""

from dataclasses import asdict, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dropbayes.estimators.inputs import Bins, MissingValues
from dropbayes.population import Member, Population
from dropbayes.population.heads import head_of
from dropbayes.population.records import ACTIVATIONS, STACKED
from dropbayes.runtime import files, storage

_SCORES = ("held_out_score_", "baseline_score_")


def save(estimator: Any, path: files.AnyPath) -> None:
    """Writes a fitted estimator, with the state and the records specific to its class."""
    parameters = estimator.get_params(deep=False)
    if not isinstance(parameters["random_state"], int | np.integer | None):
        parameters["random_state"] = None  # a generator has no JSON form; the fitted model does not need it
    missing, bins, frame = estimator.missing_values_, estimator.bins_, estimator.frame_columns_
    population, names = estimator.population_, getattr(estimator, "feature_names_in_", None)
    settings = {
        "parameters": _as_json(parameters),
        "members": [_as_json(asdict(member)) for member in population.members],
        "seed": estimator.seed_,
        "rows_tested": int(estimator.rows_tested_),
        "n_features": int(estimator.n_features_in_),
        "feature_names": None if names is None else [str(name) for name in names],
        "search_scores": [_finite(score) for score in getattr(estimator, "search_scores_", [])],
        **{name: _finite(getattr(estimator, name, np.nan)) for name in _SCORES},
        "missing": None if missing is None else {"fill": missing.fill.tolist(), "columns": missing.columns.tolist()},
        "bins": None if bins is None else [edges.tolist() for edges in bins.edges],
        **estimator._class_state(),
    }
    if frame is not None:
        from dropbayes.estimators.columns.schema import as_json  # slow to import, like its inverse below

        settings["columns"] = as_json(frame)
    tensors = {f"weight.{i}": w for i, w in enumerate(population.weights)}
    tensors |= {f"bias.{i}": b for i, b in enumerate(population.biases)}
    tensors |= {name: getattr(population, name) for name in STACKED}
    for attribute, (name, kind) in estimator.records.items():
        record = getattr(estimator, attribute)
        tensors |= {} if record is None else {f"{name}.{f.name}": getattr(record, f.name) for f in fields(kind)}
    storage.save(path, tensors, kind=estimator.saved_as, settings=settings)


def load(kind: Any, path: files.AnyPath) -> Any:
    """The estimator of the given class in a file."""
    file = storage.load(path, kinds=[kind.saved_as])
    try:
        estimator = _restore(kind, file)
        estimator._set_class_state(file.settings)
    except (ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"`path` holds a {file.kind} with missing, unknown or impossible parts: {error}.") from None
    return estimator


def _restore(kind: Any, file: storage.ModelFile) -> Any:
    settings, tensors = file.settings, file.tensors
    parameters = {name: _from_json(value) for name, value in settings["parameters"].items()}
    if parameters["activation"] not in ACTIVATIONS:
        raise ValueError(f"`path` has the unknown activation {parameters['activation']!r}.")
    estimator = kind(**parameters)
    members = [Member(**{name: _from_json(value) for name, value in member.items()}) for member in settings["members"]]
    n_layers = sum(name.startswith("weight.") for name in tensors)
    estimator.population_ = Population(
        members=tuple(members),
        weights=tuple(tensors[f"weight.{i}"] for i in range(n_layers)),
        biases=tuple(tensors[f"bias.{i}"] for i in range(n_layers)),
        **{name: tensors[name] for name in STACKED},
        head=head_of(estimator._head()),
        activation=parameters["activation"],
    )
    estimator.seed_, estimator.n_features_in_ = settings["seed"], settings["n_features"]
    estimator.rows_tested_ = settings["rows_tested"]
    estimator.search_scores_ = np.asarray([-np.inf if s is None else s for s in settings["search_scores"]])
    vars(estimator).update({name: float(settings[name]) for name in _SCORES if settings.get(name) is not None})
    missing, bins = settings["missing"], settings["bins"]
    missing = missing and (np.array(missing["fill"], np.float64), np.array(missing["columns"], np.int64))
    estimator.missing_values_ = missing and MissingValues(*missing)
    estimator.frame_columns_ = None
    if settings.get("columns"):
        from dropbayes.estimators.columns.schema import from_json

        estimator.frame_columns_ = from_json(settings["columns"])
    estimator.bins_ = None if bins is None else Bins(tuple(np.asarray(edges, dtype=np.float64) for edges in bins))
    if settings["feature_names"] is not None:
        estimator.feature_names_in_ = np.asarray(settings["feature_names"], dtype=object)
    for attribute, (name, record) in estimator.records.items():
        setattr(estimator, attribute, _record(record, name, tensors))
    _check_layout(file, estimator)
    return estimator


def _check_layout(file: storage.ModelFile, estimator: Any) -> None:
    """Raises unless the tensors are finite and have shapes consistent with the settings and each other."""
    population, bins = estimator.population_, estimator.bins_
    frame, missing = estimator.frame_columns_, estimator.missing_values_
    if type(estimator.n_features_in_) is not int:
        raise ValueError(f"'n_features' must be a whole number; got {estimator.n_features_in_!r:.80}")
    n_columns = len(frame.inputs) if frame else estimator.n_features_in_
    n_columns += len(missing.columns) if missing else 0
    if bins and not all(np.isfinite(e).all() and (np.diff(e) > 0).all() and len(e) != 1 for e in bins.edges):
        raise ValueError("'bins' must have finite, rising edges")
    if bins and len(bins.edges) != n_columns:
        raise ValueError(f"'bins' must have an entry for each of {n_columns} columns")
    n_inputs = n_columns + (bins.n_inputs if bins else 0)
    n_members, width = len(population), n_inputs
    for layer, weight in enumerate(population.weights):
        file.tensor(f"weight.{layer}", shape=(n_members, width, None))
        width = weight.shape[2]
        file.tensor(f"bias.{layer}", shape=(n_members, 1, width))
    n_outputs = file.tensor("y_mean", shape=(n_members, None)).shape[1]
    sizes = {"x_mean": n_inputs, "x_scale": n_inputs, "y_scale": n_outputs, "drop_prob": len(population.weights)}
    for name, size in sizes.items():
        file.tensor(name, shape=(n_members, size))
    for name in STACKED:
        if len(file.tensors[name]) != n_members:
            raise ValueError(f"{name!r} must have one entry for each of the {n_members} networks")
    if not bool((population.y_scale > 0).all() and (population.x_scale > 0).all()):
        raise ValueError("'x_scale' and 'y_scale' must be positive")
    if population.head.has_noise and width != population.head.per_output * n_outputs:  # classes have no such targets
        raise ValueError(f"the last layer has {width} outputs for {n_outputs} targets")


def _finite(score: float) -> float | None:
    return float(score) if np.isfinite(score) else None  # which JSON has no number for


def _as_json(value: Any) -> Any:
    """A JSON value: tuples are tagged to be restored as tuples, arrays become tuples, numpy numbers Python's."""
    match value:
        case dict():
            return {key: _as_json(item) for key, item in value.items()}
        case tuple() | np.ndarray():
            return {"tuple": [_as_json(item) for item in value]}
        case list():
            return [_as_json(item) for item in value]
        case torch.device():
            return str(value)
        case np.generic():
            return value.item()
    return value


def _from_json(value: Any) -> Any:
    match value:
        case {"tuple": items, **others} if not others:
            return tuple(map(_from_json, items))
        case list():
            return [_from_json(item) for item in value]
    return value


def _record(kind: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """The dataclass of a kind from the tensors of a file; None if the file holds none of them."""
    keys = {f.name: f"{name}.{f.name}" for f in fields(kind)}
    if len(missing := [key for key in keys.values() if key not in tensors]) == len(keys):
        return None
    if missing:
        raise ValueError(f"{missing[0]!r} is missing: it may be from another version; fit the model again")
    return kind(**{field: tensors[key] for field, key in keys.items()})
