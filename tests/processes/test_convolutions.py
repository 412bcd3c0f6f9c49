"""Tests of the process of a convolutional network, against perceptrons and against wide networks drawn from their prior."""

import math

import pytest
import torch
from torch import nn

from dropbayes.layers import Prior
from dropbayes.processes import exact_process, networks, prior_draws, process_of, variance_ratio

PRIOR = Prior(length_scale=1.4, bias_length_scale=2.0, hidden_length_scale="fan_in")
WIDTH = 120


def images(n_rows, *shape, seed=0):
    return torch.randn(n_rows, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def drawn_from_the_prior(net, x, n_draws):
    """Outputs of the network with its parameters drawn from the prior, `[draw, row]`."""
    torch.manual_seed(1)
    weighted = [(n, m) for n, m in net.named_modules() if isinstance(m, (nn.Linear, nn.Conv1d, nn.Conv2d))]
    outputs = []
    for _ in range(n_draws):
        for place, (name, module) in enumerate(weighted):
            fan_in = module.weight[0].numel()
            nn.init.normal_(module.weight, std=1 / PRIOR.of_weight(name, first=place == 0, fan_in=fan_in))
            nn.init.normal_(module.bias, std=1 / PRIOR.of_bias(name))
        with torch.no_grad():
            outputs.append(net(x)[:, 0])
    return torch.stack(outputs)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(2, WIDTH, 3, padding=1)
        self.inner, self.out = nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.Linear(12 * WIDTH, 1)

    def forward(self, x):
        h = self.first(x)
        h = torch.relu(h + self.inner(torch.tanh(h)))
        return self.out(h.flatten(1))


NETWORKS = {
    "flattened": (
        nn.Sequential(nn.Conv2d(2, WIDTH, 3, padding=1), nn.ReLU(), nn.Conv2d(WIDTH, WIDTH, 2, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(4 * WIDTH, 1)),
        (2, 4, 4),
    ),
    "padded": (
        nn.Sequential(nn.Conv1d(2, WIDTH, 3, padding="same"), nn.ReLU(), nn.Dropout1d(0.2), nn.Flatten(), nn.Linear(6 * WIDTH, 1)),
        (2, 6),
    ),
    "dilated": (
        nn.Sequential(nn.Conv1d(2, WIDTH, 3, padding=2, stride=2, dilation=2), nn.GELU(), nn.Flatten(), nn.Linear(4 * WIDTH, 1)),
        (2, 7),
    ),
    "residual": (Residual(), (2, 4, 3)),
}  # fmt: skip


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.slow
def test_wide_networks_drawn_from_their_prior_have_the_covariance(name):
    net, shape = NETWORKS[name]
    x = images(3, *shape)
    outputs = drawn_from_the_prior(net.double().eval(), x, 400)
    products = outputs[:, :, None] * outputs[:, None, :]
    error = products.std(0) / math.sqrt(len(outputs))
    covariance = process_of(net, PRIOR, input_shape=shape)(x)
    assert ((products.mean(0) - covariance).abs() < 4.5 * error).all()


def test_a_kernel_as_large_as_the_image_makes_a_perceptron():
    x = images(4, 2, 3, 3)
    convolutional = nn.Sequential(
        nn.Conv2d(2, 7, 3), nn.ReLU(), nn.Conv2d(7, 9, 1), nn.Tanh(), nn.Flatten(), nn.Linear(9, 1)
    )
    perceptron = nn.Sequential(nn.Linear(18, 7), nn.ReLU(), nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 1))
    expected = process_of(perceptron, PRIOR)(x.flatten(1))
    torch.testing.assert_close(process_of(convolutional, PRIOR, input_shape=(2, 3, 3))(x), expected)


def test_two_convolutions_of_an_affine_network_have_the_covariance_of_their_sums():
    # Without an activation: flattened, x's covariance is the sum over patches of patches' inner products.
    x = images(4, 2, 5)
    net = nn.Sequential(nn.Conv1d(2, 6, 3, bias=False), nn.Flatten(), nn.Linear(18, 1, bias=False))
    patches = x.unfold(2, 3, 1).permute(0, 2, 1, 3).flatten(2)  # [row, position, channel * offset]
    expected = torch.einsum("npd,mpd->nm", patches, patches) / 1.4**2 * 6 / 18
    torch.testing.assert_close(process_of(net, PRIOR, input_shape=(2, 5))(x), expected)


def test_the_process_is_used_like_any_other_with_flat_rows_too():
    net = nn.Sequential(nn.Conv2d(1, 8, 2), nn.ReLU(), nn.Flatten(), nn.Linear(32, 1))
    covariance = process_of(net, PRIOR, input_shape=(1, 3, 3))
    x = images(6, 1, 3, 3)
    torch.testing.assert_close(covariance(x.flatten(1)), covariance(x))
    assert (torch.linalg.eigvalsh(covariance(x)) > 0).all()
    process = exact_process(covariance, x.flatten(1), x[:, 0, 0, 0], precision=1e6)
    torch.testing.assert_close(process.mean(x.flatten(1)), x[:, 0, 0, 0], atol=1e-3, rtol=1e-3)
    assert prior_draws(covariance, x.flatten(1), n_draws=3).shape == (3, 6)
    wider = covariance.with_scales({"3_bias_scale": 2.0})
    torch.testing.assert_close(wider(x), covariance(x) + 4.0 - 0.25)


def test_its_dropout_draws_are_compared_with_its_process_on_images():
    net = nn.Sequential(nn.Conv1d(1, 8, 3), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(24, 1))
    x, covariance = images(6, 1, 5).float(), process_of(net, PRIOR, input_shape=(1, 5))
    compared = variance_ratio(net, covariance, (x, x.mean((1, 2))), x + 3, precision=100.0)
    process = exact_process(covariance, x.double().flatten(1), x.mean((1, 2)).double(), precision=100.0)
    torch.testing.assert_close(compared.process, process.variance((x + 3).double().flatten(1)))
    assert (compared.network > 0).all()


def test_the_covariance_is_the_same_in_blocks_of_any_size(monkeypatch):
    x, y = images(5, 2, 4), images(3, 2, 4, seed=1)
    net = nn.Sequential(nn.Conv1d(2, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 1))
    covariance = process_of(net, PRIOR, input_shape=(2, 4))
    whole = covariance(x, y)
    monkeypatch.setattr(networks, "_ELEMENTS", 24)  # two rows at a time
    torch.testing.assert_close(covariance(x, y), whole)


class ByFunctions(nn.Module):
    """The same network in the style of functions, which flattens as it is told."""

    def __init__(self, last):
        super().__init__()
        self.convolution, self.out, self.last = nn.Conv2d(1, 8, 2), nn.Linear(32, 1), last

    def forward(self, x):
        return self.out(self.last(nn.functional.relu(self.convolution(x))))


FLATTENED = [
    lambda h: h.view(h.size(0), -1),
    lambda h: h.reshape(h.shape[0], -1),
    lambda h: h.view(-1, 32),
    lambda h: h.flatten(1),
]


def test_the_style_in_which_a_network_is_written_does_not_matter():
    x, shape = images(3, 1, 3, 3), (1, 3, 3)
    layers = nn.Conv2d(1, 8, 2), nn.ReLU()
    expected = process_of(nn.Sequential(*layers, nn.Flatten(), nn.Linear(32, 1)), PRIOR, input_shape=shape)(x)
    for flatten in FLATTENED:
        torch.testing.assert_close(process_of(ByFunctions(flatten), PRIOR, input_shape=shape)(x), expected)


class Unequal(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.several = nn.Linear(3, 1), nn.Linear(3, 4)

    def forward(self, x):
        return self.several(x) + self.one(x)


REFUSED = {
    "no shape": (nn.Sequential(nn.Conv1d(1, 2, 1)), None, "`input_shape` must say"),
    "positions left": (nn.Sequential(nn.Conv1d(1, 2, 1)), (1, 4), "its output has some left"),
    "a linear layer on positions": (nn.Sequential(nn.Conv1d(1, 2, 1), nn.Linear(4, 1)), (1, 4), "must flatten its positions"),
    "an activation after": (nn.Sequential(nn.Conv1d(1, 2, 1), nn.Flatten(), nn.ReLU(), nn.Linear(8, 1)), (1, 4), "before it flattens"),
    "the largest of a window": (nn.Sequential(nn.Conv1d(1, 2, 1), nn.MaxPool1d(2)), (1, 4), "positions that are flattened"),
    "an average": (nn.Sequential(nn.Conv1d(1, 2, 1), nn.AdaptiveAvgPool1d(1)), (1, 4), "positions that are flattened"),
    "unequal branches": (Unequal(), None, "the same units"),
    "groups": (nn.Sequential(nn.Conv1d(2, 2, 1, groups=2)), (2, 4), "of one group"),
    "circular padding": (nn.Sequential(nn.Conv1d(1, 2, 3, padding=1, padding_mode="circular")), (1, 4), "padded with zeros"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_closed_form_is_refused(case):
    net, shape, rule = REFUSED[case]
    with pytest.raises(ValueError, match=rule):
        process_of(net, PRIOR, input_shape=shape)
