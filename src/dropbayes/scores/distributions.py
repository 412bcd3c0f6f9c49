r"""Scores of a whole predictive distribution given by its draws: CRPS, energy and variogram scores."""

import math

import torch
from torch import Tensor

from dropbayes.runtime.validation import Array, check_positive, check_values, finite_tensor, matching_tensors


def crps(draws: Array, y: Array, *, noise_variance: Array | float = 0.0) -> Tensor:
    r"""The continuous ranked probability score of the draw mixture $F = \tfrac1T \sum_t \mathcal N(\widehat y_t, v_t)$.

    $$\int \big(F(z) - \mathbb 1[y \le z]\big)^2 \, dz = \tfrac1T \sum_t A(y - \widehat y_t, v_t)
    - \tfrac1{2T^2} \sum_{s,t} A(\widehat y_s - \widehat y_t, v_s + v_t)$$

    with $A(\mu, v) = \mathbb E|\mathcal N(\mu, v)|$ [Grimit et al. 2006]; in the units of y, smaller is better. Of
    outputs $\widehat y_t$, `[draw, row]`, and targets `[row]`. The `noise_variance` $v$ is a number, `[row]`,
    `[draw, 1]` or `[draw, row]`: 0 scores the bare draws, $\tau^{-1}$ the predictive distribution.

    Examples:
        >>> crps(torch.tensor([[0.0], [2.0]]), torch.tensor([1.0]))
        tensor([0.5000])
    """
    misfit, pairs = _crps_terms(draws, y, noise_variance, equal_pairs=True)
    return misfit - 0.5 * pairs / len(draws) ** 2


def fair_crps(draws: Array, y: Array, *, noise_variance: Array | float = 0.0) -> Tensor:
    r"""The fair CRPS: the unbiased estimate, from $T$ draws, of the score that infinitely many would have.

    As `crps` with $\tfrac1{2T(T-1)} \sum_{s \ne t}$ in place of $\tfrac1{2T^2} \sum_{s,t}$ [Ferro 2014], of at least 2
    independent draws. `crps` scores the $T$ draws themselves and so falls with $T$; this one compares models with
    different numbers of draws. An estimate may be negative.

    Examples:
        >>> fair_crps(torch.tensor([[0.0], [2.0]]), torch.tensor([1.0]))
        tensor([0.])
    """
    misfit, pairs = _crps_terms(draws, y, noise_variance, equal_pairs=False)
    if (n_draws := len(draws)) < 2:
        raise ValueError(f"`draws` must hold at least 2 draws for a fair score; got {n_draws}.")
    return misfit - 0.5 * pairs / (n_draws * (n_draws - 1))


def _crps_terms(draws: Array, y: Array, noise_variance: Array | float, *, equal_pairs: bool) -> tuple[Tensor, Tensor]:
    r"""The mean of $A(y - \widehat y_t, v_t)$ and the sum of $A(\widehat y_s - \widehat y_t, v_s + v_t)$."""
    outputs, outcome = matching_tensors({"draws": draws, "y": y}, draws="draws")
    variance = finite_tensor("noise_variance", noise_variance).to(outputs)
    if variance.shape not in ((), outputs.shape[1:], (len(outputs), *(1,) * (outputs.dim() - 1)), outputs.shape):
        got = f"shape {tuple(variance.shape)} for draws {tuple(outputs.shape)}"
        raise ValueError(f"`noise_variance` must be a number, [row], [draw, 1] or [draw, row]; got {got}.")
    check_values("noise_variance", variance)
    variance = variance.expand_as(outputs)
    pairs = torch.zeros_like(outcome)
    for index, (mean, noise) in enumerate(zip(outputs, variance, strict=True)):  # avoids holding T² values at once
        magnitude = _expected_magnitude(outputs - mean, variance + noise)
        pairs = pairs + (magnitude.sum(0) if equal_pairs else magnitude.sum(0) - magnitude[index])
    return _expected_magnitude(outcome - outputs, variance).mean(0), pairs


def _expected_magnitude(mean: Tensor, variance: Tensor) -> Tensor:
    r"""$\mathbb E|z| = 2 \sigma \varphi(\mu/\sigma) + \mu\,(2\Phi(\mu/\sigma) - 1)$, and $|\mu|$ where $\sigma = 0$."""
    noisy = variance > 0
    std = torch.where(noisy, variance, 1).sqrt()  # the 1 keeps the gradient finite where the other branch is taken
    ratio = mean / std
    smooth = std * math.sqrt(2 / math.pi) * torch.exp(-0.5 * ratio.square()) + mean * torch.erf(ratio / math.sqrt(2))
    return torch.where(noisy, smooth, mean.abs())


def _joint(draws: Array, y: Array) -> tuple[Tensor, Tensor]:
    outputs, outcome = matching_tensors({"draws": draws, "y": y}, draws="draws")
    if outcome.dim() != 2:
        rule = "be [draw, row, output] and `y` [row, output]"
        got = f"{tuple(outputs.shape)} and {tuple(outcome.shape)}"
        raise ValueError(f"`draws` must {rule}; got {got}. For one output use `crps`.")
    return outputs, outcome


def energy_score(draws: Array, y: Array) -> Tensor:
    r"""The energy score of several outputs together, `[row]`: the CRPS in more dimensions; smaller is better.

    $$\tfrac1T \sum_t \|y - \widehat y_t\| - \tfrac1{2T^2} \sum_{s,t} \|\widehat y_s - \widehat y_t\|$$

    [Gneiting & Raftery 2007]. Proper for the joint distribution, but more sensitive to means and variances than to
    correlations, which `variogram_score` detects. Put outputs of different units on one scale first, and include the
    observation noise in the draws, `[draw, row, output]`.

    Examples:
        >>> energy_score(torch.tensor([[[0.0, 0.0]], [[6.0, 8.0]]]), torch.tensor([[0.0, 0.0]]))
        tensor([2.5000])
    """
    outputs, outcome = _joint(draws, y)
    apart = (torch.linalg.vector_norm(outputs - one, dim=-1).mean(0) for one in outputs)  # of each draw from all
    pairs = sum(apart, torch.zeros_like(outcome[:, 0]))
    return torch.linalg.vector_norm(outcome - outputs, dim=-1).mean(0) - 0.5 * pairs / len(outputs)


def variogram_score(draws: Array, y: Array, *, order: float = 0.5) -> Tensor:
    r"""The variogram score of several outputs, `[row]`: do their differences vary as claimed? Smaller is better.

    $$\sum_{i,j} \Big(|y_i - y_j|^p - \tfrac1T \sum_t |\widehat y_{ti} - \widehat y_{tj}|^p\Big)^2$$

    [Scheuerer & Hamill 2015], with the power $p$ `order`. It detects wrong correlations but not a bias common to all
    outputs: use it together with `energy_score`, on the same draws.

    Examples:
        >>> variogram_score(torch.tensor([[[0.0, 1.0]]]), torch.tensor([[0.0, 4.0]]))
        tensor([2.])
    """
    check_positive("order", order)
    outputs, outcome = _joint(draws, y)
    score = torch.zeros_like(outcome[:, 0])
    for column in range(outcome.shape[1]):  # one column against all: [draw, row, output] values at a time
        seen = (outcome - outcome[:, column, None]).abs() ** order
        claimed = ((outputs - outputs[..., column, None]).abs() ** order).mean(0)
        score = score + (seen - claimed).square().sum(-1)
    return score
