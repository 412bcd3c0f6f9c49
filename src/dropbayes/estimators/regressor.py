r"""The scikit-learn regressor."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import torch
from sklearn.base import RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, validate_data
from torch import Tensor

from dropbayes.estimators.learning import DropoutEstimator, as_array
from dropbayes.mixtures import mixture_quantile
from dropbayes.population.records import Head


class DropoutRegressor(RegressorMixin, DropoutEstimator):
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
        >>> model = DropoutRegressor(drop_prob=0.05, weight_decay=1e-4, n_steps=50, random_state=0)
        >>> mean, std = model.fit(x, np.sin(x[:, 0])).predict(x, return_std=True)
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
        n_networks: int = 4,
        n_steps: int = 4000,
        min_epochs: int = 10,
        learning_rate: float = 0.01,
        batch_size: int | Literal["auto"] = "auto",
        n_folds: int | Literal["auto"] = "auto",
        n_draws: int = 50,
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
        return float(precision[0]) if self.one_column_ else precision

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
            self, as_array(X), as_array(y), reset=reset, dtype=np.float64, multi_output=True, y_numeric=True
        )
        y = np.asarray(y, dtype=np.float64)
        self.one_column_ = y.ndim == 1
        weight = None if sample_weight is None else _check_sample_weight(sample_weight, x)
        return x, y, weight

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> DropoutRegressor:
        """One pass over more rows, from the present weights; the first call standardises and does not search.

        Each call's rows test the noise before they are learned from: τ follows a running mean of what they say.
        """
        x, y, weight = self._validated(X, y, sample_weight, reset=not hasattr(self, "population_"))
        self._check_parameters()
        self._take_in(x, y, weight)
        return self

    def predict(self, X: Any, return_std: bool = False, return_cov: bool = False) -> Any:
        r"""The predictive mean; with `return_std` also the standard deviation, or with `return_cov` the covariance.

        Mean and variance are those of [GG16, prop:mean, prop:var]: the variance of the draws plus τ⁻¹. The covariance
        between rows is that of the draws, which are functions.
        """
        if return_std and return_cov:
            raise RuntimeError("At most one of return_std or return_cov can be requested.")
        x = self.validated_inputs(X)
        if return_cov:
            return self._mean_and_covariance(x)
        means, variances = [], []
        for _, mean, noise in self.draw_blocks(x):
            means.append(mean.mean(0))
            if return_std:
                variances.append(mean.var(0, unbiased=False) + noise.mean(0))
        result = self._shaped(torch.cat(means))
        return (result, self._shaped(torch.cat(variances).sqrt())) if return_std else result

    def _shaped(self, columns: Tensor) -> np.ndarray:
        return columns[..., 0].numpy() if self.one_column_ else columns.numpy()

    def _mean_and_covariance(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        parts = [(mean, noise) for _, mean, noise in self.draw_blocks(x)]
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
        x = self.validated_inputs(X)
        ends = []
        for _, mean, noise in self.draw_blocks(x):
            ends.append([mixture_quantile(mean, noise.sqrt(), q) for q in ((1 - coverage) / 2, (1 + coverage) / 2)])
        lower, upper = (torch.cat(part) for part in zip(*ends, strict=True))
        return self._shaped(lower), self._shaped(upper)

    def sample_y(self, X: Any, n_samples: int = 1, random_state: Any = 0) -> np.ndarray:
        """Samples of outcomes, `[row, sample]` or `[row, output, sample]`: function draws with noise added."""
        x = self.validated_inputs(X)
        source = check_random_state(random_state)
        parts = [(mean, noise) for _, mean, noise in self.draw_blocks(x)]
        centres, noises = (torch.cat(part, 1).numpy() for part in zip(*parts, strict=True))
        chosen = source.randint(len(centres), size=n_samples)
        samples = centres[chosen] + np.sqrt(noises[chosen]) * source.standard_normal(centres[chosen].shape)
        samples = np.moveaxis(samples, 0, -1)
        return samples[:, 0] if self.one_column_ else samples

    def log_likelihood(self, X: Any, y: Any) -> float:
        r"""The mean of $\log \tfrac1T \sum_t \mathcal N(\mathbf y; \widehat{\mathbf y}_t, \tau^{-1})$ over the rows."""
        x = self.validated_inputs(X)
        targets = torch.from_numpy(np.array(as_array(y), dtype=np.float64).reshape(len(x), -1))
        total = 0.0
        for rows, mean, noise in self.draw_blocks(x):
            density = -0.5 * ((targets[rows] - mean).square() / noise + noise.log() + math.log(2 * math.pi)).sum(-1)
            total += float((density.logsumexp(0) - math.log(len(mean))).sum())
        return total / len(x)

    def _own_state(self) -> dict[str, Any]:
        return {"one_column": bool(self.one_column_)}

    def _set_own_state(self, settings: dict[str, Any]) -> None:
        self.one_column_ = settings["one_column"]
