"""Rankings by uncertainty against scikit-learn and closed forms."""

import math

import pytest
import sklearn.metrics
import torch

from dropbayes import scores
from tests.scores.samples import generator, normal


@pytest.mark.parametrize("digits", [1, 9], ids=["with ties", "without ties"])
def test_detection_areas_agree_with_scikit_learn(digits):
    event = torch.rand(300, generator=generator()) < 0.2
    uncertainty = (normal(300) + event).round(decimals=digits)
    assert scores.auroc(uncertainty, event).item() == pytest.approx(sklearn.metrics.roc_auc_score(event, uncertainty))
    expected = sklearn.metrics.average_precision_score(event, uncertainty)
    assert scores.average_precision(uncertainty, event).item() == pytest.approx(expected)


def test_the_false_positive_rate_is_that_of_scikit_learns_curve():
    event = torch.rand(300, generator=generator()) < 0.2
    uncertainty = normal(300) + 2 * event
    # Known rows are the positives; a row passes if it is certain enough.
    fpr, tpr, _ = sklearn.metrics.roc_curve(~event, -uncertainty, drop_intermediate=False)
    expected = fpr[(tpr >= 0.95).argmax()]
    assert scores.fpr_at_tpr(uncertainty, event, tpr=0.95).item() == pytest.approx(expected)


def test_auroc_of_a_constant_uncertainty_is_one_half_and_of_the_negated_one_the_complement():
    event = torch.tensor([0, 1, 0, 1, 1])
    uncertainty = torch.tensor([0.3, 0.1, 0.2, 0.5, 0.25], dtype=torch.float64)
    assert scores.auroc(torch.ones(5), event) == 0.5
    torch.testing.assert_close(scores.auroc(-uncertainty, event), 1 - scores.auroc(uncertainty, event))


def test_detection_without_both_kinds_is_refused():
    with pytest.raises(ValueError, match="`event` must be true for some rows"):
        scores.auroc(torch.rand(4), torch.zeros(4))


def test_risk_coverage_agrees_with_a_loop_and_does_not_depend_on_the_order_of_ties():
    uncertainty, loss = normal(40).round(decimals=1), normal(40, seed=1).square()
    curve = scores.risk_coverage(uncertainty, loss)
    shuffled = torch.randperm(40, generator=generator())
    torch.testing.assert_close(scores.risk_coverage(uncertainty[shuffled], loss[shuffled]).risk, curve.risk)
    for threshold in uncertainty.unique():
        kept = uncertainty <= threshold
        torch.testing.assert_close(curve.risk[kept.sum() - 1], loss[kept].mean())


def test_area_of_the_oracle_ranking_follows_its_closed_form_and_leaves_no_excess():
    # With error rate r the best ranking has risk (c - (1 - r)) / c beyond coverage 1 - r: area r + (1 - r) log(1 - r).
    wrong = (torch.arange(20_000) < 3_000).double()
    curve = scores.risk_coverage(wrong + 0.5 * torch.rand(20_000, generator=generator(), dtype=torch.float64), wrong)
    assert curve.area.item() == pytest.approx(0.15 + 0.85 * math.log(0.85), rel=1e-3)
    assert curve.excess_area.item() == pytest.approx(0.0, abs=1e-12)


def test_area_of_an_uninformative_ranking_is_the_mean_loss():
    loss = normal(30).square()
    torch.testing.assert_close(scores.risk_coverage(torch.ones(30), loss).area, loss.mean())


@pytest.mark.parametrize("digits", [1, 9], ids=["with ties", "without ties"])
def test_weighted_detection_areas_agree_with_scikit_learn(digits):
    event = torch.rand(200, generator=generator()) < 0.3
    uncertainty = (normal(200) + event).round(decimals=digits)
    weight = torch.rand(200, generator=generator(1), dtype=torch.float64)
    ours = scores.auroc(uncertainty, event, sample_weight=weight).item()
    assert ours == pytest.approx(sklearn.metrics.roc_auc_score(event, uncertainty, sample_weight=weight))
    ours = scores.average_precision(uncertainty, event, sample_weight=weight).item()
    assert ours == pytest.approx(sklearn.metrics.average_precision_score(event, uncertainty, sample_weight=weight))


def test_a_ranked_row_of_weight_two_counts_as_two():
    uncertainty, loss, weight = normal(30).round(decimals=1), normal(30, seed=1).square(), torch.arange(30) % 4
    repeated = torch.repeat_interleave(torch.arange(30), weight)
    ours = scores.risk_coverage(uncertainty, loss, sample_weight=weight)
    theirs = scores.risk_coverage(uncertainty[repeated], loss[repeated])
    for name in ("area", "oracle_area", "excess_area"):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name))
    torch.testing.assert_close(ours.risk[-1], theirs.risk[-1])


def test_one_row_has_a_risk_and_no_row_is_an_error():
    assert scores.risk_coverage(torch.ones(1), torch.ones(1)).area == 1
    with pytest.raises(ValueError, match="`uncertainty` must not be empty"):
        scores.risk_coverage(torch.ones(0), torch.ones(0))
