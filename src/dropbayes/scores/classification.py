r"""Scores of a classification, from its predictive probabilities `[row, class]`."""

import torch
from torch import Tensor

from dropbayes.runtime.validation import Array, check_count, class_labels, class_probabilities, row_weights
from dropbayes.scores.averages import cumulative_weights, weighted_mean


def probabilities_and_labels(probabilities: Array, labels: Array) -> tuple[Tensor, Tensor]:
    """The probabilities `[row, class]` and labels `[row]`, validated together."""
    predicted = class_probabilities("probabilities", probabilities)
    return predicted, class_labels(labels, n_rows=len(predicted), n_classes=predicted.shape[1], device=predicted.device)


def class_log_likelihood(probabilities: Array, labels: Array) -> Tensor:
    r"""The log-likelihood of the labels, $\log \tfrac1T \sum_t p(y_n \mid \omega_t)$, from the *mean* probabilities.

    Which are the mixture of the draws: nothing is lost by averaging first. It is $-\infty$ for a probability of 0.

    Examples:
        >>> class_log_likelihood(torch.tensor([[0.25, 0.75]]), torch.tensor([1]))
        tensor([-0.2877])
    """
    predicted, truth = probabilities_and_labels(probabilities, labels)
    return predicted.gather(1, truth[:, None]).squeeze(1).log()


def brier_score(probabilities: Array, labels: Array) -> Tensor:
    r"""The Brier score $\sum_c (p_c - \mathbb 1[y = c])^2$, from 0 to 2 (for two classes: twice the binary convention).

    Examples:
        >>> brier_score(torch.tensor([[0.25, 0.75]]), torch.tensor([1]))
        tensor([0.1250])
    """
    predicted, truth = probabilities_and_labels(probabilities, labels)
    return (predicted - torch.nn.functional.one_hot(truth, predicted.shape[1])).square().sum(-1)


def accuracy(probabilities: Array, labels: Array, *, sample_weight: Array | None = None) -> Tensor:
    r"""The share of rows whose most probable class is the label.

    Examples:
        >>> accuracy(torch.tensor([[0.25, 0.75], [0.1, 0.9]]), torch.tensor([1, 0]))
        tensor(0.5000)
    """
    return weighted_mean(confidence_and_correctness(probabilities, labels)[1], sample_weight)


def confidence_and_correctness(probabilities: Array, labels: Array) -> tuple[Tensor, Tensor]:
    """The predicted class's probability, and 1 where it is the label (0 elsewhere): both `[row]`.

    Examples:
        >>> confidence_and_correctness(torch.tensor([[0.2, 0.8], [0.3, 0.7]]), torch.tensor([1, 0]))
        (tensor([0.8000, 0.7000]), tensor([1., 0.]))
    """
    predicted, truth = probabilities_and_labels(probabilities, labels)
    confidence, chosen = predicted.max(-1)
    return confidence, (chosen == truth).to(predicted.dtype)


def expected_calibration_error(
    probabilities: Array, labels: Array, *, n_bins: int = 15, sample_weight: Array | None = None
) -> Tensor:
    r"""The expected calibration error over bins of *equal width*, $\sum_b \tfrac{N_b}N |\text{acc}_b - \text{conf}_b|$.

    The bins of the predicted class's probability are $[b/n, (b+1)/n)$, the last one closed. The estimate grows with
    their number even for a calibrated model (about $\sqrt{n_\text{bins} / N}$): compare only at equal sizes, or test it
    (`calibration.calibration_test`).

    Examples:
        >>> expected_calibration_error(torch.tensor([[0.2, 0.8], [0.3, 0.7]]), torch.tensor([1, 0]), n_bins=1)
        tensor(0.2500)
    """
    confidence, correct = confidence_and_correctness(probabilities, labels)
    return calibration_gap(confidence, correct, equal_bins(confidence, n_bins), sample_weight)


def equal_bins(shares: Tensor, n_bins: int) -> Tensor:
    """The bin of each number from 0 to 1, of `n_bins` of equal width."""
    check_count("n_bins", n_bins)
    return (shares * n_bins).long().clamp_max(n_bins - 1)


def adaptive_calibration_error(
    probabilities: Array, labels: Array, *, n_bins: int = 15, sample_weight: Array | None = None
) -> Tensor:
    r"""The expected calibration error over bins of *equal mass*: as many rows in each, by rank of confidence.

    Confident models put nearly all rows in one equal-width bin; equal mass resolves them. Rows of equal confidence stay
    together, in the bin of their mean rank; without ties the sizes of the bins differ by at most one row.

    Examples:
        >>> adaptive_calibration_error(torch.tensor([[0.2, 0.8], [0.3, 0.7]]), torch.tensor([1, 0]), n_bins=2)
        tensor(0.4500)
    """
    confidence, correct = confidence_and_correctness(probabilities, labels)
    weight = row_weights(sample_weight, len(confidence), like=confidence)
    below, up_to, total = cumulative_weights(confidence, weight, confidence)
    mean_rank = (below + up_to) / 2  # of rows of equal confidence
    return calibration_gap(confidence, correct, equal_bins(mean_rank / total, n_bins), sample_weight)


def calibration_gap(confidence: Tensor, correct: Tensor, bins: Tensor, sample_weight: Array | None = None) -> Tensor:
    """The calibration error of rows in bins: the mean over rows of the gap of accuracy and confidence in their bin."""
    weight = row_weights(sample_weight, len(confidence), like=confidence).to(confidence.dtype)
    gap = torch.zeros(int(bins.max()) + 1, dtype=confidence.dtype, device=confidence.device)
    return gap.index_add(0, bins, weight * (correct - confidence)).abs().sum() / weight.sum()
