r"""Recalibration of estimators on held-out rows: scaled deviations, mapped quantile levels, or conformal intervals."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from dropbayes import calibration
from dropbayes.calibration import conformal
from dropbayes.predictive import Mixture, draw_mean
from dropbayes.runtime.validation import Array, check_choice, float_tensor

Method = Literal["scale", "isotonic", "conformal"]
"""The methods of recalibration; "isotonic" is for regression only, since classes have no quantile levels."""

_MIN_ROWS = 20  # With fewer rows, the map fits their noise.
_MAX_VALUES = 5000  # Values stored per map; more would change no level by 1/5000.
_PRIOR_ROWS, _MAX_FACTOR = 5, 20.0  # that the prior on a factor counts for, and the largest factor either way
_POOL_ROWS = 0.3  # Those that the prior on the weights of a pool counts for; more cost tables of thousands of rows.
_MIN_TEMPERATURE = 0.5  # Held-out rows without errors would give temperature 0.


def best_factor(log_likelihood: Callable[[float], float]) -> float:
    r"""The factor c with the greatest log-likelihood of held-out rows, shrunk towards 1.

    The log-likelihood is penalised by $n_0 (\log c)^2$: a Gaussian's deviation estimated from $n_0$ rows has the same
    information. The penalty is zero at 1, so the rows are never less likely than without the factor.
    """
    from scipy.optimize import minimize_scalar

    def loss(log_factor: float) -> float:
        return _PRIOR_ROWS * log_factor**2 - log_likelihood(math.exp(log_factor))

    reach = math.log(_MAX_FACTOR)
    # A mixture may have several maxima: a grid that contains 1 finds the highest, a bounded search refines it.
    grid = np.linspace(-reach, reach, 25)
    start, width = min(grid, key=loss), grid[1] - grid[0]
    found = minimize_scalar(loss, bounds=(max(start - width, -reach), min(start + width, reach)), method="bounded")
    return math.exp(min([found.x, start, 0.0], key=loss))


def tempered(logits: Tensor, temperature: float, shares: np.ndarray, shift: Tensor | float = 0.0) -> Tensor:
    r"""Log-probabilities from logits whose distance from those of the class shares π is divided by a temperature.

    $\log \mathrm{softmax}\big(\log \pi + (z - \log \pi) / \theta + s\big)$: at θ → ∞ and without the shift s they are
    the shares.
    """
    centre = torch.as_tensor(shares).to(logits).log()
    return torch.log_softmax(centre + (logits - centre) / temperature + shift, -1)


def class_log_probabilities(logits: Tensor, temperature: Any, shares: np.ndarray, shift: Tensor | float = 0) -> Tensor:
    """The log-probabilities `[row, class]` of the mean over draws, tempered, from their logits `[draw, row, class]`."""
    return tempered(logits, temperature, shares, shift).logsumexp(0) - math.log(len(logits))


def pool_weights(
    draws: Tensor, codes: Tensor, weight: Tensor, shares: np.ndarray, evidence: Tensor
) -> tuple[float, list[float], float]:
    r"""The temperature θ of draws and the weights of evidence beside them that held-out rows prefer, and their score.

    The draws are probabilities `[draw, row, class]`, the evidence is in nats beyond the shares, `[kind, row, class]`.
    The log-likelihood is penalised by $n_1 \big((1/\theta - 1)^2 + \sum_j a_j^2\big)$. Of the class of each of N rows,
    $(n_0 / N)^2$ is that of the class shares: of many candidates, one predicts the few rows of a small table by luck.
    """
    from scipy.optimize import minimize

    start, logits = np.eye(1 + len(evidence))[0], draws.clamp_min(1e-30).log()
    smoothing = torch.as_tensor(shares) * (_PRIOR_ROWS / len(codes)) ** 2
    observed = torch.nn.functional.one_hot(codes, len(shares)).double()

    def log_likelihood(values: Tensor, outcome: Tensor) -> Tensor:
        shift = torch.einsum("j,jnk->nk", values[1:], evidence)
        return (class_log_probabilities(logits, 1 / values[0], shares, shift) * outcome).sum(1) @ weight

    def loss(given: np.ndarray) -> tuple[float, np.ndarray]:
        values = torch.from_numpy(given).requires_grad_()
        penalty = _POOL_ROWS * (values - torch.from_numpy(start)).square().sum()
        total = penalty - log_likelihood(values, observed + smoothing)
        return float(total.detach()), torch.autograd.grad(total, values)[0].numpy()

    bounds = [(1 / _MAX_FACTOR, 1 / _MIN_TEMPERATURE)] + [(0.0, 3.0)] * len(evidence)
    found = torch.from_numpy(minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds).x)
    return 1 / float(found[0]), found[1:].tolist(), float(log_likelihood(found, observed) / weight.sum())


def _scaled(mixture: Mixture, factor: float) -> Mixture:
    centre = mixture.mean
    return Mixture(centre + factor * (mixture.location - centre), factor * mixture.scale, mixture.freedom)


@dataclass(frozen=True)
class Recalibration:
    """A map learned from held-out rows.

    "scale" multiplies the standard deviation (for classes, divides the logits relative to those of the class shares);
    "isotonic" maps the levels of the predictive distribution; "conformal" sets intervals (for classes, sets of labels)
    from the residuals.
    """

    method: Method
    values: tuple[float, ...]  #: The factor; or the sorted transforms of the held-out rows; or their conformal scores.
    n_rows: int  #: The number of held-out rows.

    def __post_init__(self) -> None:
        check_choice("method", self.method, get_args(Method))
        if not self.values or not all(math.isfinite(value) for value in self.values):
            raise ValueError("`values` must hold at least one finite number.")

    @property
    def factor(self) -> float:
        """The factor on the standard deviation; 1 unless the method is "scale"."""
        return self.values[0] if self.method == "scale" else 1.0

    def mixture(self, mixture: Mixture) -> Mixture:
        """The recalibrated predictive distribution."""
        if self.method == "scale":
            return _scaled(mixture, self.factor)
        held_out = torch.tensor(self.values, dtype=torch.float64)
        kind = _LevelMixture if self.method == "isotonic" else _ConformalMixture
        return kind(mixture.location, mixture.scale, mixture.freedom, held_out=held_out)

    def probabilities(self, draws: Tensor, shares: np.ndarray) -> Tensor:
        """The recalibrated class probabilities of draws."""
        return draws if self.method != "scale" else tempered(draws.clamp_min(1e-30).log(), self.factor, shares).exp()

    def label_sets(self, probabilities: Array, coverage: float) -> Tensor:
        """The label sets that contain the true class with the given probability, `[row, class]`."""
        scores = torch.tensor(self.values, dtype=torch.float64)
        return conformal.conformal_sets(probabilities, threshold=conformal.conformal_threshold(scores, level=coverage))


@dataclass(frozen=True, eq=False)
class _LevelMixture(Mixture):
    """A mixture with mapped quantile levels; its moments and density remain those of the draws."""

    held_out: Tensor = field(kw_only=True)  # the sorted transforms

    def pit(self, y: Array) -> Tensor:
        return calibration.isotonic_recalibration(self.held_out).observed(super().pit(y).double()).to(self.location)

    def quantile(self, level: float) -> Tensor:
        mapped = calibration.isotonic_recalibration(self.held_out)
        claimed = float(mapped.claimed(torch.tensor(level, dtype=torch.float64)))
        return super().quantile(min(max(claimed, 1e-9), 1 - 1e-9))


@dataclass(frozen=True, eq=False)
class _ConformalMixture(Mixture):
    """A mixture with conformal intervals: the mean plus and minus a multiple of the standard deviation."""

    held_out: Tensor = field(kw_only=True)  # the sorted residuals

    def pit(self, y: Array) -> Tensor:
        standard = ((float_tensor(y).to(self.location) - self.mean) / self.std).double()
        rank = torch.searchsorted(self.held_out, standard.abs().contiguous()) / (len(self.held_out) + 1)
        return (0.5 + 0.5 * standard.sign() * rank).to(self.location)

    def quantile(self, level: float) -> Tensor:
        if (coverage := abs(2 * level - 1)) == 0:
            return self.mean
        if not (reach := conformal.conformal_threshold(self.held_out, level=coverage)).isfinite():
            rule = f"needs more than the {len(self.held_out)} rows that the intervals were calibrated on"
            n_needed = math.ceil(coverage / (1 - coverage))
            raise ValueError(f"`coverage` {coverage:g} {rule}; at least {n_needed} are needed.")
        return self.mean + math.copysign(float(reach), level - 0.5) * self.std


def with_recalibration(estimator: Any, recalibration: Recalibration | None) -> Any:
    """A view of the same networks whose predictive distribution is recalibrated; as it was for None."""
    if recalibration is not None and hasattr(estimator, "classes_") and recalibration.method == "isotonic":
        raise ValueError("`method` isotonic maps the levels of numbers; use scale or conformal for classes.")
    view = copy.copy(estimator)
    view.recalibration = recalibration
    return view


def fit_recalibration(estimator: Any, X: Any, y: Any, *, method: Method = "scale", at: str = "`y`") -> Recalibration:
    """Fits a recalibration to the inputs and the outcomes of rows new to an estimator; errors call them `at`.

    It is a fitted `DropoutRegressor` of one output, or a `DropoutClassifier`; see `Recalibration` for the methods.
    """
    with_recalibration(estimator, Recalibration(method, (1.0,), len(y)))  # raises for a method that does not suit
    if len(y) < _MIN_ROWS:
        raise ValueError(f"{at} must hold at least {_MIN_ROWS} held-out rows to calibrate on; got {len(y)}.")
    plain = with_recalibration(estimator, None)
    if hasattr(plain, "classes_"):
        draws, labels = plain.draws(X), torch.from_numpy(plain._codes(y, len(y)))
        if method == "conformal":
            return Recalibration(method, _sorted_subset(conformal.label_scores(draw_mean(draws), labels)), len(y))
        rows, logits, shares = torch.arange(len(labels)), draws.clamp_min(1e-30).log(), plain.class_shares_
        factor = best_factor(lambda value: float(class_log_probabilities(logits, value, shares)[rows, labels].sum()))
        return Recalibration(method, (factor,), len(y))
    outcome = plain.transform_.forward(torch.as_tensor(np.asarray(y, float)))  # where the noise is symmetric
    blocks = [(rows, getattr(mixture, "base", mixture)) for rows, mixture in plain.predictive_blocks(X)]

    def log_likelihood(factor: float) -> float:
        return sum(float(_scaled(mixture, factor).log_density(outcome[rows]).sum()) for rows, mixture in blocks)

    if method == "scale":
        return Recalibration(method, (best_factor(log_likelihood),), len(y))
    if method == "isotonic":
        scores = [mixture.pit(outcome[rows]) for rows, mixture in blocks]
    else:
        scores = [conformal.standardised_residuals(m.mean, m.std, outcome[rows]) for rows, m in blocks]
    return Recalibration(method, _sorted_subset(torch.cat(scores)), len(y))


def _sorted_subset(values: Tensor) -> tuple[float, ...]:
    """The sorted values, rounded up, as a row that ties with one is within it; of too many, an evenly spaced subset."""
    ordered = values.double().sort().values
    if len(ordered) > _MAX_VALUES:
        ordered = ordered[torch.linspace(0, len(ordered) - 1, _MAX_VALUES).ceil().long()]
    return tuple(((ordered * 1e9).ceil() / 1e9).tolist())
