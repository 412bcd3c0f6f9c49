"""Tests of `decisions.actions`."""

import math

import numpy as np
import pytest
import torch

import dropbayes as db
from dropbayes import calibration, conformal, decisions, scores
from tests import small_networks
from tests.decisions.samples import generator


def regret_of_treating_tumours(policy, seed, *, steps=400, warm_up=20):
    """The regret after a random warm-up of a bandit on breast cancer.

    Treating a malignant tumour earns 1, treating a benign one -2, waiting 0.
    """
    x, y = small_networks.standardised("breast_cancer")
    net = small_networks.network(30, 50, 50, 2, drop_prob=0.2, seed=seed)
    optimiser = torch.optim.Adam(net.parameters(), lr=3e-3)
    torch.manual_seed(seed)
    order = torch.randint(len(x), (steps,))
    actions, rewards, regret = torch.zeros(steps, dtype=torch.long), torch.zeros(steps), 0.0
    for step, row in enumerate(order):
        malignant = y[row] == 0
        action = torch.randint(2, ()) if step < warm_up else policy(net, x[row][None], 10_000 * seed + step)
        reward = 0.0 if action == 1 else (1.0 if malignant else -2.0)
        regret += (float(malignant) - reward) * (step >= warm_up)
        actions[step], rewards[step] = action, reward
        if (step + 1) % 10 == 0:
            net.train()
            for _ in range(10):
                known = torch.randint(step + 1, (64,))
                values = net(x[order[known]]).gather(1, actions[known][:, None]).squeeze(1)
                optimiser.zero_grad()
                (values - rewards[known]).square().mean().backward()
                optimiser.step()
    return regret


def thompson(net, state, seed):
    with torch.no_grad():
        return decisions.thompson_action(db.function_draw(net, index=0, n_draws=1, seed=seed), state)[0]


def epsilon_greedy(net, state, seed):
    if torch.rand(()) < 0.1:
        return torch.randint(2, ())
    with torch.no_grad():
        return net.eval()(state)[0].argmax()


def test_thompson_chooses_actions_with_the_probability_that_they_are_best():
    draws = torch.randn(500, 3, 4, generator=generator(), dtype=torch.float64) + torch.tensor([0.0, 0.3, 0.6, 0.9])
    chosen = torch.stack([decisions.thompson_action(lambda s, t=t: draws[t][s], torch.arange(3)) for t in range(500)])
    frequency = torch.stack([(chosen == action).double().mean(0) for action in range(4)], -1)
    torch.testing.assert_close(decisions.action_probabilities(draws), frequency)


def test_action_probabilities_of_two_gaussians_follow_the_closed_form():
    # P(a₁ > a₀) = Φ((μ₁ - μ₀) / √(σ₀² + σ₁²))
    draws = torch.randn(100_000, 1, 2, generator=generator(), dtype=torch.float64)
    values = draws * torch.tensor([1.0, 2.0]) + torch.tensor([0.0, 1.5])
    expected = torch.special.ndtr(torch.tensor(1.5 / math.sqrt(5))).item()
    assert decisions.action_probabilities(values)[0, 1].item() == pytest.approx(expected, abs=0.007)


@pytest.mark.slow
def test_thompson_on_breast_cancer_has_under_three_quarters_of_epsilon_greedys_regret():
    # Measured over five seeds: 28 against 51. (Pure exploitation does as well here: 27; with ten actions it does not.)
    seeds = range(2)
    ours = sum(regret_of_treating_tumours(thompson, seed) for seed in seeds)
    theirs = sum(regret_of_treating_tumours(epsilon_greedy, seed) for seed in seeds)
    assert ours < 0.75 * theirs


def test_least_cost_action_of_equal_costs_is_the_most_probable_class():
    probabilities = torch.randn(50, 4, generator=generator()).softmax(-1)
    action = decisions.least_cost_action(probabilities, 1 - torch.eye(4))
    torch.testing.assert_close(action, probabilities.argmax(-1))


def test_least_cost_action_switches_at_the_odds_of_the_costs():
    # Missing class 1 costs 9, a false alarm 1: act from probability 1/10 on; asking costs 0.5 and wins in between.
    probability = torch.tensor([0.04, 0.06, 0.3, 0.49, 0.51])
    both = torch.stack([1 - probability, probability], 1)
    two = torch.tensor([[0.0, 1.0], [9.0, 0.0]])
    assert decisions.least_cost_action(both, two).tolist() == [0, 0, 1, 1, 1]
    three = torch.tensor([[0.0, 1.0, 0.5], [9.0, 0.0, 0.5]])
    assert decisions.least_cost_action(both, three).tolist() == [0, 2, 2, 2, 1]


def test_expected_cost_reads_the_cost_matrix_by_true_class_then_action():
    cost = torch.tensor([[1.0, 2.0, 3.0], [10.0, 20.0, 30.0]])
    torch.testing.assert_close(decisions.expected_cost(torch.tensor([[1.0, 0.0]]), cost), cost[:1])
    with pytest.raises(ValueError, match="`cost` must have a row for each of the 2 classes"):
        decisions.expected_cost(torch.tensor([[1.0, 0.0]]), cost.T)


def test_weighing_costs_on_breast_cancer_costs_less_than_the_most_probable_class():
    # Class 0 is malignant: a missed tumour costs 20, a false alarm 1, a referral 0.5. Three splits, 369 test rows each.
    x, y = small_networks.standardised("breast_cancer")
    cost = torch.tensor([[0.0, 20.0], [1.0, 0.0]])
    with_referral = torch.tensor([[0.0, 20.0, 0.5], [1.0, 0.0, 0.5]])
    paid = {"most probable": 0.0, "least cost": 0.0, "with referral": 0.0}
    for seed in range(3):
        order = torch.randperm(len(x), generator=generator(seed))
        train, test = order[:200], order[200:]
        net = small_networks.trained(
            small_networks.network(30, 64, 64, 2, drop_prob=0.5, seed=seed), x[train], y[train], steps=200
        )
        probabilities = db.predict(net, x[test], n_draws=50, likelihood=db.Categorical()).mean
        paid["most probable"] += cost[y[test], probabilities.argmax(-1)].mean().item() / 3
        paid["least cost"] += cost[y[test], decisions.least_cost_action(probabilities, cost)].mean().item() / 3
        action = decisions.least_cost_action(probabilities, with_referral)
        paid["with referral"] += with_referral[y[test], action].mean().item() / 3
    assert paid["least cost"] < 0.85 * paid["most probable"]
    assert paid["with referral"] < 0.85 * paid["most probable"]


def test_recalibration_and_conformal_intervals_mend_overconfidence_on_diabetes():
    # The draws of a network without its noise precision are over-confident: 90 % intervals hold 40 %.
    x, y = small_networks.standardised("diabetes")
    found = {"raw": [], "scaled": [], "conformal": [], "gain": []}
    for seed in range(3):
        order = torch.randperm(len(x), generator=generator(seed))
        train, held_out, test = order[:200], order[200:320], order[320:]
        net = small_networks.trained(
            small_networks.network(10, 50, 50, 1, drop_prob=0.2, seed=seed), x[train], y[train], steps=300, lr=1e-3
        )
        prediction = db.predict(net, x, n_draws=50)
        mean, std = prediction.mean.squeeze(-1), prediction.std.squeeze(-1)
        scale = calibration.std_scale(mean[held_out], std[held_out], y[held_out])
        for name, factor in (("raw", 1.0), ("scaled", scale)):
            half = 1.6449 * factor * std[test]
            found[name].append(scores.coverage(mean[test] - half, mean[test] + half, y[test]).item())
        residuals = conformal.standardised_residuals(mean[held_out], std[held_out], y[held_out])
        ends = conformal.conformal_interval(mean[test], std[test], calibration_scores=residuals, level=0.9)
        found["conformal"].append(scores.coverage(*ends, y[test]).item())
        gain = scores.gaussian_log_likelihood(mean[test], (scale * std[test]) ** 2, y[test])
        gain = gain - scores.gaussian_log_likelihood(mean[test], std[test] ** 2, y[test])
        found["gain"].append(gain.mean().item())
    assert np.mean(found["raw"]) < 0.6
    # 3 x 122 test rows and 120 held-out rows each: a standard error of about 0.02 on the mean coverage.
    assert np.mean(found["scaled"]) == pytest.approx(0.9, abs=0.05)
    assert np.mean(found["conformal"]) == pytest.approx(0.9, abs=0.05)
    assert min(found["gain"]) > 1  # nats per row
