"""Tests of predictions scored by the kind of their outcome."""

import pytest
import torch
from torch import nn

import dropbayes as db
from dropbayes.predictive.judges import ClassJudge, NumberJudge, checked_targets, judge_of, plain_output


def test_whole_numbers_and_several_columns_are_classes():
    logits, y = torch.zeros(3, 4), torch.tensor([0, 1, 2])
    assert isinstance(judge_of(y, logits, None), ClassJudge)
    assert isinstance(judge_of(y.float()[:, None], logits[:, :1], None), NumberJudge)
    assert isinstance(judge_of(y, logits, db.Categorical()), ClassJudge)
    with pytest.raises(TypeError, match="Categorical or Gaussian"):
        judge_of(y, logits, db.Bernoulli())


def test_the_fitted_noise_is_the_maximum_of_the_likelihood():
    torch.manual_seed(0)
    draws, y = 0.3 * torch.randn(20, 500, 1), torch.randn(500, 1)
    fitted = NumberJudge(None).log_densities(draws, y).mean()
    for precision in (0.5, 0.9, 1.1, 2.0):
        assert NumberJudge(db.Gaussian(precision)).log_densities(draws, y).mean() <= fitted + 1e-9


def test_a_plain_pass_leaves_flags_alone_and_takes_named_inputs():
    net = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)).train()
    x = torch.ones(3, 2)
    torch.testing.assert_close(plain_output(net, {"input": x}), net[0](x))
    assert all(module.training for module in net.modules())


def test_a_missing_outcome_is_refused():
    with pytest.raises(ValueError, match="one outcome for each of the 3 rows"):
        checked_targets([1, 2], torch.zeros(3, 1), None)
