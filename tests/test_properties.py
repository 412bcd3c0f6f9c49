"""Properties that hold for every input: bounds of information and propriety of scores."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from dropbayes import conformal, information, scores

FEW = settings(max_examples=40, deadline=None)


def tensors(*shape: int, low: float = -3.0, high: float = 3.0) -> st.SearchStrategy[torch.Tensor]:
    elements = st.floats(low, high, width=32)
    return arrays.arrays(np.float64, shape, elements=elements).map(torch.from_numpy)


@FEW
@given(tensors(4, 3, 5, low=-30, high=30))
def test_mutual_information_is_between_zero_and_the_entropy_which_is_at_most_log_c(logits):
    draws = logits.softmax(-1)
    mutual, entropy = information.mutual_information(draws), information.predictive_entropy(draws)
    assert (mutual >= 0).all() and (mutual <= entropy + 1e-9).all()
    assert (entropy <= math.log(5) + 1e-9).all() and (mutual <= math.log(4) + 1e-9).all()
    torch.testing.assert_close(mutual + information.expected_entropy(draws), entropy, atol=1e-9, rtol=1e-9)


@FEW
@given(tensors(4, 3, 2, low=-10, high=10))
def test_joint_information_is_at_least_the_largest_and_at_most_the_sum_of_the_parts(logits):
    draws = logits.softmax(-1)
    joint, alone = information.joint_mutual_information(draws), information.mutual_information(draws)
    assert alone.max() - 1e-9 <= joint <= alone.sum() + 1e-9


@FEW
@given(tensors(4, low=-8, high=8), tensors(4, low=-8, high=8))
def test_the_truth_has_the_best_expected_class_scores(true_logits, other_logits):
    truth, other = true_logits.softmax(-1), other_logits.softmax(-1)
    labels = torch.arange(4)

    def expected(score: Callable[..., Any], claim: torch.Tensor) -> torch.Tensor:
        return (truth * score(claim.expand(4, 4), labels)).sum()

    assert expected(scores.class_log_likelihood, truth) >= expected(scores.class_log_likelihood, other) - 1e-9
    assert expected(scores.brier_score, truth) <= expected(scores.brier_score, other) + 1e-9


@FEW
@given(tensors(6), tensors(6))
def test_the_truth_has_the_best_expected_crps_and_energy_score(truth, other):
    # The outcomes are the truth's own six values, each as likely.
    def expected(claim: torch.Tensor) -> torch.Tensor:
        return scores.crps(claim[:, None].expand(6, 6), truth).mean()

    def expected_energy(claim: torch.Tensor) -> torch.Tensor:
        pairs = claim.reshape(3, 1, 2).expand(3, 3, 2)
        return scores.energy_score(pairs, truth.reshape(3, 2)).mean()

    assert expected(truth) <= expected(other) + 1e-9
    assert expected_energy(truth) <= expected_energy(other) + 1e-9


@FEW
@given(tensors(7), st.floats(-3, 3), st.floats(0.05, 0.95))
def test_no_constant_has_a_better_quantile_score_than_the_quantile(y, other, level):
    ordered = y.sort().values
    quantile = ordered[math.ceil(level * 7 - 1e-9) - 1]

    def mean_score(value: float) -> torch.Tensor:
        return scores.quantile_score(torch.full_like(y, value), y, level=level).mean()

    assert mean_score(float(quantile)) <= mean_score(other) + 1e-9


@FEW
@given(tensors(9), st.floats(0.01, 0.99), st.floats(-5, 5), st.floats(0.1, 9))
def test_thresholds_follow_their_scores_through_shift_and_scale(values, level, shift, scale):
    plain = conformal.conformal_threshold(values, level=level)
    torch.testing.assert_close(
        conformal.conformal_threshold(scale * values + shift, level=level), scale * plain + shift
    )


@FEW
@given(tensors(8), tensors(8, low=0, high=3))
def test_every_risk_curve_lies_between_the_oracle_and_the_worst_ranking(uncertainty, loss):
    curve = scores.risk_coverage(uncertainty, loss)
    worst = scores.risk_coverage(-loss, loss)
    assert curve.oracle_area - 1e-9 <= curve.area <= worst.area + 1e-9
