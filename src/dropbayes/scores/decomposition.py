r"""Decompositions of proper scores into reliability, resolution and uncertainty.

$$\text{score} = \text{reliability} - \text{resolution} + \text{uncertainty}$$

*Uncertainty* is the score of the constant prediction of the outcomes' overall frequencies, *resolution* the gain of the
calibrated prediction over it, *reliability* the loss from miscalibration.
"""

from dataclasses import dataclass

import numpy as np
import torch

from dropbayes.runtime.validation import Array, matching_tensors, row_values, row_weights
from dropbayes.scores.classification import probabilities_and_labels


@dataclass(frozen=True)
class Decomposition:
    """A mean score and its three parts: score = reliability - resolution + uncertainty.

    Recalibration can remove the reliability, 0 or more; only a better model can raise the resolution; the uncertainty
    is a property of the outcomes alone.
    """

    score: float
    reliability: float
    resolution: float
    uncertainty: float


def brier_decomposition(probabilities: Array, labels: Array, *, sample_weight: Array | None = None) -> Decomposition:
    r"""The decomposition of the mean Brier score without bins, by isotonic regression of each class.

    With $\widehat p$ the isotonic regression of $\mathbb 1[y = c]$ on $p_c$ and $\bar p$ the mean frequency,
    reliability is $S(p) - S(\widehat p)$, resolution $S(\bar p) - S(\widehat p)$ and uncertainty $S(\bar p)$, summed
    over classes [Dimitriadis, Gneiting & Jordan 2021]. Reliability and resolution are both biased upward, by about the
    number of steps of $\widehat p$ over N: compare models on the same rows.

    Examples:
        >>> p = torch.tensor([[0.9, 0.1]] * 4 + [[0.1, 0.9]] * 4)  # claims 90 %, 75 % are right
        >>> parts = brier_decomposition(p, torch.tensor([0, 0, 0, 1, 1, 1, 1, 0]))
        >>> round(parts.reliability, 4), round(parts.resolution, 4), round(parts.uncertainty, 4)
        (0.045, 0.125, 0.5)
    """
    from scipy.optimize import isotonic_regression

    predicted, truth = probabilities_and_labels(probabilities, labels)
    weight = row_weights(sample_weight, len(truth), like=predicted).cpu().numpy()
    counted = weight > 0  # scipy requires positive weights
    weight, share = weight[counted], weight[counted] / weight[counted].sum()
    claimed = predicted.detach().double().cpu().numpy()[counted]
    happened = np.eye(predicted.shape[1])[truth.cpu().numpy()][counted]
    scores = np.zeros(3)  # of the prediction, the calibrated prediction, the constant prediction
    for p, event in zip(claimed.T, happened.T, strict=True):
        group = np.unique(p, return_inverse=True)[1]
        mass = np.bincount(group, weight)
        frequency = np.bincount(group, weight * event) / mass
        calibrated = isotonic_regression(frequency, weights=mass).x[group]
        for index, prediction in enumerate((p, calibrated, np.full_like(p, share @ event))):
            scores[index] += share @ (prediction - event) ** 2
    score, calibrated_score, constant_score = scores.tolist()
    return Decomposition(score, score - calibrated_score, constant_score - calibrated_score, constant_score)


def crps_decomposition(draws: Array, y: Array, *, sample_weight: Array | None = None) -> Decomposition:
    r"""The decomposition of the mean CRPS of draws, by the frequency with which y falls below each ordered draw.

    Between the $i$-th and the $(i+1)$-th of $T$ ordered draws the claim is $p_i = i/T$; let $\bar g_i$ be the mean
    distance of the two and $\bar o_i$ how often, in proportion to distance, y was below. Then

    $$\overline{\mathrm{CRPS}} = \underbrace{\sum_i \bar g_i (\bar o_i - p_i)^2}_{\text{reliability}}
    + \underbrace{\sum_i \bar g_i\, \bar o_i (1 - \bar o_i)}_{\text{uncertainty} - \text{resolution}}$$

    [Hersbach 2000]. To score the predictive distribution, pass draws of the target, `[draw, row]`: outputs plus
    observation noise.

    Examples:
        >>> parts = crps_decomposition(torch.tensor([[0.0, 1.0], [2.0, 3.0]]), torch.tensor([1.0, 2.0]))
        >>> parts.score, parts.reliability, parts.resolution, parts.uncertainty
        (0.5, 0.0, -0.25, 0.25)
    """
    outputs, outcome = matching_tensors({"draws": draws, "y": row_values("y", y)}, draws="draws")
    ordered, truth = outputs.detach().double().sort(0).values, outcome.detach().double()
    weight = row_weights(sample_weight, len(truth), like=truth)
    weight = weight / weight.sum()
    n_draws = len(ordered)
    # The length of each gap between ordered draws that lies above y, and below it, with both ends: [gap, row].
    low = torch.cat([torch.minimum(truth, ordered[0])[None], ordered])
    high = torch.cat([ordered, torch.maximum(truth, ordered[-1])[None]])
    mean_above = (high - torch.maximum(low, truth)).clamp_min(0) @ weight
    mean_below = (torch.minimum(high, truth) - low).clamp_min(0) @ weight
    # Outside the draws the claim is 0 or 1, and a distance counts only if y lies there: the equivalent gap is that
    # distance over the observed frequency.
    outside_low, outside_high = (truth < ordered[0]).double() @ weight, (truth > ordered[-1]).double() @ weight
    gap = mean_above + mean_below
    frequency = torch.where(gap > 0, mean_above / gap, 0.0)
    gap[0] = mean_above[0] / outside_low if outside_low > 0 else 0.0
    gap[-1] = mean_below[-1] / outside_high if outside_high > 0 else 0.0
    frequency[0], frequency[-1] = outside_low, 1 - outside_high
    claimed = torch.arange(n_draws + 1, dtype=torch.float64, device=truth.device) / n_draws
    reliability = float((gap * (frequency - claimed).square()).sum())
    potential = float((gap * frequency * (1 - frequency)).sum())
    # The CRPS of the empirical distribution of the outcomes, E|y - y'| / 2, is the integral of F (1 - F).
    order = truth.argsort()
    reached = weight[order].cumsum(0)[:-1]
    uncertainty = float((truth[order].diff() * reached * (1 - reached)).sum())
    return Decomposition(reliability + potential, reliability, uncertainty - potential, uncertainty)
