"""The page's world and agents are those of the paper's experiment, number for number."""

import numpy as np
import pytest
import torch

from experiments.foraging import Worlds
from experiments.reinforcement import Agents, Settings, epsilon
from tests.app.page.javascript import call, needs_node

pytestmark = needs_node


def world_and_state(seed):
    """A world of the library in float64, and the same state for the page."""
    worlds = Worlds(1, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for name in ("walls", "turns", "eyes", "items", "angle"):
        setattr(worlds, name, getattr(worlds, name).double())
    worlds.position = torch.rand(1, 2, generator=generator, dtype=torch.float64) * torch.tensor([600.0, 400.0]) + 50
    items = [
        {"x": x, "y": y, "poison": bool(poison), "present": True, "born": 0}
        for (x, y), poison in zip(worlds.items[0].tolist(), worlds.poison[0].tolist(), strict=True)
    ]
    (x, y), angle = worlds.position[0].tolist(), worlds.angle.item()
    return worlds, {"x": x, "y": y, "angle": angle, "items": items}


@pytest.mark.parametrize("seed", range(6))
def test_an_agent_sees_moves_and_eats_as_in_the_experiment(seed):
    worlds, state = world_and_state(seed)
    actions = torch.randint(5, (9,), generator=torch.Generator().manual_seed(seed)).tolist()  # no item is renewed yet
    for action, step in zip(actions, call("./runs.mjs", "walk", state, actions), strict=True):
        view = worlds.view()
        assert np.allclose(step["inputs"], view.inputs()[0], atol=1e-6)
        assert step["reward"] == pytest.approx(worlds.act(torch.tensor([action]), view).item(), abs=1e-6)
        assert np.allclose([step["x"], step["y"], step["angle"]], [*worlds.position[0], worlds.angle[0]], atol=1e-5)


def test_an_agent_learns_as_in_the_experiment():
    agents = Agents(1, "thompson", Settings(learning_rate=0.05), seed=1)
    rng = np.random.default_rng(0)
    states, after = rng.random((2, 64, 27)).astype(np.float32)
    actions, rewards = rng.integers(5, size=64), rng.normal(size=64).astype(np.float32)
    masks = [[mask[0].numpy() for mask in agents.masks(64)] for _ in range(2)]
    page = call(
        "./runs.mjs", "learnOnce", [w[0].T.numpy().astype(np.float64) for w in agents.weights],
        [b.flatten().numpy().astype(np.float64) for b in agents.biases], 0.05, states.astype(np.float64),
        after.astype(np.float64), actions.astype(np.float64), rewards.astype(np.float64), *masks,
    )  # fmt: skip
    tensors = [torch.tensor(z)[None] for z in (states, after)]
    future = agents.values(tensors[1], [torch.tensor(m)[None] for m in masks[0]])[0].amax(-1)
    values, inputs = agents.values(tensors[0], [torch.tensor(m)[None] for m in masks[1]])
    chosen = torch.tensor(actions)[None, :, None]
    error = values.gather(-1, chosen)[..., 0] - torch.tensor(rewards) - 0.7 * future
    agents._descend(torch.zeros_like(values).scatter_(-1, chosen, error[..., None]), inputs, scale=1 / 0.9)
    for ours, theirs in zip(page["weights"], agents.weights, strict=True):
        assert np.allclose(np.reshape(ours, theirs[0].T.shape), theirs[0].T, atol=1e-5)
    for ours, theirs in zip(page["biases"], agents.biases, strict=True):
        assert np.allclose(ours, theirs.flatten(), atol=1e-5)


@pytest.mark.parametrize("age", [0, 3000, 101_500, 195_000, 500_000])
def test_epsilon_falls_as_in_the_paper(age):
    schedule = {"epsilonBurnIn": 3000, "epsilonTotal": 200_000}
    assert call("agents.js", "epsilon", age, schedule) == pytest.approx(epsilon(age, Settings()))


@pytest.mark.slow
def test_agents_learn_to_earn_more_than_at_random():
    rewards = call("./runs.mjs", "rewardsOfLife", "thompson", "short", 0, 2000, 400)
    assert np.mean(rewards[-2:]) > rewards[0] + 0.15
