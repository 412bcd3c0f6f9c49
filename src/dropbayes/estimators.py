r"""Dropout networks as scikit-learn estimators: good without tuning, honest about what they do not know."""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from typing import Any, Literal

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor

from dropbayes import storage
from dropbayes.population import Member, Population, Task, candidates, choose, draws, fit_precision, train
from dropbayes.population.records import ACTIVATIONS, Head

__all__ = ["DropoutClassifier", "DropoutRegressor"]

# The search of the defaults: drop probabilities around those the reference implementation of [GG16] chose on the UCI
# sets, and a weak and a stronger prior.
_DROP_PROBS = (0.005, 0.05, 0.1)
_WEIGHT_DECAYS = (1e-6, 1e-4)
# Searching on more rows than this changes the choice little and the time much.
_SEARCH_ROWS = 50_000
# Larger weights are left to the objective: written out as repetitions they would cost memory.
_REPEATED_WEIGHT = 10
# Rows predicted at a time: bounds the memory of the draws.
_BLOCK_ROWS = 4096
_STACKED = ("drop_prob", "precision", "x_mean", "x_scale", "y_mean", "y_scale", "epochs", "diverged", "history")


class _DropoutEstimator(BaseEstimator):
    """What the regressor and the classifier share; see them for the parameters."""

    _likelihood: Head
    population_: Population
    seed_: int

    def __init__(
        self,
        hidden: tuple[int, ...] = (50, 50),
        *,
        drop_prob: Any = "search",
        weight_decay: Any = "search",
        learn_drop_prob: bool = False,
        activation: Literal["relu", "tanh"] = "relu",
        n_networks: int = 1,
        n_steps: int = 2000,
        min_epochs: int = 10,
        learning_rate: float = 0.01,
        batch_size: int | Literal["auto"] = "auto",
        n_folds: int | Literal["auto"] = "auto",
        n_draws: int = 100,
        warm_start: bool = False,
        device: str = "auto",
        random_state: Any = None,
        verbose: bool = False,
    ) -> None:
        self.hidden = hidden
        self.drop_prob = drop_prob
        self.weight_decay = weight_decay
        self.learn_drop_prob = learn_drop_prob
        self.activation = activation
        self.n_networks = n_networks
        self.n_steps = n_steps
        self.min_epochs = min_epochs
        self.learning_rate = learning_rate
        self.batch_size = batch_size
        self.n_folds = n_folds
        self.n_draws = n_draws
        self.warm_start = warm_start
        self.device = device
        self.random_state = random_state
        self.verbose = verbose

    # --- learning -------------------------------------------------------------------------------------------------

    def _batch_size(self, n_rows: int) -> int:
        if self.batch_size != "auto":
            return min(int(self.batch_size), n_rows)
        return min(n_rows, 64 if n_rows < 3000 else 128 if n_rows < 100_000 else 512)

    def _epochs(self, n_rows: int) -> int:
        per_epoch = -(-n_rows // self._batch_size(n_rows))
        return max(self.min_epochs, round(self.n_steps / per_epoch))

    def _settings(self, n_rows: int) -> dict[str, Any]:
        return {
            "hidden": tuple(self.hidden),
            "likelihood": self._head(),
            "activation": self.activation,
            "batch_size": self._batch_size(n_rows),
            "schedule": "cosine",
            "learn_drop_prob": self.learn_drop_prob,
            "device": self.device,
            "progress": None if self.verbose else False,
        }

    def _head(self) -> Head:
        return self._likelihood

    def _check_parameters(self) -> None:
        for name in ("n_networks", "n_steps", "min_epochs", "n_draws"):
            value = getattr(self, name)
            if not isinstance(value, numbers.Integral) or value < 1:
                raise ValueError(f"`{name}` must be a positive integer; got {value!r}.")
        if not (isinstance(self.learning_rate, numbers.Real) and self.learning_rate > 0):
            raise ValueError(f"`learning_rate` must be a positive number; got {self.learning_rate!r}.")
        for name in ("batch_size", "n_folds"):
            value = getattr(self, name)
            if value != "auto" and not (isinstance(value, numbers.Integral) and value >= 1):
                raise ValueError(f"`{name}` must be 'auto' or a positive integer; got {value!r}.")
        for name in ("drop_prob", "weight_decay"):
            value = getattr(self, name)
            if isinstance(value, str) and value != "search":
                raise ValueError(f"`{name}` must be 'search', a number, or a list of numbers to try; got {value!r}.")

    def _grid(self, n_rows: int) -> list[Member]:
        def values(setting: Any, default: tuple[float, ...]) -> list[Any]:
            if isinstance(setting, str):
                return list(default)
            return list(setting) if isinstance(setting, list) else [setting]

        return candidates(
            drop_prob=values(self.drop_prob, _DROP_PROBS),
            weight_decay=values(self.weight_decay, _WEIGHT_DECAYS),
            learning_rate=[float(self.learning_rate)],
            epochs=[self._epochs(n_rows)],
        )

    def _learn(self, x: np.ndarray, y: np.ndarray, weight: np.ndarray | None, n_classes: int | None = None) -> None:
        self._check_parameters()
        if len(x) < 2:
            raise ValueError(f"Found n_samples={len(x)}: at least 2 rows are needed, to learn and to hold out.")
        x, y, weight = _canonical_rows(x, y, weight)
        warm = self.warm_start and hasattr(self, "population_")
        self.seed_ = int(check_random_state(self.random_state).randint(2**31 - 1))
        if warm:
            self._continue(x, y, weight, self._epochs(len(x)), "cosine")
            return
        searched, best = self._search(x, y, weight, n_classes)
        self.search_scores_ = searched.log_likelihood.numpy()
        self.population_ = searched.population
        if len(x) > _SEARCH_ROWS:
            member = replace(best, epochs=self._epochs(len(x)))
            self.population_ = self._trained(x, y, weight, member, n_classes)
            tau = searched.population.precision * searched.population.y_scale.square()
            self.population_ = replace(self.population_, precision=tau[:1] * self.population_.y_scale**-2)
        self._refuse_divergence()

    def _search(self, x: np.ndarray, y: np.ndarray, weight: np.ndarray | None, n_classes: int | None) -> Any:
        n_rows = min(len(x), _SEARCH_ROWS)
        rows = np.random.RandomState(self.seed_).permutation(len(x))[:n_rows]
        n_folds = (5 if n_rows < 3000 else 1) if self.n_folds == "auto" else int(self.n_folds)
        choice = choose(
            torch.tensor(x[rows]),
            torch.tensor(y[rows]),
            self._grid(n_rows),
            n_folds=min(n_folds, n_rows),
            weight=None if weight is None else torch.as_tensor(weight[rows]),
            n_members=int(self.n_networks) if len(x) <= _SEARCH_ROWS else 1,
            n_draws=100,
            seed=self.seed_,
            n_classes=n_classes,
            **self._settings(n_rows),
        )
        return choice, choice.best

    def _trained(self, x: np.ndarray, y: np.ndarray, weight: Any, member: Member, n_classes: int | None) -> Population:
        members = [replace(member, task=0, seed=self.seed_ + i) for i in range(int(self.n_networks))]
        return train([Task(x, y, weight)], members, n_classes=n_classes, **self._settings(len(x)))

    def _continue(self, x: np.ndarray, y: np.ndarray, weight: np.ndarray | None, epochs: int, schedule: str) -> None:
        """More steps from the present weights, τ re-fitted on the new rows before they are learned from."""
        start = self.population_
        ahead = fit_precision(start, (torch.tensor(x), torch.tensor(y)), n_draws=50)
        self.seed_ += 1  # fresh batches and masks
        members = [replace(m, epochs=epochs, seed=self.seed_ + i) for i, m in enumerate(start.members)]
        settings = self._settings(len(x)) | {"schedule": schedule}
        going_on = train([Task(x, y, weight)], members, start=start, n_classes=self._n_classes(), **settings)
        self.population_ = replace(going_on, precision=ahead.precision)
        self._refuse_divergence()

    def _n_classes(self) -> int | None:
        return None

    def _refuse_divergence(self) -> None:
        if bool(self.population_.diverged.any()):
            raise FloatingPointError(
                f"Training diverged. Try learning_rate={self.learning_rate / 10:.3g} instead of "
                f"{self.learning_rate:.3g}, and look for extreme values in X and y."
            )

    # --- prediction -----------------------------------------------------------------------------------------------

    def _inputs(self, X: Any) -> np.ndarray:
        check_is_fitted(self)
        return validate_data(self, _as_array(X), reset=False, dtype=np.float64)

    def _blocks(self, x: np.ndarray) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Draws of all networks for some rows at a time: their means and noise variances, `[draw, row, output]`."""
        for start in range(0, len(x), _BLOCK_ROWS):
            rows = slice(start, start + _BLOCK_ROWS)
            mean, variance = self._draws(x[rows])
            yield rows, mean, variance

    def _draws(self, x: np.ndarray) -> tuple[Tensor, Tensor]:
        # One mask per draw for all rows and float64 throughout: a row's prediction does not depend on its neighbours.
        network = replace(
            self.population_,
            weights=tuple(w.double() for w in self.population_.weights),
            biases=tuple(b.double() for b in self.population_.biases),
        )
        mean, variance = draws(network, torch.tensor(x), n_draws=int(self.n_draws), seed=self.seed_, masks="shared")
        return mean.flatten(0, 1).cpu(), variance.flatten(0, 1).cpu()

    # --- storage --------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the fitted estimator to one file (see `dropbayes.storage`); `load` reads it back."""
        check_is_fitted(self)
        parameters = self.get_params(deep=False)
        if not isinstance(parameters["random_state"], int | np.integer | None):
            parameters["random_state"] = None  # a generator has no JSON form; the fitted model does not need it
        population = self.population_
        names = getattr(self, "feature_names_in_", None)
        settings = {
            "parameters": _as_json(parameters),
            "members": [asdict(member) for member in population.members],
            "seed": self.seed_,
            "n_features": int(self.n_features_in_),
            "feature_names": None if names is None else [str(name) for name in names],
            "search_scores": [float(s) for s in getattr(self, "search_scores_", [])],
            **self._own_state(),
        }
        tensors = {f"weight.{i}": w for i, w in enumerate(population.weights)}
        tensors |= {f"bias.{i}": b for i, b in enumerate(population.biases)}
        tensors |= {name: getattr(population, name) for name in _STACKED}
        storage.save(path, tensors, kind=type(self).__name__, settings=settings, version=_version())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Any:
        """The estimator a file holds, fitted.

        Raises:
            ValueError: The file is damaged, or holds something else.
        """
        file = storage.load(path, kinds=[cls.__name__])
        try:
            return cls._restored(file)
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"`path` holds a {file.kind} with missing or unknown parts: {error}.") from None

    @classmethod
    def _restored(cls, file: storage.ModelFile) -> Any:
        settings, tensors = file.settings, file.tensors
        parameters = {k: _from_json(v) for k, v in settings["parameters"].items()}
        if parameters["activation"] not in ACTIVATIONS:
            raise ValueError(f"`path` has the unknown activation {parameters['activation']!r}.")
        estimator = cls(**parameters)
        known = {f.name for f in fields(Member)}
        members = [
            Member(**{k: _from_json(v) for k, v in member.items() if k in known}) for member in settings["members"]
        ]
        n_layers = len(parameters["hidden"]) + 1
        estimator.population_ = Population(
            members=tuple(members),
            weights=tuple(tensors[f"weight.{i}"] for i in range(n_layers)),
            biases=tuple(tensors[f"bias.{i}"] for i in range(n_layers)),
            **{name: tensors[name] for name in _STACKED},
            likelihood=estimator._head(),
            activation=parameters["activation"],
        )
        estimator.seed_, estimator.n_features_in_ = settings["seed"], settings["n_features"]
        estimator.search_scores_ = np.asarray(settings["search_scores"])
        if settings["feature_names"] is not None:
            estimator.feature_names_in_ = np.asarray(settings["feature_names"], dtype=object)
        estimator._set_own_state(settings)
        return estimator

    def _own_state(self) -> dict[str, Any]:
        raise NotImplementedError

    def _set_own_state(self, settings: dict[str, Any]) -> None:
        raise NotImplementedError


class DropoutRegressor(RegressorMixin, _DropoutEstimator):
    r"""Regression by a dropout network whose uncertainty is read off its draws [GG16].

    Inputs and targets are standardised inside. By default the drop probability and the weight decay are searched: all
    candidates on all folds are trained as one population, scored by their held-out predictive log-likelihood, and the
    best is trained again on all rows. The precision τ is re-fitted on the held-out draws of the search.

    Args:
        hidden: The widths of the hidden layers.
        drop_prob: The probability of dropping a unit before each weight layer: a number, a tuple with one per layer,
            a list of these to try, or "search".
        weight_decay: λ beside half the mean squared error of standardised targets: a number, a list to try, or
        "search".
        noise: "constant", or "heteroscedastic" for a noise variance that depends on the input.
        learn_drop_prob: Learns each layer's drop probability (concrete dropout).
        activation: "relu" or "tanh".
        n_networks: Networks with different seeds whose draws are pooled.
        n_steps: Steps of Adam on small data.
        min_epochs: Passes over large data, where they are more steps than `n_steps`.
        learning_rate: Adam's first step size; it falls to zero along a cosine.
        batch_size: Rows of a step.
        n_folds: Folds of the search; 1 is a single split. "auto" takes 5 below 3000 rows.
        n_draws: Draws (the paper's T) per prediction and network.
        warm_start: Goes on from the present weights when `fit` is called again, without a search.
        device: "auto" (CUDA where there is one), "cpu", "cuda" ...
        random_state: The seed of everything, an integer for repeatable results.
        verbose: Shows progress in a terminal.

    Attributes:
        population_: The trained networks.
        precision_: τ, in units of 1/y².
        drop_prob_: The drop probability before each weight layer.
        search_scores_: The held-out log-likelihood of each candidate, in the units of y.

    Example:
        >>> x = np.linspace(-2, 2, 40)[:, None]
        >>> model = DropoutRegressor(drop_prob=0.05, weight_decay=1e-4, n_steps=50, random_state=0).fit(x, np.sin(x[:,
        0])) >>> mean, std = model.predict(x, return_std=True)
        >>> mean.shape, std.shape
        ((40,), (40,))
    """

    def __init__(
        self,
        hidden: tuple[int, ...] = (50, 50),
        *,
        drop_prob: Any = "search",
        weight_decay: Any = "search",
        noise: Literal["constant", "heteroscedastic"] = "constant",
        learn_drop_prob: bool = False,
        activation: Literal["relu", "tanh"] = "relu",
        n_networks: int = 1,
        n_steps: int = 2000,
        min_epochs: int = 10,
        learning_rate: float = 0.01,
        batch_size: int | Literal["auto"] = "auto",
        n_folds: int | Literal["auto"] = "auto",
        n_draws: int = 100,
        warm_start: bool = False,
        device: str = "auto",
        random_state: Any = None,
        verbose: bool = False,
    ) -> None:
        super().__init__(
            hidden,
            drop_prob=drop_prob,
            weight_decay=weight_decay,
            learn_drop_prob=learn_drop_prob,
            activation=activation,
            n_networks=n_networks,
            n_steps=n_steps,
            min_epochs=min_epochs,
            learning_rate=learning_rate,
            batch_size=batch_size,
            n_folds=n_folds,
            n_draws=n_draws,
            warm_start=warm_start,
            device=device,
            random_state=random_state,
            verbose=verbose,
        )
        self.noise = noise

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def _head(self) -> Head:
        if self.noise not in ("constant", "heteroscedastic"):
            raise ValueError(f"`noise` must be 'constant' or 'heteroscedastic'; got {self.noise!r}.")
        return "gaussian" if self.noise == "constant" else "heteroscedastic"

    @property
    def precision_(self) -> Any:
        """τ in units of 1/y²: a number, or one per output."""
        precision = self.population_.precision[0].cpu().numpy()
        return float(precision[0]) if self._one_column else precision

    @property
    def drop_prob_(self) -> tuple[float, ...]:
        """The drop probability before each weight layer of the first network."""
        return tuple(self.population_.drop_prob[0].tolist())

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> DropoutRegressor:
        """Searches, trains and re-fits τ.

        Args:
            X: Inputs `[row, feature]`: numpy, pandas, polars, torch or lists.
            y: Targets `[row]` or `[row, output]`.
            sample_weight: The weight of each row; a row of weight 2 counts as two in the objective.
        """
        x, y, weight = self._validated(X, y, sample_weight, reset=True)
        self._learn(x, y, weight)
        return self

    def _validated(self, X: Any, y: Any, sample_weight: Any, *, reset: bool) -> tuple[Any, Any, Any]:
        x, y = validate_data(
            self, _as_array(X), _as_array(y), reset=reset, dtype=np.float64, multi_output=True, y_numeric=True
        )
        y = np.asarray(y, dtype=np.float64)
        self._one_column = y.ndim == 1
        weight = None if sample_weight is None else _check_sample_weight(sample_weight, x)
        return x, y, weight

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> DropoutRegressor:
        """One pass over more rows, from the present weights; the first call standardises and does not search.

        τ is re-fitted on each call's rows before they are learned from, as they come: held-out rows for free.
        """
        first = not hasattr(self, "population_")
        x, y, weight = self._validated(X, y, sample_weight, reset=first)
        self._check_parameters()
        if first:
            self.seed_ = int(check_random_state(self.random_state).randint(2**31 - 1))
            member = replace(_middle(self._grid(len(x))), epochs=1)
            self.population_ = self._trained(x, y, weight, member, None)
        else:
            self._continue(x, y, weight, 1, "constant")
        return self

    def predict(self, X: Any, return_std: bool = False, return_cov: bool = False) -> Any:
        r"""The predictive mean; with `return_std` also the standard deviation, or with `return_cov` the covariance.

        Mean and variance are those of [GG16, prop:mean, prop:var]: the variance of the draws plus τ⁻¹. The covariance
        between rows is that of the draws, which are functions.
        """
        if return_std and return_cov:
            raise RuntimeError("At most one of return_std or return_cov can be requested.")
        x = self._inputs(X)
        if return_cov:
            return self._mean_and_covariance(x)
        means, variances = [], []
        for _, mean, noise in self._blocks(x):
            means.append(mean.mean(0))
            if return_std:
                variances.append(mean.var(0, unbiased=False) + noise.mean(0))
        result = self._shaped(torch.cat(means))
        return (result, self._shaped(torch.cat(variances).sqrt())) if return_std else result

    def _shaped(self, columns: Tensor) -> np.ndarray:
        return columns[..., 0].numpy() if self._one_column else columns.numpy()

    def _mean_and_covariance(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        parts = [(mean, noise) for _, mean, noise in self._blocks(x)]
        mean, noise = torch.cat([m for m, _ in parts], 1), torch.cat([v for _, v in parts], 1)
        centred = mean - mean.mean(0)
        covariance = torch.einsum("tnd,tmd->nmd", centred, centred) / len(mean)
        covariance += torch.diag_embed(noise.mean(0).T).permute(1, 2, 0)
        return self._shaped(mean.mean(0)), self._shaped(covariance)

    def predict_interval(self, X: Any, coverage: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
        """The lower and upper ends of the central interval that holds the outcome with probability `coverage`.

        They are quantiles of the predictive distribution itself, the mixture of the draws' Gaussians.
        """
        if not 0 < coverage < 1:
            raise ValueError(f"`coverage` must lie in (0, 1); got {coverage!r}.")
        x = self._inputs(X)
        ends = []
        for _, mean, noise in self._blocks(x):
            ends.append([_mixture_quantile(mean, noise.sqrt(), q) for q in ((1 - coverage) / 2, (1 + coverage) / 2)])
        lower, upper = (torch.cat(part) for part in zip(*ends, strict=True))
        return self._shaped(lower), self._shaped(upper)

    def sample_y(self, X: Any, n_samples: int = 1, random_state: Any = 0) -> np.ndarray:
        """Samples of outcomes, `[row, sample]` or `[row, output, sample]`: function draws with noise added."""
        x = self._inputs(X)
        source = check_random_state(random_state)
        parts = [(mean, noise) for _, mean, noise in self._blocks(x)]
        centres, noises = (torch.cat(part, 1).numpy() for part in zip(*parts, strict=True))
        chosen = source.randint(len(centres), size=n_samples)
        samples = centres[chosen] + np.sqrt(noises[chosen]) * source.standard_normal(centres[chosen].shape)
        samples = np.moveaxis(samples, 0, -1)
        return samples[:, 0] if self._one_column else samples

    def log_likelihood(self, X: Any, y: Any) -> float:
        r"""The mean of $\log \tfrac1T \sum_t \mathcal N(\mathbf y; \widehat{\mathbf y}_t, \tau^{-1})$ over the rows."""
        x = self._inputs(X)
        targets = torch.as_tensor(np.asarray(_as_array(y), dtype=np.float64).reshape(len(x), -1))
        total = 0.0
        for rows, mean, noise in self._blocks(x):
            density = -0.5 * ((targets[rows] - mean).square() / noise + noise.log() + math.log(2 * math.pi)).sum(-1)
            total += float((density.logsumexp(0) - math.log(len(mean))).sum())
        return total / len(x)

    def _own_state(self) -> dict[str, Any]:
        return {"one_column": bool(self._one_column)}

    def _set_own_state(self, settings: dict[str, Any]) -> None:
        self._one_column = settings["one_column"]


class DropoutClassifier(ClassifierMixin, _DropoutEstimator):
    """Classification by a dropout network whose probabilities are averaged over draws [GG16].

    The parameters are those of `DropoutRegressor`, without `noise`; the weight decay stands beside the mean
    cross-entropy.

    Attributes:
        classes_: The labels, sorted.
        population_: The trained networks.
        search_scores_: The held-out log-likelihood of each candidate.

    Example:
        >>> x = np.linspace(-2, 2, 40)[:, None]
        >>> model = DropoutClassifier(drop_prob=0.05, weight_decay=1e-4, n_steps=50, random_state=0).fit(x, x[:, 0] > 0)
        >>> model.predict_proba(x).shape
        (40, 2)
    """

    _likelihood: Head = "categorical"

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> DropoutClassifier:
        """Searches and trains; see `DropoutRegressor.fit`."""
        x, labels, weight = self._validated(X, y, sample_weight, reset=True)
        self.classes_, codes = np.unique(labels, return_inverse=True)
        present = codes if weight is None else codes[weight > 0]
        if len(np.unique(present)) < 2:
            raise ValueError(f"`y` must have at least 2 classes; got {len(np.unique(present))} class.")
        self._learn(x, codes.astype(np.int64), weight, len(self.classes_))
        return self

    def _validated(self, X: Any, y: Any, sample_weight: Any, *, reset: bool) -> tuple[Any, Any, Any]:
        from sklearn.utils import column_or_1d

        x, y = validate_data(self, _as_array(X), _as_array(y), reset=reset, dtype=np.float64)
        check_classification_targets(y)
        labels = column_or_1d(y, warn=True)
        weight = None if sample_weight is None else _check_sample_weight(sample_weight, x)
        return x, labels, weight

    def _n_classes(self) -> int | None:
        return len(self.classes_)

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> DropoutClassifier:
        """One pass over more rows from the present weights; the first call needs all `classes` and does not search."""
        first = not hasattr(self, "population_")
        x, labels, weight = self._validated(X, y, sample_weight, reset=first)
        self._check_parameters()
        if first:
            if classes is None:
                raise ValueError("`classes` must be passed on the first call to partial_fit.")
            self.classes_ = np.unique(np.asarray(classes))
            self.seed_ = int(check_random_state(self.random_state).randint(2**31 - 1))
        elif classes is not None and not np.array_equal(np.unique(np.asarray(classes)), self.classes_):
            raise ValueError(f"`classes` must be those of the first call, {self.classes_}; got {classes}.")
        unknown = np.setdiff1d(labels, self.classes_)
        if len(unknown):
            raise ValueError(f"`y` must hold only the `classes` {self.classes_}; got {unknown}.")
        codes = np.searchsorted(self.classes_, labels)
        if first:
            member = replace(_middle(self._grid(len(x))), epochs=1)
            self.population_ = self._trained(x, codes, weight, member, len(self.classes_))
        else:
            self._continue(x, codes, weight, 1, "constant")
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """The class probabilities, a mean over draws, `[row, class]`."""
        x = self._inputs(X)
        return torch.cat([mean.mean(0) for _, mean, _ in self._blocks(x)]).numpy()

    def predict(self, X: Any) -> np.ndarray:
        """The most probable class of each row."""
        probabilities = self.predict_proba(X)
        return np.asarray(self.classes_[probabilities.argmax(1)])

    def log_likelihood(self, X: Any, y: Any) -> float:
        """The mean log-probability of the true classes."""
        probabilities = self.predict_proba(X)
        codes = np.searchsorted(self.classes_, np.asarray(_as_array(y)))
        return float(np.log(probabilities[np.arange(len(codes)), codes]).mean())

    def _own_state(self) -> dict[str, Any]:
        return {"classes": self.classes_.tolist(), "classes_dtype": self.classes_.dtype.str}

    def _set_own_state(self, settings: dict[str, Any]) -> None:
        dtype = np.dtype(settings["classes_dtype"])
        self.classes_ = np.asarray(settings["classes"], dtype=dtype)


def _as_array(values: Any) -> Any:
    """Torch tensors as numpy arrays; everything else scikit-learn reads itself."""
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else values


def _canonical_rows(x: Any, y: Any, weight: Any) -> tuple[Any, Any, Any]:
    """The rows sorted, whole-number weights written out as repetitions.

    So what is learned does not depend on the order of the rows, and a row of weight 2 is exactly a row given twice.
    """
    if weight is not None:
        x, y, weight = x[weight > 0], y[weight > 0], weight[weight > 0]
        if len(weight) and np.all(weight == np.round(weight)) and weight.max() <= _REPEATED_WEIGHT:
            times = weight.astype(np.int64) // np.gcd.reduce(weight.astype(np.int64))
            x, y, weight = np.repeat(x, times, axis=0), np.repeat(y, times, axis=0), None
    order = np.lexsort(np.vstack([x.T, y.reshape(len(y), -1).T]))
    return x[order], y[order], None if weight is None else weight[order]


def _middle(grid: list[Member]) -> Member:
    return grid[len(grid) // 2]


def _mixture_quantile(mean: Tensor, scale: Tensor, level: float) -> Tensor:
    """The quantile of an equally weighted mixture of Gaussians over axis 0, by bisection."""
    z = float(torch.special.ndtri(torch.tensor(level, dtype=torch.float64)))
    low, high = (mean + z * scale).amin(0), (mean + z * scale).amax(0)  # a mixture's quantile lies between its parts'
    for _ in range(60):
        middle = 0.5 * (low + high)
        below = torch.special.ndtr((middle - mean) / scale).mean(0) < level
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return 0.5 * (low + high)


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
