"""Tests of the process of a network as it stands, against draws of the network's own prior."""

import math

import pytest
import scipy.integrate
import torch
from torch import nn

from dropbayes.layers import Prior
from dropbayes.processes import Deep, Identity, ReLU, TanH, exact_process, process_of

X = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
PRIOR = Prior(length_scale=1.4, bias_length_scale=2.0, hidden_length_scale="fan_in")


class Residual(nn.Module):
    def __init__(self, width=400, alpha=1):
        super().__init__()
        self.alpha = alpha
        self.first, self.inner, self.back, self.out = (
            nn.Linear(3, width), nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 1)
        )  # fmt: skip

    def forward(self, x):
        h = self.first(x)
        h = torch.add(h, self.back(torch.relu(self.inner(torch.tanh(h)))), alpha=self.alpha)
        return self.out(torch.tanh(h))


TWICE = nn.Linear(3, 3)


class Joined(nn.Module):
    """A network that joins the units of its first layer with those of another."""

    def __init__(self, join):
        super().__init__()
        self.join, self.first, self.inner, self.out = join, nn.Linear(3, 9), nn.Linear(9, 9), nn.Linear(9, 1)

    def forward(self, x):
        return self.out(self.join(self.first(x), self.inner))


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


@pytest.mark.parametrize(
    "activation",
    [nn.ELU(3.0), nn.ELU(0.5, inplace=True), nn.Softplus(0.2), nn.LeakyReLU(0.5), nn.GELU("tanh"), nn.CELU(2.0),
     nn.SELU(), nn.Mish(), nn.Softsign(), nn.GELU()],
)  # fmt: skip
def test_an_activation_has_the_arguments_it_has_in_the_network(activation):
    covariance = process_of(nn.Sequential(nn.Linear(3, 9), activation, nn.Linear(9, 1)), PRIOR)
    for row, variance in zip(X, covariance.diagonal(X), strict=True):
        std = math.sqrt(row.square().sum() / 1.4**2 + 0.25)

        def integrand(z, std=std):
            value = activation(torch.tensor(std * z, dtype=torch.float64)).item()
            return value**2 * math.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)

        square = scipy.integrate.quad(integrand, -9, 0)[0] + scipy.integrate.quad(integrand, 0, 9)[0]
        assert variance.item() == pytest.approx(square + 0.25, rel=1e-7)


class Functional(nn.Module):
    def __init__(self, *args, **kwargs):
        super().__init__()
        self.first, self.out, self.args, self.kwargs = nn.Linear(3, 9), nn.Linear(9, 1), args, kwargs

    def forward(self, x):
        return self.out(nn.functional.leaky_relu(self.first(x), *self.args, **self.kwargs))


def test_a_function_has_the_arguments_of_its_call_and_one_computed_in_the_network_is_refused():
    module = process_of(nn.Sequential(nn.Linear(3, 9), nn.LeakyReLU(0.4), nn.Linear(9, 1)), PRIOR)(X)
    for net in (Functional(0.4), Functional(negative_slope=0.4)):
        torch.testing.assert_close(process_of(net, PRIOR)(X), module)
    with pytest.raises(ValueError, match="whose covariance is not implemented"):
        process_of(nn.Sequential(nn.Linear(3, 9), nn.PReLU(), nn.Linear(9, 1)), PRIOR)


class TwoInputs(nn.Module):
    def __init__(self, width=400):
        super().__init__()
        self.out, self.left, self.right = nn.Linear(width, 1), nn.Linear(3, width), nn.Linear(3, width)

    def forward(self, x):
        return self.out(torch.tanh(self.left(x) + self.right(x)))


def test_two_layers_that_read_the_input_both_have_its_length_scale():
    # u has variance 2 (x'x/l² + 1/l'²): that of one layer with l/√2 and l'/√2.
    one = Prior(
        length_scale=1.4 / 2**0.5, per_layer={"0.bias": 2.0 / 2**0.5, "2.bias": 2.0}, hidden_length_scale="fan_in"
    )
    single = process_of(nn.Sequential(nn.Linear(3, 400), nn.Tanh(), nn.Linear(400, 1)), one)(X)
    torch.testing.assert_close(process_of(TwoInputs(), PRIOR)(X), single)


def test_a_prior_of_stored_weights_is_a_process_with_l_times_p():
    net = nn.Sequential(nn.Linear(3, 9), nn.ReLU(), nn.Dropout(0.5), nn.Linear(9, 1))
    stored = Prior(length_scale=1.4, bias_length_scale=2.0, applies_to="stored")
    active = Prior(length_scale=1.4, bias_length_scale=2.0, per_layer={"3.weight": 0.7})
    torch.testing.assert_close(process_of(net, stored)(X), process_of(net, active)(X))
    torch.testing.assert_close(
        process_of(net, stored, keep_probs={"0": 1.0, "3": 1.0})(X), process_of(net, Prior(1.4, 2.0))(X)
    )


def test_a_perceptron_is_the_deep_covariance_of_its_own_scales():
    net = nn.Sequential(nn.Linear(3, 50), nn.ReLU(), nn.Dropout(0.1), nn.Linear(50, 20), nn.Tanh(), nn.Linear(20, 1))
    prior = Prior(length_scale=1.4, bias_length_scale=2.0, hidden_length_scale=3.0)
    layers = (ReLU(1.4, 0.5), TanH(3 / math.sqrt(50), 0.5), Identity(3 / math.sqrt(20), 0.5))
    torch.testing.assert_close(process_of(net, prior)(X), Deep(layers)(X))


@pytest.mark.slow
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
        (nn.Sequential(nn.ReLU(), nn.Linear(3, 1)), "apply activations to the outputs of layers"),
        (nn.Sequential(nn.Identity()), "must have a linear layer"),
        (nn.Linear(3, 1), r"Pass nn.Sequential\(net\)"),
        (nn.LSTM(3, 1), "`net` must run the same layers for every input"),
        (SeveralOutputs(2), "return what a layer"),
        (Residual(4, alpha=2), r"got .*add.* whose covariance is not implemented"),
        (nn.Sequential(nn.Linear(3, 3), nn.Tanh(), TWICE, nn.Tanh(), TWICE), "use each layer once"),
        (nn.Sequential(nn.Linear(3, 9), nn.ReLU(), nn.Tanh(), nn.Linear(9, 1)), "_2 reads _1, whose units are not"),
        (nn.Sequential(nn.Linear(3, 1), nn.ReLU()), "return what a layer or a sum of layers gives"),
        (Joined(lambda h, inner: torch.tanh(torch.relu(h) + inner(h))), "outputs of layers or to their sums"),
        (Joined(lambda h, inner: h + torch.relu(h)), "one of which ends in a layer of its own"),
        (Joined(lambda h, inner: h + (h + inner(torch.tanh(h)))), "one of which ends in a layer of its own"),
    ],
)
def test_what_has_no_closed_form_is_refused(net, rule):
    with pytest.raises(ValueError, match=rule):
        process_of(net, PRIOR)


def test_a_layer_reads_the_sum_of_rectified_units_and_new_ones():
    net = Joined(lambda h, inner: torch.relu(h) + inner(torch.tanh(h)))
    expected = ReLU(1.4, 0.5)(X) + TanH(1.4, 0.5)(X) + 0.25 + 0.25
    torch.testing.assert_close(process_of(net, PRIOR)(X), expected)


def test_positions_that_are_flattened_without_their_channels_are_refused():
    net = nn.Sequential(nn.Conv2d(1, 4, 2), nn.ReLU(), nn.Flatten(2), nn.Linear(4, 1))
    with pytest.raises(ValueError, match=r"got '2' .*whose covariance is not implemented"):
        process_of(net, PRIOR, input_shape=(1, 3, 3))


def test_a_flat_bias_is_the_mean_of_the_output_and_refused_elsewhere():
    net = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 1))
    output_alone = Prior(length_scale=1.4, bias_length_scale=2.0, per_layer={"2.bias": 0.0})
    assert process_of(net, output_alone).output_bias == float(net[2].bias.detach())
    with pytest.raises(ValueError, match=r"`prior` must be flat for the bias of a single output alone; .*\['0', '2'\]"):
        process_of(net, Prior(length_scale=1.4, bias_length_scale=0.0))
    without = nn.Sequential(nn.Linear(3, 5, bias=False), nn.ReLU(), nn.Linear(5, 1))
    assert process_of(without, Prior(bias_length_scale=0.0)).output_bias == float(without[2].bias.detach())


def test_what_is_no_network_and_no_prior_is_refused():
    with pytest.raises(TypeError, match=r"`net` must be a torch.nn.Module; got str"):
        process_of("net", PRIOR)
    with pytest.raises(TypeError, match=r"`prior` must be a record Prior\(...\); got 1.0"):
        process_of(nn.Sequential(nn.Linear(3, 1)), 1.0)
