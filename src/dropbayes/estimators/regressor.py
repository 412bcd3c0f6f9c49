r"""The scikit-learn regressor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import torch
from sklearn.base import RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, validate_data

from dropbayes.estimators.learning import DropoutEstimator, as_array
from dropbayes.mixtures import Mixture


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

    def _head(self) -> str:
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

    def predictive(self, X: Any) -> Mixture:
        """The predictive distribution of each row: a mixture over the draws of all networks, in the units of y."""
        blocks = [mixture for _, mixture in self.predictive_blocks(X)]
        location, scale = (torch.cat([getattr(m, name) for m in blocks], 1) for name in ("location", "scale"))
        return Mixture(location, scale, blocks[0].freedom)

    def predictive_blocks(self, X: Any, *, block_rows: int | None = None) -> Iterator[tuple[slice, Mixture]]:
        """The rows and the `predictive` of one block of rows after the other, so that the memory stays bounded.

        Args:
            X: Inputs `[row, feature]`.
            block_rows: Rows per block; chosen from the number of draws by default.
        """
        for rows, mean, variance in self._draw_blocks(self._inputs(X), block_rows):
            if self.one_column_:
                mean, variance = mean[..., 0], variance[..., 0]
            yield rows, Mixture(mean, variance.sqrt())

    def predict(self, X: Any, return_std: bool = False, return_cov: bool = False) -> Any:
        r"""The predictive mean; with `return_std` also the standard deviation, or with `return_cov` the covariance.

        Mean and variance are those of [GG16, prop:mean, prop:var]: the variance of the draws plus that of the noise.
        The covariance between rows is that of the draws, which are functions.
        """
        if return_std and return_cov:
            raise RuntimeError("At most one of return_std or return_cov can be requested.")
        if return_cov:
            return self._mean_and_covariance(X)
        means, stds = [], []
        for _, mixture in self.predictive_blocks(X):
            means.append(mixture.mean)
            if return_std:
                stds.append(mixture.std)
        mean = torch.cat(means).numpy()
        return (mean, torch.cat(stds).numpy()) if return_std else mean

    def _mean_and_covariance(self, X: Any) -> tuple[np.ndarray, np.ndarray]:
        mixture = self.predictive(X)
        centred = mixture.location - mixture.mean
        covariance = torch.einsum("tn...,tm...->nm...", centred, centred) / mixture.n_draws
        rows = torch.arange(len(mixture.mean))
        covariance[rows, rows] += mixture.aleatoric
        return mixture.mean.numpy(), covariance.numpy()

    def predict_interval(self, X: Any, coverage: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
        """The lower and upper ends of the central interval that holds the outcome with probability `coverage`.

        They are quantiles of the predictive distribution itself, the mixture over the draws.
        """
        if not 0 < coverage < 1:
            raise ValueError(f"`coverage` must lie in (0, 1); got {coverage!r}.")
        ends = [mixture.interval(coverage) for _, mixture in self.predictive_blocks(X)]
        lower, upper = (torch.cat(end).numpy() for end in zip(*ends, strict=True))
        return lower, upper

    def sample_y(self, X: Any, n_samples: int = 1, random_state: Any = 0) -> np.ndarray:
        """Samples of outcomes, `[row, sample]` or `[row, output, sample]`: function draws with noise added."""
        mixture, source = self.predictive(X), check_random_state(random_state)
        chosen = source.randint(mixture.n_draws, size=n_samples)
        location, scale = mixture.location[chosen].numpy(), mixture.scale[chosen].numpy()
        return np.moveaxis(location + scale * source.standard_normal(location.shape), 0, -1)

    def log_likelihood(self, X: Any, y: Any) -> float:
        r"""The mean over rows of the predictive log-density [GG16, eq:predictive_dist].

        $\log \tfrac1T \sum_t p(\mathbf y \mid \widehat{\mathbf y}_t)$; the density of all outputs together where
        there are several.
        """
        x = self._inputs(X)
        shape = (len(x),) if self.one_column_ else (len(x), self.population_.y_mean.shape[-1])
        targets = torch.from_numpy(np.array(as_array(y), dtype=np.float64))
        if targets.shape != shape:
            raise ValueError(f"`y` must have the shape {shape}, that of the prediction; got {tuple(targets.shape)}.")
        densities = [mixture.log_density(targets[rows]) for rows, mixture in self.predictive_blocks(x)]
        return float(torch.cat(densities).mean())

    def _own_state(self) -> dict[str, Any]:
        return {"one_column": bool(self.one_column_)}

    def _set_own_state(self, settings: dict[str, Any]) -> None:
        self.one_column_ = settings["one_column"]
