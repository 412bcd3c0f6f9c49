"""Scores of classes against scikit-learn, torchmetrics and loops."""

import math

import numpy as np
import pytest
import sklearn.metrics
import torch
import torchmetrics.functional.classification as torchmetrics_classification

from dropbayes import scores
from tests.scores.samples import generator, normal


@pytest.fixture(scope="module")
def classified():
    """Probabilities [row, class] too low where low and too high where high, so that the gaps of bins differ in sign."""
    probabilities = (2.5 * normal(400, 4, seed=1)).softmax(-1)
    right = torch.rand(400, generator=generator(2)) < 0.65
    other = (probabilities.argmax(-1) + torch.randint(1, 4, (400,), generator=generator(3))) % 4
    labels = torch.where(right, probabilities.argmax(-1), other)
    return probabilities, labels


def test_classification_scores_agree_with_scikit_learn(classified):
    probabilities, labels = classified
    log_loss = sklearn.metrics.log_loss(labels, probabilities)
    assert -scores.class_log_likelihood(probabilities, labels).mean().item() == pytest.approx(log_loss)
    brier = sum(sklearn.metrics.brier_score_loss(labels == k, probabilities[:, k]) for k in range(4))
    assert scores.brier_score(probabilities, labels).mean().item() == pytest.approx(brier)
    accuracy = sklearn.metrics.accuracy_score(labels, probabilities.argmax(1))
    assert scores.accuracy(probabilities, labels).item() == pytest.approx(accuracy)


def test_class_log_likelihood_of_mean_probabilities_is_the_mixture_over_draws():
    draws, labels = normal(9, 6, 3).softmax(-1), torch.tensor([0, 1, 2, 0, 1, 2])
    log_density = draws.log().gather(2, labels.expand(9, 6)[..., None]).squeeze(-1)
    torch.testing.assert_close(
        scores.class_log_likelihood(draws.mean(0), labels), scores.mixture_log_likelihood(log_density)
    )


@pytest.mark.parametrize("n_bins", [1, 10, 15])
def test_expected_calibration_error_agrees_with_torchmetrics(classified, n_bins):
    probabilities, labels = classified
    theirs = torchmetrics_classification.multiclass_calibration_error(
        probabilities, labels, num_classes=4, n_bins=n_bins, norm="l1"
    )
    ours = scores.expected_calibration_error(probabilities, labels, n_bins=n_bins)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)
    assert n_bins == 1 or ours > 0.1


def test_adaptive_calibration_error_agrees_with_a_loop_over_equal_slices(classified):
    # The oracle is written here with numpy: sort, cut into equal slices, average each.
    probabilities, labels = classified[0].numpy(), classified[1].numpy()
    confidence, correct = probabilities.max(1), probabilities.argmax(1) == labels
    order = np.argsort(confidence, kind="stable")
    expected = sum(
        len(rows) / 400 * abs(correct[rows].mean() - confidence[rows].mean()) for rows in np.split(order, 16)
    )
    assert scores.adaptive_calibration_error(*classified, n_bins=16).item() == pytest.approx(expected)
    assert scores.expected_calibration_error(*classified, n_bins=16).item() != pytest.approx(expected, rel=1e-3)


def test_calibration_errors_of_a_calibrated_model_are_small_and_of_a_sure_and_wrong_one_are_one():
    probabilities = normal(40_000, 3).softmax(-1)
    labels = torch.multinomial(probabilities, 1, generator=generator(1)).squeeze(1)
    sure, wrong = torch.eye(2, dtype=torch.float64)[[0, 0, 1]], torch.tensor([1, 1, 0])
    for error in (scores.expected_calibration_error, scores.adaptive_calibration_error):
        assert error(probabilities, labels) < 3 * math.sqrt(15 / 40_000)
        assert error(sure, wrong) == 1


def test_logits_and_draws_are_refused_with_the_remedy():
    with pytest.raises(ValueError, match="softmax"):
        scores.brier_score(torch.randn(4, 3, generator=generator()), torch.zeros(4, dtype=torch.long))
    with pytest.raises(ValueError, match="Average draws"):
        scores.accuracy(torch.full((2, 4, 2), 0.5), torch.zeros(4, dtype=torch.long))


def test_adaptive_calibration_error_does_not_depend_on_the_order_of_equal_confidences():
    # A calibrated model of one confidence: 70 % of its claims of 70 % are right.
    probabilities, labels = (
        torch.tensor([[0.3, 0.7]], dtype=torch.float64).repeat(1000, 1),
        (torch.arange(1000) < 700).long(),
    )
    for order in (torch.arange(1000), torch.randperm(1000, generator=generator())):
        error = scores.adaptive_calibration_error(probabilities[order], labels[order])
        assert error.item() == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("name", ["accuracy", "expected_calibration_error", "adaptive_calibration_error"])
def test_a_class_row_of_weight_two_counts_as_two_and_one_of_weight_zero_not_at_all(classified, name):
    probabilities, labels = (part[:60] for part in classified)
    weight = torch.arange(60) % 3
    repeated = torch.repeat_interleave(torch.arange(60), weight)
    score = getattr(scores, name)
    torch.testing.assert_close(
        score(probabilities, labels, sample_weight=weight), score(probabilities[repeated], labels[repeated])
    )
    torch.testing.assert_close(
        score(probabilities, labels, sample_weight=7 * weight), score(probabilities, labels, sample_weight=weight)
    )


@pytest.mark.parametrize("labels", [[7, 0], [-1, 0], [0.0, 1.0], [0]])
def test_labels_that_name_no_class_are_refused_by_every_score(labels):
    for name in ("accuracy", "brier_score", "class_log_likelihood", "expected_calibration_error"):
        with pytest.raises(ValueError, match="`labels` must"):
            getattr(scores, name)(torch.full((2, 3), 1 / 3), torch.tensor(labels))


def test_bfloat16_probabilities_are_scored_in_single_precision():
    probabilities = normal(50, 30).softmax(-1)
    labels = torch.randint(30, (50,), generator=generator())
    ours = scores.brier_score(probabilities.bfloat16(), labels)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours.double(), scores.brier_score(probabilities, labels), atol=0.01, rtol=0)
