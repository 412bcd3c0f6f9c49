"""The page's network draws and trains as dropbayes does, number for number."""

import numpy as np
import pytest
import torch
from torch import nn

import dropbayes as db
from dropbayes.layers import Prior
from dropbayes.sampling.masks import Keys, keep_mask
from tests.app.page.javascript import call, needs_node

pytestmark = needs_node
ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh}
GRID = np.linspace(-3, 3, 11)


def torch_network(network, drop_prob):
    """The page's network as an `nn.Sequential`, in float64."""
    layers = []
    for weight, bias in zip(network["weights"], network["biases"], strict=True):
        linear = nn.Linear(len(weight) // len(bias), len(bias), dtype=torch.float64)
        with torch.no_grad():
            linear.weight.copy_(torch.tensor(weight, dtype=torch.float64).view_as(linear.weight))
            linear.bias.copy_(torch.tensor(bias, dtype=torch.float64))
        layers += [linear, ACTIVATIONS[network["activation"]](), nn.Dropout(drop_prob)]
    return nn.Sequential(*layers[:-2])


def typed(network):
    pairs = {name: [np.array(z, np.float32) for z in network[name]] for name in ("weights", "biases")}
    return network | pairs


def page_draws(network, drop_prob, n_draws, seed):
    keys = {"seed": seed, "nDraws": n_draws, "sampler": "stratified", "replicate": 0}
    masks = call("network.js", "siteMasks", network["widths"], keys, drop_prob)
    arrays = [np.array(mask, np.uint8) for mask in masks]
    values = call("network.js", "drawFunctions", typed(network), GRID.tolist(), arrays, drop_prob, n_draws)
    return masks, np.array(values).reshape(n_draws, -1)


@pytest.mark.parametrize(("activation", "depth", "drop_prob"), [("relu", 1, 0.1), ("tanh", 2, 0.05), ("relu", 4, 0.5)])
def test_draw_7_of_seed_3_is_the_same_function_here_and_there(activation, depth, drop_prob):
    network = call("./runs.mjs", "trainNetwork", {"width": 15, "depth": depth, "activation": activation, "seed": 0}, 0,
                   {"dropProb": drop_prob, "precision": 1, "learnPrecision": False, "lengthScale": 1}, [0], [0], 0.01, 0)["after"]  # fmt: skip
    masks, values = page_draws(network, drop_prob, 10, seed=3)
    net, x = torch_network(network, drop_prob), torch.tensor(GRID)[:, None]
    prediction = db.predict(net, x, n_draws=10, seed=3, keep_draws=True)
    assert np.allclose(values, prediction.draws[..., 0], rtol=0, atol=1e-12)
    statistics = call("network.js", "moments", values.ravel(), 10)
    assert np.allclose(statistics["mean"], prediction.mean[:, 0], atol=1e-12)
    assert np.allclose(statistics["epistemic"], prediction.epistemic[:, 0], atol=1e-12)
    for site, mask in enumerate(masks):
        bits = keep_mask(Keys(3, 10), site, drop_prob=drop_prob, draws=range(10), rows=None, shape=(15,),
                         dtype=torch.float64, device=torch.device("cpu"))  # fmt: skip
        assert bits.flatten().tolist() == mask


def test_the_epistemic_variance_is_that_of_the_draws():
    draws = np.random.default_rng(0).normal(size=(7, 5))
    statistics = call("network.js", "moments", draws.ravel(), 7)
    assert np.allclose(statistics["epistemic"], draws.var(0)) and np.allclose(statistics["mean"], draws.mean(0))


def test_the_standard_prediction_is_the_pass_without_dropout():
    network = call("./runs.mjs", "trainNetwork", {"width": 9, "depth": 2, "activation": "tanh", "seed": 4}, 0,
                   {"dropProb": 0.2, "precision": 1, "learnPrecision": False, "lengthScale": 1}, [0], [0], 0.01, 0)["after"]  # fmt: skip
    values = call("network.js", "standardPrediction", typed(network), GRID.tolist())
    expected = torch_network(network, 0.2).eval()(torch.tensor(GRID)[:, None])[:, 0].detach()
    assert np.allclose(values, expected, atol=1e-12)


class KeyedDropout(nn.Module):
    """Dropout with the masks of one step of the page's training: the independent sampler, a mask for each row."""

    def __init__(self, seed, site, drop_prob):
        super().__init__()
        self.keys, self.site, self.drop_prob, self.step = Keys(seed, 1, "independent", 1), site, drop_prob, 0

    def forward(self, x):
        shape, step = (x.shape[1],), range(self.step, self.step + 1)
        mask = keep_mask(self.keys, self.site, drop_prob=self.drop_prob, draws=step, rows=range(len(x)), shape=shape,
                         dtype=x.dtype, device=x.device)  # fmt: skip
        self.step += 1
        return x * mask[0] / (1 - self.drop_prob)


@pytest.mark.parametrize("learn", [False, True])
@pytest.mark.parametrize(("activation", "depth"), [("relu", 2), ("tanh", 1)])
def test_training_is_adam_on_the_negative_evidence_lower_bound(activation, depth, learn):
    x, y = np.linspace(-2, 2, 9), np.sin(np.linspace(-2, 2, 9))
    objective = {"dropProb": 0.2, "precision": 20.0, "learnPrecision": learn, "lengthScale": 0.7}
    shape = {"width": 6, "depth": depth, "activation": activation, "seed": 1}
    run = call("./runs.mjs", "trainNetwork", shape, 5, objective, x.tolist(), y.tolist(), 0.01, 12)
    net = torch_network(run["before"], 0.2)  # whose dropout tells `negative_elbo` the keep probabilities
    keyed = nn.Sequential(*(
        KeyedDropout(5, (k - 2) // 3, 0.2) if isinstance(module, nn.Dropout) else module for k, module in enumerate(net)
    ))  # fmt: skip
    log_precision = torch.tensor(20.0, dtype=torch.float64).log().requires_grad_()
    optimizer = torch.optim.Adam([*net.parameters(), log_precision], lr=0.01)
    inputs, targets = torch.tensor(x)[:, None], torch.tensor(y)[:, None]
    for _ in range(12):
        optimizer.zero_grad()
        output = keyed(inputs)
        tau = log_precision.exp() if learn else torch.tensor(20.0, dtype=torch.float64)
        prior = Prior(length_scale=0.7, hidden_length_scale="fan_in")
        # The library's bound with a precision of 1 has the divergence; the misfit is that of a Gaussian with tau.
        divergence = db.negative_elbo(net, targets, targets, likelihood=db.Gaussian(1.0), prior=prior, n_data=9)
        loss = divergence + 0.5 * (tau * (output - targets).square().mean() - tau.log())
        loss.backward()
        optimizer.step()
    expected = torch_network(run["after"], 0.2)
    for one, other in zip(net.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(one, other, atol=3e-6)  # the page stores weights in float32
    assert run["precision"] == pytest.approx(log_precision.exp().item() if learn else 20.0, rel=1e-5)


def test_the_weight_decay_shown_is_the_identity_of_the_paper():
    objective = {"dropProb": 0.1, "precision": 25.0, "learnPrecision": False, "lengthScale": 0.5}
    shown = call("training.js", "weightDecays", [1, 50, 1], objective, 20)
    first = db.weight_decay(precision=25.0, keep_prob=1.0, length_scale=0.5, n_data=20)
    second = db.weight_decay(precision=25.0, keep_prob=0.9, length_scale=50**0.5, n_data=20)
    assert shown == pytest.approx([first, second])
