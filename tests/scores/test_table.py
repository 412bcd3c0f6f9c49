"""The table of scores: each entry is the function it names."""

import pytest
import torch

from dropbayes import calibration, scores
from dropbayes.predictive.mixtures import Mixture
from tests.scores.samples import normal


@pytest.fixture
def mixture():
    return normal(20, 300, seed=1), normal(300, seed=2)


def outcomes(draws, y, noise=0.5, sample_weight=None):
    return scores.RegressionOutcomes(
        y, draws.mean(0), (draws.var(0, correction=0) + noise).sqrt(),
        calibration.mixture_pit(draws, y, noise_variance=noise),
        scores.gaussian_mixture_log_likelihood(draws, y, precision=1 / noise), sample_weight,
    )  # fmt: skip


def test_coverage_is_that_of_the_mixtures_central_interval(mixture):
    draws, y = mixture
    values = scores.regression_scores(outcomes(draws, y))
    for level in scores.COVERAGE_LEVELS:
        distribution = Mixture(draws, torch.tensor(0.5).sqrt())
        low, high = (distribution.quantile(0.5 + sign * level / 2) for sign in (-1, 1))
        assert values[f"coverage_{100 * level:.0f}"] == pytest.approx(scores.coverage(low, high, y).item())


def test_weights_reach_every_score_of_the_table(mixture):
    draws, y = (part[..., :12] for part in mixture)
    weight = torch.arange(12) % 3
    rows = torch.repeat_interleave(torch.arange(12), weight)
    weighted = scores.regression_scores(outcomes(draws, y, sample_weight=weight))
    assert weighted == pytest.approx(scores.regression_scores(outcomes(draws[:, rows], y[rows])))
    p, labels = normal(12, 3).softmax(-1), torch.arange(12) % 3
    weighted = scores.class_scores(scores.ClassOutcomes(labels, p, weight))
    assert weighted == pytest.approx(scores.class_scores(scores.ClassOutcomes(labels[rows], p[rows])))


def test_every_score_has_a_name_a_meaning_and_a_direction():
    for table in (scores.REGRESSION_SCORES, scores.CLASS_SCORES):
        for name, score in table.items():
            assert score.name == name and score.label and score.meaning
            assert (score.nominal is not None) == (score.better == "nominal")


def test_better_predictions_move_every_score_in_its_direction():
    labels = torch.arange(300) % 3
    sure = torch.nn.functional.one_hot(labels).double() * 0.97 + 0.01
    vague = torch.nn.functional.one_hot((labels + (torch.arange(300) < 100)) % 3).double() * 0.97 + 0.01
    good, bad = (scores.class_scores(scores.ClassOutcomes(labels, p)) for p in (sure, vague))
    for name, score in scores.CLASS_SCORES.items():
        assert good[name] > bad[name] if score.better == "higher" else good[name] < bad[name]
