r"""The predictor: a model with its settings, as a pure function of columns.

A row's prediction has the same bits alone, in any batch, in any thread or process: draws are keyed, rows are evaluated
in tiles of fixed size, and every statistic adds up a row's draws in an order that depends on that row alone.
"""

from __future__ import annotations

import copy
import hashlib
import numbers
import operator
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import nn

from dropbayes.app.models.backends import (
    CLASSIFICATION,
    REGRESSION,
    network_model,
    saved_estimator,
    table_model,
)  # fmt: skip
from dropbayes.likelihoods import Likelihood
from dropbayes.runtime.arrays import NumpyArray, round_digits

__all__ = ["Predictor", "check_finite", "uncertainty"]

# Values of draws in memory at once, a few times eight bytes each.
_HELD = 2**20
_MOST_ROWS = 4096  # the block size of the estimators


class Predictor:
    r"""A model with its settings, as a function of columns.

    A call has no side effects, is thread-safe, and gives every row the same bits however the rows are split into calls.
    A pickled predictor holds only the weights and the names of the columns.

    Args:
        model: A fitted `DropoutRegressor` or `DropoutClassifier`, a model of `dropbayes.app.models`, or a network.
        likelihood: The observation model of a network's output; required for a network.
        columns: The names of a network's input columns, in order; without them it has one input, the array `x`.
        n_draws: The number of draws $T$ (per network of an estimator); by default that of the model, 100 for a network.
        seed: The seed of the draws; by default that of the model, 0 for a network.
        interval: The nominal coverage of the interval from `lower` to `upper`.
        allow_new: Whether to encode unseen categories as all zeros instead of failing.

    Example:
        >>> from dropbayes.likelihoods import Gaussian
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 1))
        >>> predict = Predictor(net, likelihood=Gaussian(precision=4.0), columns=("height", "weight"))
        >>> predict({"height": [1.7, 1.8], "weight": [70.0, 80.0]})["std"].shape
        (2, 1)
    """

    def __init__(
        self,
        model: Any,
        *,
        likelihood: Likelihood | None = None,
        columns: Sequence[str] | None = None,
        n_draws: int | None = None,
        seed: int | None = None,
        interval: float = 0.95,
        allow_new: bool = False,
    ) -> None:
        self._model = network_model(model, likelihood, columns) if isinstance(model, nn.Module) else table_model(model)
        if not isinstance(model, nn.Module) and (likelihood is not None or columns is not None):
            raise ValueError("`likelihood` and `columns` are those of the estimator; pass them with a network only.")
        self.allow_new = bool(allow_new)
        self.n_draws, self.seed, self.interval = _settings(self._model.defaults, n_draws, seed, interval)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        n_draws: int | None = None,
        seed: int | None = None,
        interval: float = 0.95,
        allow_new: bool = False,
    ) -> Predictor:
        """The predictor of a model folder (`dropbayes fit`) or of an estimator's file (`DropoutRegressor.save`).

        Args:
            path: The folder or the file.
            n_draws: As for the class.
            seed: As for the class.
            interval: As for the class.
            allow_new: As for the class.

        Raises:
            ValueError: The path holds no model, a damaged one, or one of a later format.
        """
        from dropbayes.app.models.model import load

        model = saved_estimator(path) if os.path.isfile(path) else load(path)
        return cls(model, n_draws=n_draws, seed=seed, interval=interval, allow_new=allow_new)

    def with_settings(
        self, *, n_draws: int | None = None, seed: int | None = None, interval: float | None = None
    ) -> Predictor:
        """The same model with other settings; None keeps the current value."""
        now = self.n_draws, self.seed
        other = copy.copy(self)
        other.n_draws, other.seed, other.interval = _settings(
            now, n_draws, seed, self.interval if interval is None else interval
        )
        return other

    @property
    def inputs(self) -> dict[str, str]:
        """The columns the model reads, with the type of each: "number", "boolean", "category", or "array"."""
        return self._model.inputs

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the fields of a prediction."""
        return CLASSIFICATION if self._model.has_classes else REGRESSION

    @property
    def column_names(self) -> list[str]:
        """The names of the columns that `flat_columns` returns."""
        return list(self.flat_columns(self.predict_inputs(self._model.no_rows)))

    @property
    def classes(self) -> NumpyArray | None:
        """The labels of the classes, in the order of `probabilities`; None if they have no names."""
        return self._model.classes

    @property
    def key(self) -> tuple[Any, ...]:
        """The settings that determine a prediction's bits: in one process, equal keys may share a batch."""
        return id(self._model), self.n_draws, self.seed, self.interval

    @property
    def fingerprint(self) -> str:
        """A digest of the model: of its columns, and of its exact predictions for some fixed rows."""
        x = np.random.default_rng(0).normal(size=(8, self._model.no_rows.shape[1]))
        digest = hashlib.sha256(repr((self._model.columns_read, self.n_draws, self.seed, self.interval)).encode())
        for values in self.predict_inputs(x).values():
            digest.update(repr(values.tolist()).encode())
        return digest.hexdigest()

    @property
    def total_draws(self) -> int:
        """The number of draws of a prediction: `n_draws` per network."""
        return self.n_draws * self._model.n_networks

    def __call__(self, columns: Mapping[str, Any]) -> dict[str, NumpyArray]:
        """The prediction for each row.

        Args:
            columns: The model's columns by name, each with one value per row; or all of them as the matrix `x`. Other
                columns are ignored.

        Returns:
            For numbers `mean`, `std`, `epistemic`, `aleatoric` (variances), `lower`, `upper`; for classes `predicted`,
            `probabilities` `[row, class]`, `entropy` and `mutual_information` in nats. The first axis is the row.

        Raises:
            ValueError: A column is missing or has invalid values; or a row is so far from those of training that its
                prediction is not finite.
        """
        prediction = self.predict_inputs(self.encode(columns))
        check_finite(prediction)
        return prediction

    def flat_columns(self, prediction: Mapping[str, NumpyArray]) -> dict[str, NumpyArray]:
        """The prediction as columns of a table: one column per class probability or output.

        The parts of the uncertainty are standard deviations there, `epistemic_std` and `aleatoric_std`.
        """
        columns: dict[str, NumpyArray] = {}
        for name, values in prediction.items():
            if name in ("epistemic", "aleatoric"):  # a table holds deviations, like `std`
                name, values = f"{name}_std", round_digits(np.sqrt(values))
            if values.ndim == 1:
                columns[name] = values
                continue
            labels: Any = range(values.shape[1]) if self.classes is None else self.classes.tolist()
            stem = "probability" if name == "probabilities" else name
            columns |= {f"{stem}_{label}": values[:, index] for index, label in enumerate(labels)}
        return columns

    def extend(self, table: Any, *, prefix: str | None = None) -> Any:
        """An Arrow table with the columns of the prediction appended, as `dropbayes predict` adds them.

        Args:
            table: The rows; columns that the model does not read are unchanged.
            prefix: The prefix of the new columns' names; by default the target and `_`, if it is known.
        """
        import pyarrow as pa

        prediction, more = self._model.table_prediction(self, table)
        check_finite(prediction)
        columns = self.flat_columns(prediction) | more
        prefix = self._model.prefix if prefix is None else prefix
        taken = [prefix + name for name in columns if prefix + name in table.column_names]
        if taken:
            raise ValueError(f"the table has a column {taken[0]!r}, which the prediction would add; set `prefix`.")
        for name, values in columns.items():
            kind = pa.string() if values.dtype.kind in "OU" else None
            table = table.append_column(prefix + name, pa.array(values.tolist() if kind else values, kind))
        return table

    def encode(self, columns: Mapping[str, Any]) -> NumpyArray:
        """The rows as inputs of the network, `[row, ...]`; see `__call__` for the columns."""
        return self._model.encode(columns, self.allow_new)

    def predict_inputs(self, x: NumpyArray) -> dict[str, NumpyArray]:
        """The prediction for rows returned by `encode`, possibly concatenated; not checked to be finite."""
        step = max(1, min(_MOST_ROWS, _HELD // max(1, self.total_draws * self._model.row_size)))
        blocks = [self._block(x[start : start + step]) for start in range(0, max(len(x), 1), step)]
        if len(blocks) == 1:
            return blocks[0]
        return {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}

    def _block(self, x: NumpyArray) -> dict[str, NumpyArray]:
        rows = x if len(x) else np.zeros((1, *x.shape[1:]), x.dtype)  # an empty prediction has the shapes of one row
        prediction = self._model.statistics(rows, self.n_draws, self.seed, self.interval)
        return prediction if len(x) else {name: values[:0] for name, values in prediction.items()}


def check_finite(prediction: Mapping[str, NumpyArray]) -> None:
    """Raises ValueError if a row is so far from the training rows that single precision overflows."""
    for values in prediction.values():
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            row = int((~np.isfinite(values)).reshape(len(values), -1).any(1).argmax())
            raise ValueError(
                f"row {row}: the prediction is not finite; a value of this row is too far from those of training."
            )


def uncertainty(prediction: Mapping[str, NumpyArray]) -> NumpyArray:
    """The uncertainty by which rows are deferred: the standard deviation, or for classes the entropy."""
    return prediction["std" if "std" in prediction else "entropy"]


def _settings(
    defaults: tuple[int, int], n_draws: int | None, seed: int | None, interval: float
) -> tuple[int, int, float]:
    """The validated settings."""
    n_draws = defaults[0] if n_draws is None else n_draws
    seed = defaults[1] if seed is None else seed
    for name, value, least in (("n_draws", n_draws, 1), ("seed", seed, 0)):
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not least <= value < 2**63:
            raise ValueError(f"`{name}` must be a whole number of at least {least}; got {value!r}.")
    if isinstance(interval, bool) or not isinstance(interval, numbers.Real) or not 0 < interval < 1:
        raise ValueError(f"`interval` must lie between 0 and 1; got {interval!r}.")
    return operator.index(n_draws), operator.index(seed), float(interval)
