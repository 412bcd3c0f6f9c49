"""The agents, and what they earn."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from experiments import foraging, reinforcement
from tests.experiments.smallest import tiny


@pytest.mark.slow
def test_thompson_agents_earn_more_than_random_exploration(tmp_path):
    metrics = tiny("reinforcement", reinforcement, tmp_path)
    gap = metrics["thompson"]["final_reward"] - metrics["epsilon-greedy"]["final_reward"]
    error = math.hypot(*(metrics[policy]["final_reward_standard_error"] for policy in metrics))
    assert gap > 2 * error


@pytest.mark.parametrize("n_agents", [3, 9])  # few and many take their products in different ways
def test_learning_step_is_that_of_autograd(n_agents):
    settings = reinforcement.Settings(batch_size=16, learning_starts=0, learning_rate=0.1, weight_decay=0.5, replay=40)
    agents = reinforcement.Agents(n_agents, "thompson", settings)
    for name in ("weights", "biases"):
        setattr(agents, name, [value.double() for value in getattr(agents, name)])
    states, upstream = torch.randn(n_agents, 16, 27).double(), torch.randn(n_agents, 16, 5).double()
    masks = [mask.double() for mask in agents.masks(16)]
    parameters = [value.clone().requires_grad_() for value in (*agents.weights, *agents.biases)]
    h = states
    for layer in range(3):
        h = (h * masks[layer]) @ parameters[layer] + parameters[3 + layer]
        h = h.relu() if layer < 2 else h
    values, inputs = agents.values(states, masks)
    torch.testing.assert_close(values, h.detach())
    penalty = sum(value.square().sum() for value in parameters[:3])
    loss = ((h * upstream).sum() + 0.5 * settings.weight_decay * penalty) / settings.batch_size
    gradients = torch.autograd.grad(loss, parameters)
    agents._descend(upstream, inputs, scale=1 / 0.9)
    for value, before, gradient in zip((*agents.weights, *agents.biases), parameters, gradients, strict=True):
        torch.testing.assert_close(value, before.detach() - settings.learning_rate * gradient, rtol=1e-6, atol=1e-8)


def test_experience_is_state_action_reward_and_the_state_after():
    settings = reinforcement.Settings(replay=5)
    agents = reinforcement.Agents(2, "epsilon-greedy", settings)
    states = [torch.full((2, 27), float(k)) for k in range(3)]
    for k, state in enumerate(states):
        agents.remember(state, torch.full((2,), float(k)), torch.full((2,), 10.0 + k))
    assert agents.stored == 2
    row = agents.memory.view(2, 5, -1)[1, 1]
    assert row[0] == 1 and row[27] == 2 and row[54] == 1 and row[55] == 11


def test_only_thompson_agents_drop_units():
    settings = reinforcement.Settings()
    assert reinforcement.Agents(2, "epsilon-greedy", settings).masks(4) is None
    masks = reinforcement.Agents(50, "thompson", settings).masks(64)
    assert [tuple(m.shape) for m in masks] == [(50, 64, 27), (50, 64, 50), (50, 64, 50)]
    dropped = torch.cat([m.flatten() for m in masks]).eq(0).double()
    assert dropped.mean().item() == pytest.approx(0.1, abs=5 * (0.09 / dropped.numel()) ** 0.5)


def test_epsilon_follows_the_papers_formula():
    settings = reinforcement.Settings()
    assert reinforcement.epsilon(0, settings) == 1.0
    assert reinforcement.epsilon(200_000, settings) == 0.05
    assert reinforcement.epsilon(52_250, settings) == pytest.approx(0.75)


@pytest.mark.slow
def test_an_interrupted_simulation_continues_to_the_same_rewards(tmp_path):
    settings = replace(reinforcement.Settings.tiny(), stack=2, n_steps=400)
    file = tmp_path / "state"
    whole = reinforcement.simulate("thompson", settings)
    stopped = reinforcement.Agents(2, "thompson", settings)
    worlds = foraging.Worlds(2)
    earned = sum(reinforcement.tick(worlds, stopped) for _ in range(reinforcement.BLOCK)) / reinforcement.BLOCK
    reinforcement._save(worlds, stopped, file, repr(("thompson", settings)), [earned])
    resumed = reinforcement.simulate("thompson", settings, checkpoint=file)
    np.testing.assert_allclose(resumed, whole, rtol=1e-5)


def test_passing_step_counts_from_the_end_of_the_random_phase():
    rewards = np.zeros((2, 40))
    rewards[0, :5] = 9.0  # luck in the random phase does not count
    rewards[1, 30:] = 2.0
    settings = reinforcement.Settings(random_steps=2000)
    passed = reinforcement.passing_step(rewards, settings)
    assert np.isnan(passed[0])
    assert passed[1] == 33 * 200  # the third block of reward 2 brings the mean of five to 1.2
