"""The written-out descent of the deep networks."""

import pytest
import torch

from experiments import descent


@pytest.mark.parametrize("activation", ["relu", "tanh"])
@pytest.mark.parametrize("hidden_layers", [1, 2, 4])
def test_written_out_step_is_that_of_autograd_and_sgd(activation, hidden_layers):
    network = descent.Network(hidden_layers, 7, activation, 0.3, learning_rate=0.05, weight_decay=0.01)
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(11, 1, dtype=torch.float64, generator=generator) for _ in range(2))
    net = descent.module(network).double()
    program = descent._Program(network, net, x, y)
    linear = [layer for layer in net if isinstance(layer, torch.nn.Linear)]
    groups = [
        {"params": [layer.weight for layer in linear], "lr": 0.05},
        {"params": [layer.bias for layer in linear], "lr": 0.1},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9, weight_decay=0.01)
    activate = torch.relu if activation == "relu" else torch.tanh
    for _ in range(3):
        program.draw_masks()
        masks = program.masks[0]
        h = x
        for layer, mask in zip(linear[:-1], masks, strict=True):
            h = activate(layer(h)) * mask
        loss = (linear[-1](h) - y).square().sum() / (2 * len(x))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        program.step(masks, torch.tensor(0.05, dtype=torch.float64))
    other = descent.module(network).double()
    program.store(other)
    for mine, theirs in zip(other.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_masks_keep_the_right_share_scaled_to_mean_one():
    network = descent.Network(2, 64, "relu", 0.2, learning_rate=0.01, weight_decay=0.0)
    program = descent._Program(network, descent.module(network), torch.zeros(100, 1), torch.zeros(100, 1))
    program.draw_masks()
    assert set(program.masks.unique().tolist()) == {0.0, 1.25}
    assert program.masks.mean().item() == pytest.approx(1.0, abs=5 * 0.5 / program.masks.numel() ** 0.5)


def test_learning_rate_follows_the_papers_policy():
    network = descent.Network(1, 4, "relu", 0.1, learning_rate=0.1, weight_decay=0.0, gamma=0.1, power=0.5)
    program = descent._Program(network, descent.module(network), torch.zeros(3, 1), torch.zeros(3, 1))
    rates = []
    program.step = lambda masks, rate: rates.append(rate.item())
    program.call()
    program.call()
    expected = [0.1 * (1 + 0.1 * i) ** -0.5 for i in range(2 * descent.STEPS_PER_CALL)]
    assert rates == pytest.approx(expected, rel=1e-6)


def test_an_interrupted_descent_continues_to_the_same_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(descent, "STEPS_PER_BLOCK", 20)
    monkeypatch.setattr(descent, "BLOCKS_PER_CHECKPOINT", 1)
    network = descent.Network(2, 8, "relu", 0.1, learning_rate=0.01, weight_decay=1e-6)
    x = torch.linspace(-1, 1, 30)[:, None]
    whole = descent.descend(network, x, x.sin(), n_steps=60)
    file = tmp_path / "state"
    descent.descend(network, x, x.sin(), n_steps=40, checkpoint=file)
    resumed = descent.descend(network, x, x.sin(), n_steps=60, checkpoint=file)
    for one, other in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)


def test_divergence_is_an_error():
    network = descent.Network(3, 16, "relu", 0.1, learning_rate=1e4, weight_decay=0.0)
    with pytest.raises(FloatingPointError, match="lower"):
        descent.descend(network, torch.ones(5, 1), torch.ones(5, 1), n_steps=100)
