"""Tests of draws scored by the kind of their outcome."""

import pytest
import torch
from torch import nn

import dropbayes as db
from dropbayes.predictive.draw_scores import checked_likelihood, checked_targets, evaluation_tensor, score_draws
from dropbayes.predictive.scoring import core_scores


def test_whole_numbers_and_several_columns_are_classes():
    logits, y = torch.zeros(3, 4), torch.tensor([0, 1, 2])
    assert checked_likelihood(None, y, logits) == db.Categorical(class_axis=-1)
    assert checked_likelihood(None, y.float()[:, None], logits[:, :1]) is None
    assert checked_likelihood(db.Categorical(), y, logits) == db.Categorical(class_axis=-1)
    assert checked_likelihood(db.Bernoulli(), y, logits[:, :1]) == db.Bernoulli()


def test_the_fitted_noise_is_the_maximum_of_the_likelihood():
    torch.manual_seed(0)
    draws, y = 0.3 * torch.randn(20, 500, 1), torch.randn(500, 1)
    fitted = score_draws(draws, y, None).log_likelihood.mean()
    for precision in (0.5, 0.9, 1.1, 2.0):
        assert score_draws(draws, y, db.Gaussian(precision)).log_likelihood.mean() <= fitted + 1e-9


def test_one_draw_of_known_noise_has_the_scores_of_its_gaussian():
    location, y = torch.tensor([[[0.0], [0.0], [1.0]]]), torch.tensor([[0.0], [3.0], [1.5]])
    scores = score_draws(location, y, db.Gaussian(precision=4.0))
    density = torch.distributions.Normal(location[0].double(), 0.5).log_prob(y.double())[:, 0]
    torch.testing.assert_close(scores.log_likelihood, density)
    torch.testing.assert_close(scores.outcomes.loss(), torch.tensor([0.0, 3.0, 0.5], dtype=torch.float64))
    torch.testing.assert_close(scores.outcomes.uncertainty(), torch.full((3,), 0.25, dtype=torch.float64))
    found = core_scores(scores.outcomes)
    assert [found[f"coverage_{p}"] for p in (50, 80, 95)] == pytest.approx([1 / 3, 2 / 3, 2 / 3])


def test_classes_have_the_entropy_and_the_density_of_the_mean_probabilities():
    probabilities = torch.tensor([[[0.9, 0.1], [0.2, 0.8]], [[0.5, 0.5], [0.6, 0.4]]], dtype=torch.float64)
    y, mean = torch.tensor([0, 0]), torch.tensor([[0.7, 0.3], [0.4, 0.6]], dtype=torch.float64)
    scores = score_draws(probabilities.log(), y, db.Categorical(class_axis=-1))
    torch.testing.assert_close(scores.log_likelihood, mean[:, 0].log())
    torch.testing.assert_close(scores.outcomes.uncertainty(), torch.distributions.Categorical(mean).entropy())
    assert scores.outcomes.loss().tolist() == [0.0, 1.0]
    assert core_scores(scores.outcomes)["calibration_error"] == pytest.approx((0.3 + 0.6) / 2)


def test_a_plain_pass_leaves_flags_alone_and_takes_named_inputs():
    net = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)).train()
    x = torch.ones(3, 2)
    torch.testing.assert_close(evaluation_tensor(net, {"input": x}), net[0](x))
    assert all(module.training for module in net.modules())


def test_a_missing_outcome_is_refused():
    with pytest.raises(ValueError, match="one outcome for each of the 3 rows"):
        checked_targets([1, 2], torch.zeros(3, 1), None)
