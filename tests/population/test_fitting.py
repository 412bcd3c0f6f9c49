"""Tests of training: early stopping, divergence, continued training, refusals."""

from dataclasses import replace

import pytest
import torch

from dropbayes.layers import weight_decay
from dropbayes.population import (
    Member,
    Task,
    evaluate,
    train,
)
from tests.population.samples import F64, toy


def test_precision_sets_the_papers_weight_decay_in_standardised_units():
    x, y = toy(80)
    tau, scale = 3.0, float(y.std(unbiased=False))
    by_precision = Member(drop_prob=0.2, precision=tau, length_scale=0.7, epochs=3)
    decay = weight_decay(precision=tau * scale**2, keep_prob=0.8, length_scale=0.7, n_data=80)
    by_decay = Member(drop_prob=0.2, weight_decay=decay, epochs=3)
    trained = train([Task(x, y)], [by_precision, by_decay], **F64)
    torch.testing.assert_close(trained.weights[0][0], trained.weights[0][1])


def test_a_diverging_member_is_marked_and_the_others_unharmed():
    x, y = toy(60)
    members = [Member(epochs=20, learning_rate=1e-3), Member(epochs=20, learning_rate=1e30)]
    population = train([Task(x, y)], members, device="cpu")
    assert population.diverged.tolist() == [False, True]
    assert all(weight.isfinite().all() for weight in population.weights)
    scores = evaluate(population, (x, y), n_draws=5)
    assert scores.log_likelihood[0].isfinite()
    assert scores.log_likelihood[1] == -torch.inf


@pytest.mark.parametrize(
    ("members", "settings", "message"),
    [
        ([Member(task=2)], {}, "name a task below 1"),
        ([Member(drop_prob=(0.1,))], {}, "one per weight layer"),
        ([Member(drop_prob=1.0)], {}, "must lie in"),
        ([Member(epochs=0)], {}, "epochs >= 1"),
        ([Member()], {"activation": "sine"}, "`activation` must be one of"),
        ([Member()], {"likelihood": "poisson"}, "`likelihood` must be"),
        ([], {}, "must not be empty"),
    ],
)
def test_bad_settings_are_refused_with_the_remedy(members, settings, message):
    x, y = toy(20)
    with pytest.raises(ValueError, match=message):
        train([Task(x, y)], members, device="cpu", **settings)


def test_training_goes_on_from_given_networks_with_their_standardisation():
    x, y = toy(60)
    member = Member(drop_prob=0.0, epochs=3, seed=1)
    first = train([Task(x[:30], y[:30])], [member], hidden=(5,), **F64)
    again = train([Task(x[30:], y[30:])], [member], hidden=(5,), start=first, **F64)
    torch.testing.assert_close(again.x_mean, first.x_mean)
    assert not torch.equal(again.weights[0], first.weights[0])
    still = train([Task(x[30:], y[30:])], [replace(member, learning_rate=1e-300)], hidden=(5,), start=first, **F64)
    torch.testing.assert_close(still.weights[0], first.weights[0])
    torch.testing.assert_close(still.biases[1], first.biases[1])
