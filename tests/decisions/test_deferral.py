"""Tests of `decisions.deferral`."""

import math

import numpy as np
import pytest
import scipy.stats
import torch

from dropbayes import decisions, scores
from tests.decisions.samples import uniform


def bonferroni_threshold(uncertainty, wrong, target, confidence, n_candidates=20):
    """The largest of a few thresholds that is certified when all are tested at once: the simpler rule."""
    for j in range(n_candidates, 0, -1):
        cut = (
            math.inf
            if j == n_candidates
            else uncertainty.sort().values[j * len(uncertainty) // n_candidates - 1].item()
        )
        errors, kept = int(wrong[uncertainty < cut].sum()), int((uncertainty < cut).sum())
        if kept and scipy.stats.beta.ppf(1 - (1 - confidence) / n_candidates, errors + 1, kept - errors) <= target:
            return cut
    return -math.inf


def test_workload_rule_defers_a_new_row_with_exactly_its_rank_probability():
    # n = 19, fraction 0.15: the 17th of 19 is the threshold, so a new row exceeds it with probability 3/20.
    values = uniform(20_000, 20)
    deferred = [
        decisions.deferral_for_workload(row[:19], fraction=0.15).defers(row[19:]).item() for row in values[:4000]
    ]
    assert np.mean(deferred) == pytest.approx(0.15, abs=4 * math.sqrt(0.15 * 0.85 / 4000))


def test_workload_rule_never_promises_more_than_it_keeps_under_ties():
    constant = decisions.deferral_for_workload(torch.zeros(50), fraction=0.3)
    assert not constant.defers(torch.zeros(1)).item()
    assert decisions.deferral_for_workload(uniform(10), fraction=0.0).threshold == math.inf
    assert decisions.deferral_for_workload(uniform(10), fraction=1.0).defers(torch.tensor([-1e9])).item()


@pytest.mark.slow
def test_error_rule_breaks_its_promise_less_often_than_its_confidence_allows():
    # P(wrong | u) = u² / 2: the error rate of rows kept below θ is θ²/6 exactly. 400 held-out sets, 80 % confidence.
    runs, broken, thresholds = 400, 0, []
    for run in range(runs):
        uncertainty = uniform(500, seed=run)
        wrong = uniform(500, seed=10_000 + run) < uncertainty**2 / 2
        rule = decisions.deferral_for_error(uncertainty, wrong, target=0.06, confidence=0.8)
        thresholds.append(rule.threshold)
        broken += rule.threshold > math.sqrt(6 * 0.06)
    assert broken / runs < 0.2
    ideal = math.sqrt(6 * 0.06)  # 0.6: the rule must be useful, too, not only safe
    assert 0.6 * ideal < np.median(thresholds) < ideal


def test_error_rule_of_a_coin_flip_would_be_broken_by_a_naive_threshold():
    # The same simulation with the empirical error rate in place of the bound breaks its promise about half the time.
    broken = 0
    for run in range(200):
        uncertainty = uniform(500, seed=run)
        wrong = uniform(500, seed=10_000 + run) < uncertainty**2 / 2
        curve = scores.risk_coverage(uncertainty, wrong.double())
        naive = uncertainty.sort().values[(curve.risk <= 0.06).nonzero().max()]
        broken += naive**2 / 6 > 0.06
    assert broken / 200 > 0.4


def test_the_sequence_keeps_more_rows_than_testing_all_thresholds_at_once():
    ours, theirs = [], []
    for run in range(60):
        uncertainty = uniform(1000, seed=run)
        wrong = uniform(1000, seed=20_000 + run) < uncertainty**4
        ours.append(min(1.0, decisions.deferral_for_error(uncertainty, wrong, target=0.05).threshold))
        theirs.append(min(1.0, bonferroni_threshold(uncertainty, wrong, 0.05, 0.95)))
    assert np.mean(ours) > np.mean(theirs) + 0.01


@pytest.mark.slow
def test_a_bounded_loss_breaks_its_promise_less_often_than_its_confidence_allows():
    # The loss is u² on average, spread between 0 and 2u²: the mean loss of rows kept below θ is θ²/3 exactly.
    runs, broken, thresholds = 200, 0, []
    for run in range(runs):
        uncertainty = uniform(1500, seed=run)
        loss = 2 * uncertainty**2 * uniform(1500, seed=30_000 + run)
        rule = decisions.deferral_for_risk(uncertainty, loss, target=0.12, largest_loss=2.0, confidence=0.8)
        thresholds.append(rule.threshold)
        broken += rule.threshold > 0.6
    assert broken / runs < 0.2
    assert 0.5 * 0.6 < np.median(thresholds) < 0.6


def test_losses_outside_their_bounds_are_refused():
    for loss in (torch.tensor([0.5, 3.0]), torch.tensor([-0.1, 0.5]), torch.tensor([math.nan, 0.5])):
        with pytest.raises(ValueError, match="`loss` must"):
            decisions.deferral_for_risk(torch.rand(2), loss, target=0.1)


def test_error_rule_keeps_everything_when_nothing_is_wrong_and_defers_everything_when_it_cannot_tell():
    always = decisions.deferral_for_error(uniform(500), torch.zeros(500), target=0.05)
    assert not always.defers(torch.tensor([1e9])).any()
    never = decisions.deferral_for_error(uniform(10), torch.zeros(10), target=0.05)
    assert never.defers(torch.tensor([-1e9])).all()
    assert "every row is deferred" in never.guarantee


def test_a_row_without_a_number_is_deferred():
    assert decisions.DeferralRule(math.inf, "").defers(torch.tensor([math.nan])).item()


def test_deferring_a_tenth_of_digits_by_mutual_information_removes_most_errors(digits):
    _, y, prediction = digits
    uncertainty, wrong = prediction.mutual_information, prediction.mean.argmax(-1) != y[600:]
    rule = decisions.deferral_for_workload(uncertainty[:600], fraction=0.1)
    deferred, wrong = rule.defers(uncertainty[600:]), wrong[600:]
    assert wrong.sum() >= 10
    assert deferred.double().mean() < 0.14
    assert wrong[~deferred].sum() <= 0.5 * wrong.sum()  # promised; measured: 2 of 20 remain


def test_deferral_for_error_keeps_digits_under_two_percent_wrong(digits):
    _, y, prediction = digits
    uncertainty, wrong = prediction.mutual_information, prediction.mean.argmax(-1) != y[600:]
    rule = decisions.deferral_for_error(uncertainty[:600], wrong[:600], target=0.02)
    kept = ~rule.defers(uncertainty[600:])
    assert wrong[600:].double().mean() > 0.02
    assert wrong[600:][kept].double().mean() <= 0.02
    assert kept.double().mean() > 0.75


@pytest.mark.parametrize(
    "call",
    [
        lambda: decisions.least_cost_action(torch.randn(3, 2), torch.eye(2)),
        lambda: decisions.least_cost_action(torch.full((3, 2), math.nan), torch.eye(2)),
        lambda: decisions.expected_cost(torch.full((3, 2), 0.5), torch.eye(3)),
        lambda: decisions.expected_cost(torch.full((3, 2), 0.5), torch.tensor([[0.0, math.nan], [1.0, 0.0]])),
        lambda: decisions.action_probabilities(torch.tensor([[[1.0, math.nan]]])),
        lambda: decisions.action_probabilities(torch.ones(3, 2)),
        lambda: decisions.deferral_for_workload(torch.tensor([]), fraction=0.5),
        lambda: decisions.deferral_for_error(torch.rand(4), torch.tensor([0, 1, 2, 0]), target=0.1),
        lambda: decisions.deferral_for_error(torch.rand(4), torch.zeros(3), target=0.1),
        lambda: decisions.deferral_for_error(torch.rand(4), torch.zeros(4), target=0.1, n_candidates=0),
        lambda: decisions.cascade_frontier(torch.rand(4), torch.zeros(4), torch.zeros(3), cheap_cost=1, costly_cost=2),
    ],
)
def test_wrong_input_is_refused_by_name(call):
    with pytest.raises(ValueError, match=r"^`\w+` must"):
        call()
