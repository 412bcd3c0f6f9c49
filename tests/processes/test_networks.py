"""Tests of the process of a network as it stands, against draws of the network's own prior."""

import math

import pytest
import torch
from torch import nn

from dropbayes.covariances import Identity, ReLU, TanH
from dropbayes.processes import Deep, exact_process, process_of
from dropbayes.weight_layers.precision import Prior

X = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
PRIOR = Prior(length_scale=1.4, bias_length_scale=2.0, hidden_length_scale="fan_in")


class Residual(nn.Module):
    def __init__(self, width=400):
        super().__init__()
        self.first, self.inner, self.back, self.out = (
            nn.Linear(3, width), nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 1)
        )  # fmt: skip

    def forward(self, x):
        h = self.first(x)
        h = h + self.back(torch.relu(self.inner(torch.tanh(h))))
        return self.out(torch.tanh(h))


TWICE = nn.Linear(3, 3)


class SeveralOutputs(nn.Module):
    """A network with a second head, of which it returns the first, both, or an element."""

    def __init__(self, n_outputs=1):
        super().__init__()
        self.size, self.first, self.second, self.n_outputs = (
            nn.Linear(3, 9),
            nn.Linear(9, 1),
            nn.Linear(9, 4),
            n_outputs,
        )

    def forward(self, x):
        h = torch.relu(self.size(x))
        first, second = self.first(h), self.second(h)
        return first if self.n_outputs == 1 else (first, second)


def test_the_process_is_of_what_the_network_returns_whatever_its_modules_are_called():
    plain = nn.Sequential(nn.Linear(3, 9), nn.ReLU(), nn.Linear(9, 1))
    torch.testing.assert_close(process_of(SeveralOutputs(), PRIOR)(X), process_of(plain, PRIOR)(X))


def prior_outputs(net, prior, n_draws):
    """Outputs of the network with its parameters drawn from the prior."""
    outputs = []
    torch.manual_seed(1)
    for _ in range(n_draws):
        linear = [(name, module) for name, module in net.named_modules() if isinstance(module, nn.Linear)]
        for position, (name, module) in enumerate(linear):
            scale = prior.of_weight(name, parameter="weight", first=position == 0, fan_in=module.in_features)
            nn.init.normal_(module.weight, std=1 / scale)
            nn.init.normal_(module.bias, std=1 / prior.of_bias(name, parameter="bias"))
        with torch.no_grad():
            outputs.append(net(X)[:, 0])
    return torch.stack(outputs)


def test_a_perceptron_is_the_deep_covariance_of_its_own_scales():
    net = nn.Sequential(nn.Linear(3, 50), nn.ReLU(), nn.Dropout(0.1), nn.Linear(50, 20), nn.Tanh(), nn.Linear(20, 1))
    prior = Prior(length_scale=1.4, bias_length_scale=2.0, hidden_length_scale=3.0)
    layers = (ReLU(1.4, 0.5), TanH(3 / math.sqrt(50), 0.5), Identity(3 / math.sqrt(20), 0.5))
    torch.testing.assert_close(process_of(net, prior)(X), Deep(layers)(X))


@pytest.mark.parametrize(
    "net",
    [Residual(), nn.Sequential(nn.Linear(3, 400), nn.GELU(), nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 1))],
    ids=["residual", "perceptron"],
)
def test_wide_networks_drawn_from_their_prior_have_the_covariance(net):
    outputs = prior_outputs(net.double(), PRIOR, 600)
    products = outputs[:, :, None] * outputs[:, None, :]
    error = products.std(0) / math.sqrt(600)
    assert ((products.mean(0) - process_of(net, PRIOR)(X)).abs() < 4.5 * error).all()


def test_a_flat_prior_on_the_output_bias_is_the_mean_function():
    net = nn.Sequential(nn.Linear(3, 9), nn.ReLU(), nn.Linear(9, 1))
    nn.init.constant_(net[2].bias, 1.5)
    covariance = process_of(net, Prior(per_layer={"2.bias": 0.0}))
    assert covariance.output_bias == 1.5
    process = exact_process(covariance, X, X[:, 0], precision=10.0, output_bias=covariance.output_bias)
    assert process.mean(X).shape == (4,)


def test_scales_can_be_changed_by_name():
    covariance = process_of(nn.Sequential(nn.Linear(3, 9), nn.ReLU(), nn.Linear(9, 1)), PRIOR)
    wider = covariance.with_scales({"2_bias_scale": 2.0})
    torch.testing.assert_close(wider(X), covariance(X) + 4.0 - 0.25)


@pytest.mark.parametrize(
    ("net", "rule"),
    [
        (nn.Sequential(nn.Linear(3, 1), nn.LayerNorm(1)), "linear layers, convolutions, activations"),
        (nn.Sequential(nn.ReLU(), nn.Linear(3, 1)), "apply activations to linear layers' outputs"),
        (nn.Sequential(nn.Identity()), "must have a linear layer"),
        (SeveralOutputs(2), "return what a layer"),
        (nn.Sequential(nn.Linear(3, 3), nn.Tanh(), TWICE, nn.Tanh(), TWICE), "use each layer once"),
    ],
)
def test_what_has_no_closed_form_is_refused(net, rule):
    with pytest.raises(ValueError, match=rule):
        process_of(net, PRIOR)
