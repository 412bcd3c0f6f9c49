"""The models a predictor can hold: an estimator with its columns, or a network with its likelihood."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from dropbayes import information, sampling
from dropbayes.app.models.inputs import (
    MATRIX,
    arrow_column,
    columns_by_name,
    columns_of_table,
    matrix_of,
    number_column,
    row_label,
)  # fmt: skip
from dropbayes.estimators.ensembles import ClassEnsemble, Ensemble, RegressionEnsemble
from dropbayes.likelihoods import Categorical, Gaussian, HeteroscedasticGaussian, Likelihood
from dropbayes.predictive.mixtures import Mixture, draw_mean
from dropbayes.runtime import storage
from dropbayes.runtime.arrays import NumpyArray, round_digits

if TYPE_CHECKING:
    from dropbayes.columns import Schema

__all__ = [
    "CLASSIFICATION",
    "REGRESSION",
    "NetworkModel",
    "TableModel",
    "network_model",
    "saved_estimator",
    "table_model",
]

REGRESSION = ("mean", "std", "epistemic", "aleatoric", "lower", "upper")
CLASSIFICATION = ("predicted", "probabilities", "entropy", "mutual_information")


def _moments(mixture: Mixture, interval: float) -> dict[str, NumpyArray]:
    """The moments of each row's predictive distribution, and the ends of its central interval."""
    statistics = (mixture.mean, mixture.std, mixture.epistemic, mixture.aleatoric, *mixture.interval(interval))
    return {name: values.numpy() for name, values in zip(REGRESSION, statistics, strict=True)}


def _information(probabilities: Tensor, classes: NumpyArray | None) -> dict[str, NumpyArray]:
    """The most probable class of each row, all class probabilities, entropy and mutual information."""
    mean = draw_mean(probabilities)
    best = mean.argmax(-1).numpy()
    predicted = best if classes is None else classes[best]
    statistics = predicted, mean, information.entropy(mean), information.mutual_information(probabilities)
    return {name: np.asarray(values) for name, values in zip(CLASSIFICATION, statistics, strict=True)}


@dataclass(frozen=True, eq=False)
class TableModel:
    """An estimator, and its columns if they are known."""

    estimator: Any
    schema: Schema | None

    @property
    def defaults(self) -> tuple[int, int]:
        return int(self.estimator.n_draws), int(self.estimator.seed_)

    @property
    def n_networks(self) -> int:
        return len(self.estimator.population_)

    @property
    def columns_read(self) -> Any:
        return self.inputs if self.schema is None else self.schema

    @property
    def no_rows(self) -> NumpyArray:
        return np.zeros((0, int(self.estimator.n_features_in_)))

    @property
    def row_size(self) -> int:
        return int(self.estimator.population_.weights[-1].shape[-1])

    @property
    def has_classes(self) -> bool:
        return hasattr(self.estimator, "classes_")

    @property
    def classes(self) -> NumpyArray | None:
        return np.asarray(self.estimator.classes_) if self.has_classes else None

    @property
    def inputs(self) -> dict[str, str]:
        if self.schema is not None:
            return {column.name: column.kind for column in self.schema.columns}
        names = getattr(self.estimator, "feature_names_in_", None)
        return {MATRIX: "array"} if names is None else dict.fromkeys(map(str, names), "number")

    def encode(self, columns: Mapping[str, Any], allow_new: bool) -> NumpyArray:
        names = list(self.inputs)
        if self.schema is not None:
            import pyarrow as pa

            from dropbayes.columns import encode

            inputs = columns_by_name(columns, names)
            table = pa.table({name: arrow_column(values, name) for name, values in inputs.items()})
            return encode(self.schema, table, at=row_label, allow_new=allow_new).x
        if self.inputs != {MATRIX: "array"}:
            return np.column_stack(
                [number_column(values, name) for name, values in columns_by_name(columns, names).items()]
            )
        x = number_column(matrix_of(columns), MATRIX)
        if x.ndim != 2 or x.shape[1] != self.estimator.n_features_in_:
            raise ValueError(f"`{MATRIX}` must be shaped [row, {self.estimator.n_features_in_}]; got {list(x.shape)}.")
        return x

    @property
    def prefix(self) -> str:
        return "" if self.schema is None else f"{self.schema.target}_"

    def table_prediction(self, predictor: Any, table: Any) -> tuple[dict[str, NumpyArray], dict[str, NumpyArray]]:
        """The prediction of a table's rows, and its additional columns."""
        if self.schema is None:
            return predictor.predict_inputs(self.encode(columns_of_table(table), False)), {}
        from dropbayes.app.models.prediction import label_sets
        from dropbayes.columns import check_columns, encode

        check_columns(self.schema, table.column_names, "the table")
        rows = encode(self.schema, table, at=row_label, allow_new=predictor.allow_new)
        prediction = predictor.predict_inputs(rows.x)
        sets = label_sets(self.estimator, prediction, coverage=predictor.interval)
        return prediction, dict(zip(("labels",), sets, strict=False)) | {
            "outside": np.array(rows.outside_names(), dtype=np.str_)
        }

    def statistics(self, x: NumpyArray, n_draws: int, seed: int, interval: float) -> dict[str, NumpyArray]:
        estimator = self.estimator.with_draws(n_draws=n_draws, seed=seed)
        vars(estimator).pop("feature_names_in_", None)  # the names were checked when the columns were ordered
        if self.has_classes:
            statistics = _information(estimator.draws(x), self.classes)
        else:
            statistics = _moments(estimator.predictive(x), interval)
        return {name: round_digits(values) for name, values in statistics.items()}


@dataclass(frozen=True, eq=False)
class NetworkModel:
    """A network, its likelihood, and the names of its input columns if it reads columns."""

    net: nn.Module
    likelihood: Likelihood
    columns: tuple[str, ...] | None
    defaults: tuple[int, int] = (100, 0)
    n_networks: int = 1
    row_size: int = 1
    classes: None = None  # their names are unknown
    prefix: str = ""

    @property
    def columns_read(self) -> Any:
        return self.inputs

    @property
    def no_rows(self) -> NumpyArray:
        if self.columns is None:
            raise ValueError("`columns` must name the inputs of a network whose prediction is a table.")
        return np.zeros((0, len(self.columns)))

    @property
    def has_classes(self) -> bool:
        return isinstance(self.likelihood, Categorical)

    @property
    def inputs(self) -> dict[str, str]:
        return {MATRIX: "array"} if self.columns is None else dict.fromkeys(self.columns, "number")

    def encode(self, columns: Mapping[str, Any], allow_new: bool) -> NumpyArray:
        if self.columns is None:
            return np.asarray(matrix_of(columns))
        return np.column_stack(
            [number_column(values, name) for name, values in columns_by_name(columns, self.columns).items()]
        )

    def statistics(self, x: NumpyArray, n_draws: int, seed: int, interval: float) -> dict[str, NumpyArray]:
        output = self._draws(x, n_draws, seed)
        likelihood = self.likelihood.for_output(output.dim() - 1)
        mean = likelihood.mean(output).double()
        if isinstance(likelihood, Categorical):
            return _information(mean.movedim(likelihood.axis, -1), None)
        scale = likelihood.variance(output).double().sqrt()
        shape = mean.shape[1:]
        moments = _moments(Mixture(mean.reshape(n_draws, -1), scale.reshape(n_draws, -1)), interval)
        return {name: values.reshape(shape) for name, values in moments.items()}

    def table_prediction(self, predictor: Any, table: Any) -> tuple[dict[str, NumpyArray], dict[str, NumpyArray]]:
        return predictor.predict_inputs(self.encode(columns_of_table(table), False)), {}

    def _draws(self, x: NumpyArray, n_draws: int, seed: int) -> Tensor:
        like = next(self.net.parameters(), torch.empty(0))
        inputs = torch.tensor(x, device=like.device)
        inputs = inputs.to(like.dtype) if inputs.is_floating_point() else inputs
        output = sampling.draws(self.net, inputs, n_draws=n_draws, seed=seed)
        if not isinstance(output, Tensor):
            raise TypeError(f"`model` must return one tensor; got {type(output).__name__}. Wrap it to return that one.")
        return output.cpu()


def table_model(model: Any) -> TableModel:
    estimator = getattr(model, "ensemble", model)
    if not isinstance(estimator, Ensemble):
        kind = type(model).__name__
        raise TypeError(f"`model` must be a dropout estimator, the model of a folder or a network; got {kind}.")
    return TableModel(estimator.with_draws(), getattr(model, "schema", None))


def network_model(net: nn.Module, likelihood: Likelihood | None, columns: Sequence[str] | None) -> NetworkModel:
    if not isinstance(likelihood, Gaussian | HeteroscedasticGaussian | Categorical):
        raise ValueError(
            "`likelihood` must say how the network's output is read: Gaussian(precision=...), "
            f"HeteroscedasticGaussian() or Categorical(); got {likelihood!r}."
        )
    return NetworkModel(net, likelihood, None if columns is None else tuple(columns))


def saved_estimator(path: str | os.PathLike[str]) -> Any:
    kinds: dict[str, type[Ensemble]] = {kind.saved_as: kind for kind in (RegressionEnsemble, ClassEnsemble)}
    return kinds[storage.load(path, kinds=list(kinds)).kind].load(path)
