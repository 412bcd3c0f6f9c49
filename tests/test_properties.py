"""Properties that hold for every input: bounds of information, propriety of scores, and refusal of what is wrong."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from dropbayes import acquisition, calibration, conformal, decisions, information, scores

FEW = settings(max_examples=40, deadline=None)


def tensors(*shape: int, low: float = -3.0, high: float = 3.0) -> st.SearchStrategy[torch.Tensor]:
    elements = st.floats(low, high, width=32)
    return arrays.arrays(np.float64, shape, elements=elements).map(torch.from_numpy)


# ----------------------------------------------------------------------------------------------- mathematics


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


# ------------------------------------------------------------------------------------------------- wrong input

P = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.6, 0.3], [0.3, 0.3, 0.4], [0.2, 0.5, 0.3], [0.6, 0.3, 0.1]]).double()
LABELS = torch.tensor([0, 1, 2, 1, 2])
Y, MEAN = torch.linspace(-1, 1, 5).double(), torch.linspace(-0.8, 1.2, 5).double()
STD, WRONG = torch.linspace(0.5, 1.5, 5).double(), torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0])
DRAWS = torch.stack([MEAN, MEAN + 0.3, MEAN - 0.2])
PD = torch.stack([P, P.flip(0)])
UNIT = torch.linspace(0.1, 0.9, 5).double()
FITTED = calibration.isotonic_recalibration(UNIT)

# Every public function with arguments that are right; after the bar, arguments whose shape is free.
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any], str]] = {
    "rmse": (scores.rmse, {"mean": MEAN, "y": Y}, ""),
    "mae": (scores.mae, {"mean": MEAN, "y": Y}, ""),
    "mixture_log_likelihood": (scores.mixture_log_likelihood, {"log_density_draws": DRAWS}, "log_density_draws"),
    "gaussian_mixture": (lambda draws, y: scores.gaussian_mixture_log_likelihood(draws, y, precision=1.0), {"draws": DRAWS, "y": Y}, ""),
    "gaussian_log_likelihood": (scores.gaussian_log_likelihood, {"mean": MEAN, "variance": STD, "y": Y}, ""),
    "crps": (scores.crps, {"draws": DRAWS, "y": Y}, ""),
    "crps with noise": (scores.crps, {"draws": DRAWS, "y": Y, "noise_variance": STD}, ""),
    "fair_crps": (scores.fair_crps, {"draws": DRAWS, "y": Y}, ""),
    "energy_score": (scores.energy_score, {"draws": PD, "y": P}, ""),
    "variogram_score": (scores.variogram_score, {"draws": PD, "y": P}, ""),
    "interval_score": (lambda **a: scores.interval_score(**a, level=0.9), {"lower": MEAN - 1, "upper": MEAN + 1, "y": Y}, ""),
    "coverage": (scores.coverage, {"lower": MEAN - 1, "upper": MEAN + 1, "y": Y, "sample_weight": STD}, ""),
    "quantile_score": (lambda **a: scores.quantile_score(**a, level=0.9), {"quantile": MEAN, "y": Y}, ""),
    "sharpness": (scores.sharpness, {"std": STD}, "std"),
    "class_log_likelihood": (scores.class_log_likelihood, {"probabilities": P, "labels": LABELS}, ""),
    "brier_score": (scores.brier_score, {"probabilities": P, "labels": LABELS}, ""),
    "accuracy": (scores.accuracy, {"probabilities": P, "labels": LABELS, "sample_weight": STD}, ""),
    "ece": (scores.expected_calibration_error, {"probabilities": P, "labels": LABELS, "sample_weight": STD}, ""),
    "ace": (scores.adaptive_calibration_error, {"probabilities": P, "labels": LABELS}, ""),
    "brier_decomposition": (scores.brier_decomposition, {"probabilities": P, "labels": LABELS}, ""),
    "crps_decomposition": (scores.crps_decomposition, {"draws": DRAWS, "y": Y}, ""),
    "auroc": (scores.auroc, {"uncertainty": STD, "event": WRONG}, ""),
    "average_precision": (scores.average_precision, {"uncertainty": STD, "event": WRONG}, ""),
    "risk_coverage": (scores.risk_coverage, {"uncertainty": STD, "loss": UNIT}, ""),
    "entropy": (information.entropy, {"probabilities": P}, "probabilities"),
    "predictive_entropy": (information.predictive_entropy, {"probability_draws": PD}, "probability_draws"),
    "expected_entropy": (information.expected_entropy, {"probability_draws": PD}, "probability_draws"),
    "mutual_information": (information.mutual_information, {"probability_draws": PD}, "probability_draws"),
    "variation_ratio": (information.variation_ratio, {"probability_draws": PD}, "probability_draws"),
    "joint": (information.joint_mutual_information, {"probability_draws": PD}, "probability_draws"),
    "empirical_percentile": (calibration.empirical_percentile, {"uncertainty": STD, "training_uncertainty": UNIT}, "uncertainty training_uncertainty"),
    "relative_uncertainty": (calibration.relative_uncertainty, {"uncertainty": STD, "training_uncertainty": UNIT}, "uncertainty training_uncertainty"),
    "uncertainty_reference": (calibration.uncertainty_reference, {"training_uncertainty": UNIT}, "training_uncertainty"),
    "class_reliability": (calibration.class_reliability, {"probabilities": P, "labels": LABELS}, ""),
    "gaussian_pit": (calibration.gaussian_pit, {"mean": MEAN, "std": STD, "y": Y}, ""),
    "mixture_pit": (calibration.mixture_pit, {"draws": DRAWS, "y": Y, "noise_variance": STD}, ""),
    "quantile_reliability": (calibration.quantile_reliability, {"pit": UNIT}, "pit"),
    "interval_reliability": (calibration.interval_reliability, {"pit": UNIT}, "pit"),
    "uniformity_test": (calibration.uniformity_test, {"pit": UNIT}, "pit"),
    "std_scale": (calibration.std_scale, {"mean": MEAN, "std": STD, "y": Y}, ""),
    "isotonic": (calibration.isotonic_recalibration, {"pit": UNIT}, "pit"),
    "observed": (FITTED.observed, {"claimed": UNIT}, "claimed"),
    "temperature": (calibration.temperature, {"logit_draws": PD.log(), "labels": LABELS}, ""),
    "vector_scaling": (calibration.vector_scaling, {"probabilities": P, "labels": LABELS}, ""),
    "dirichlet": (calibration.dirichlet_calibration, {"probabilities": P, "labels": LABELS}, ""),
    "beta": (calibration.beta_calibration, {"probability": UNIT, "event": WRONG}, ""),
    "calibration_test": (lambda **a: calibration.calibration_test(**a, n_resamples=3), {"probabilities": P, "labels": LABELS}, ""),
    "standardised_residuals": (conformal.standardised_residuals, {"mean": MEAN, "std": STD, "y": Y}, ""),
    "conformal_threshold": (lambda **a: conformal.conformal_threshold(**a, level=0.5), {"scores": STD, "sample_weight": UNIT}, ""),
    "conformal_interval": (lambda **a: conformal.conformal_interval(**a, level=0.5), {"mean": MEAN, "std": STD, "calibration_scores": UNIT}, ""),
    "quantile_residuals": (conformal.quantile_residuals, {"lower": MEAN - 1, "upper": MEAN + 1, "y": Y}, ""),
    "label_scores": (conformal.label_scores, {"probabilities": P, "labels": LABELS}, ""),
    "conformal_sets": (lambda **a: conformal.conformal_sets(**a, level=0.5), {"probabilities": P, "calibration_scores": UNIT}, ""),
    "adaptive_label_scores": (conformal.adaptive_label_scores, {"probabilities": P, "labels": LABELS, "uniform": UNIT}, ""),
    "conformal_distribution": (conformal.conformal_distribution, {"mean": MEAN, "std": STD, "calibration_residuals": Y}, ""),
    "cross_conformal": (lambda **a: conformal.cross_conformal_interval(**a, level=0.5), {"predictions": DRAWS.T, "residuals": STD}, ""),
    "deferral_for_workload": (lambda **a: decisions.deferral_for_workload(**a, fraction=0.5), {"uncertainty": STD}, ""),
    "deferral_for_error": (lambda **a: decisions.deferral_for_error(**a, target=0.5), {"uncertainty": STD, "wrong": WRONG}, ""),
    "deferral_for_risk": (lambda **a: decisions.deferral_for_risk(**a, target=0.5), {"uncertainty": STD, "loss": UNIT}, ""),
    "cascade_frontier": (lambda **a: decisions.cascade_frontier(**a, cheap_cost=1, costly_cost=2), {"uncertainty": STD, "cheap_loss": UNIT, "costly_loss": UNIT}, ""),
    "action_probabilities": (decisions.action_probabilities, {"value_draws": PD}, ""),
    "least_cost_action": (decisions.least_cost_action, {"probabilities": P, "cost": torch.ones(3, 2)}, ""),
    "bald_queries": (lambda **a: acquisition.bald_queries(**a, n_queries=2), {"probability_draws": PD}, ""),
    "batch_bald_queries": (lambda **a: acquisition.batch_bald_queries(**a, n_queries=2), {"probability_draws": PD}, ""),
    "variance_queries": (lambda **a: acquisition.variance_queries(**a, n_queries=2, noise_variance=1.0), {"draws": DRAWS}, ""),
    "epig_queries": (lambda **a: acquisition.epig_queries(**a, n_queries=1), {"pool_draws": PD, "target_draws": PD}, ""),
    "stochastic_queries": (lambda **a: acquisition.stochastic_queries(**a, n_queries=1), {"scores": UNIT}, ""),
    "badge_queries": (lambda **a: acquisition.badge_queries(**a, n_queries=2), {"probabilities": P, "features": P}, ""),
    "expected_improvement": (lambda **a: acquisition.expected_improvement(**a, best=0.0), {"draws": DRAWS}, ""),
    "upper_confidence_bound": (acquisition.upper_confidence_bound, {"draws": DRAWS}, ""),
}  # fmt: skip
# Arguments of new rows, which may be any number.
NEW_ROWS = {("conformal_sets", "probabilities"), ("least_cost_action", "probabilities")}


def with_nan(value: torch.Tensor, at: int) -> torch.Tensor:
    values = value.double().clone().flatten()
    values[at % len(values)] = math.nan
    return values.reshape(value.shape)


VALUES = {
    "NaN": with_nan,
    "text": lambda value, at: np.full(tuple(value.shape), "a"),
    "empty": lambda value, at: value[:0],
}
SHAPES = {
    "a column": lambda value, at: value[..., None],
    "an axis more": lambda value, at: value[None],
    "a row more": lambda value, at: torch.cat([value, value[-1:]], -1 if value.dim() == 1 else 0),
    "a number": lambda value, at: value.flatten()[0],
}


@pytest.mark.parametrize("name", CALLS)
def test_the_right_arguments_are_accepted(name):
    function, arguments, _ = CALLS[name]
    function(**arguments)
    function(**{key: value.numpy() for key, value in arguments.items()})


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_wrong_values_and_shapes_are_an_error_that_names_an_argument(data):
    name = data.draw(st.sampled_from(sorted(CALLS)))
    function, arguments, free = CALLS[name]
    key = data.draw(st.sampled_from(sorted(arguments)))
    change = data.draw(st.sampled_from(sorted(VALUES | SHAPES)))
    other = (VALUES | SHAPES)[change](arguments[key], data.draw(st.integers(0, 20)))
    if change in SHAPES and (key in free.split() or _is_a_set_of_its_own(key, change)):
        return
    if change == "a row more" and (name, key) in NEW_ROWS:
        return
    with pytest.raises((ValueError, TypeError), match=r"`\w+`"):
        function(**arguments | {key: other})


def _is_a_set_of_its_own(key: str, change: str) -> bool:
    """Whether another number of rows is right: calibration rows, draws and targets need not be as many as new rows."""
    own = {"calibration_scores", "calibration_residuals", "draws", "probability_draws", "value_draws", "scores"}
    more = key in own | {"uncertainty", "target_draws", "cost", "predictions", "logit_draws", "pool_draws"}
    # One number stands for all rows where a standard deviation or a noise variance may.
    return (change == "a row more" and more) or (
        change == "a number" and key in {"std", "noise_variance", "predictions"}
    )
