"""Tests of the layers that draw weights: their mean in evaluation, a distinct draw per row in training."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dropbayes
from dropbayes.layers import (
    BernoulliNoise,
    Conv1d,
    Conv2d,
    Conv3d,
    Embedding,
    GaussianNoise,
    Linear,
    MixtureNoise,
    Prior,
)
from dropbayes.sampling import Sampling
from dropbayes.tracing import draw_or_mean
from tests.cases import crossed, slow_except
from tests.layers.noises import DTYPE, NOISES, layers


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


class Draws(torch.overrides.TorchFunctionMode):
    """A minimal interceptor: switches every stochastic operation on, in evaluation mode."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is F.dropout or func is draw_or_mean:
            kwargs["training"] = True
        return func(*args, **kwargs)


def exact_moments(layer, x):
    """Mean and variance of the output's elements for one row, from the variance of each weight and bias."""
    q = layer.posterior()
    bias = getattr(layer, "bias", None)
    bias_variance = 0
    if bias is not None and isinstance(layer.noise, BernoulliNoise):
        bias_variance = torch.full_like(bias, layer.noise.std**2)
        if layer.noise.drop_bias:
            bias_variance = bias_variance + layer.noise.drop_prob / layer.noise.keep_prob * bias.square()
    elif bias is not None and isinstance(layer.noise, GaussianNoise):
        bias_variance = (layer.noise.std * bias).square()
    elif bias is not None and isinstance(layer.noise, MixtureNoise):
        bias_variance = layer.noise.initial_std**2
    mean = layer.noise.mean(layer.matrix())
    if isinstance(layer, Embedding):
        return mean[x], q.variance[x]
    if isinstance(layer, Linear):
        second = F.linear(x.square(), layer.weight_of(q.variance))
        return F.linear(x, layer.weight_of(mean), bias), second + bias_variance
    # One row's mask takes a whole channel, so the variance is that of explicit matrices (tested below).
    return layer._conv_forward(x[None], layer.weight_of(mean), bias)[0], None


@pytest.mark.parametrize("name", NOISES)
def test_evaluation_computes_with_the_mean_weights(name):
    for layer, x in layers(NOISES[name]):
        layer, x = layer.to(DTYPE).eval(), x.to(DTYPE) if x.is_floating_point() else x
        torch.testing.assert_close(layer(x[None])[0], exact_moments(layer, x)[0])
        torch.testing.assert_close(layer.noise.mean(layer.matrix()), layer.posterior().mean)


def assert_moments_of_q(layer, x, draws):
    mean, variance = exact_moments(layer, x)
    error = draws.std(0) / math.sqrt(len(draws))
    assert ((draws.mean(0) - mean).abs() <= 4.8 * error + 1e-9).all()
    if variance is not None:
        squares = (draws - mean).square()
        assert ((squares.mean(0) - variance).abs() <= 4.8 * squares.std(0) / math.sqrt(len(draws)) + 1e-9).all()


@pytest.mark.parametrize("name", NOISES)
@torch.no_grad()
def test_draws_in_training_have_the_moments_of_q(name):
    for layer, x in layers(NOISES[name]):
        layer, x = layer.to(DTYPE), x.to(DTYPE) if x.is_floating_point() else x
        assert_moments_of_q(layer, x, layer.train()(x.expand(4000, *x.shape)))


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_except(NOISES, "bernoulli", "dropped bias", "concrete", "gaussian"))
@torch.no_grad()
def test_intercepted_draws_have_the_moments_of_q(name):
    for layer, x in layers(NOISES[name]):
        layer, x = layer.to(DTYPE).eval(), x.to(DTYPE) if x.is_floating_point() else x
        with Draws():
            if layer.noise.on_units and name != "dropped bias":
                draws = layer(x.expand(4000, *x.shape))
            else:  # one weight per call serves all rows
                draws = torch.stack([layer(x[None])[0] for _ in range(400)])
        assert_moments_of_q(layer, x, draws)


@pytest.mark.parametrize("name", NOISES)
def test_one_weight_serves_all_positions_of_a_row(name):
    """Equal inputs at two time steps of a row give equal outputs; two rows differ."""
    layer = Linear(4, 3, noise=NOISES[name]).to(DTYPE)
    x = torch.randn(4, dtype=DTYPE).expand(8, 5, 4)
    y = layer(x)
    torch.testing.assert_close(y, y[:, :1].expand_as(y))
    assert (y[:, 0].std(0) > 0).all()
    words = torch.tensor([[0, 1, 0, 2, 0]]).expand(8, 5)
    vectors = Embedding(3, 2, noise=NOISES[name]).to(DTYPE)(words)
    torch.testing.assert_close(vectors[:, 0], vectors[:, 2])
    torch.testing.assert_close(vectors[:, 0], vectors[:, 4])
    assert vectors[:, 0].std(0).max() > 0


@pytest.mark.parametrize("name", NOISES)
def test_a_row_of_a_convolution_has_one_kernel_at_all_positions(name):
    layer = Conv1d(3, 2, 2, noise=NOISES[name]).to(DTYPE)
    x = torch.randn(3, 1, dtype=DTYPE).expand(6, 3, 5)
    y = layer(x)
    torch.testing.assert_close(y, y[:, :, :1].expand_as(y))
    assert (y[:, 0, 0].std() > 0).all()


@pytest.mark.parametrize("name", ["bernoulli", "concrete", "gaussian", "low-rank mixture"])
def test_a_convolution_is_distributed_as_one_with_a_sampled_matrix(name):
    layer = Conv1d(4, 6, 2, groups=2, bias=False, noise=NOISES[name]).to(DTYPE)
    x, n = torch.randn(4, 3, dtype=DTYPE), 4000
    with torch.no_grad():
        draws = layer(x.expand(n, 4, 3))
        kernels = layer.weight_of(layer.posterior().sample(n))
        explicit = torch.func.vmap(lambda kernel: F.conv1d(x, kernel, groups=2))(kernels)
    for statistic in (torch.square, lambda y: y[..., :1] * y[..., 1:], lambda y: y[:, :1] * y[:, 1:]):
        a, b = statistic(draws), statistic(explicit)
        assert ((a.mean(0) - b.mean(0)).abs() < 4.8 * ((a.var(0) + b.var(0)) / n).sqrt() + 1e-9).all()


def test_bernoulli_linear_is_dropout_then_linear_bit_for_bit():
    layer = Linear(4, 3, noise=BernoulliNoise(0.3))
    plain = nn.Sequential(nn.Dropout(0.3), nn.Linear(4, 3))
    plain[1].load_state_dict(layer.state_dict())
    x = torch.randn(50, 4)
    torch.manual_seed(1)
    expected = plain(x)
    torch.manual_seed(1)
    assert torch.equal(layer(x), expected)


@pytest.mark.parametrize("name", NOISES)
def test_a_convolution_takes_a_row_without_its_axis(name):
    for layer, x in layers(NOISES[name]):
        if isinstance(layer, (Conv1d, Conv2d, Conv3d)):
            torch.manual_seed(1)
            expected = layer(x[None])[0]
            torch.manual_seed(1)
            torch.testing.assert_close(layer(x), expected)


def test_state_dicts_of_torch_layers_load():
    pairs = [
        (Linear(4, 3), nn.Linear(4, 3)),
        (Conv2d(4, 3, 2), nn.Conv2d(4, 3, 2)),
        (Embedding(4, 3), nn.Embedding(4, 3)),
    ]
    for ours, theirs in pairs:
        ours.load_state_dict(theirs.state_dict())
        assert torch.equal(ours.weight, theirs.weight)


def test_the_matrix_of_a_grouped_convolution_has_a_row_for_each_input_channel():
    layer = Conv1d(4, 6, 2, groups=2).to(DTYPE)
    torch.testing.assert_close(layer.weight_of(layer.matrix()), layer.weight)
    torch.testing.assert_close(layer.weight_of(layer.matrix().expand(2, -1, -1))[1], layer.weight)
    for channel in range(4):
        matrix = layer.matrix().clone()
        matrix[channel] = 0
        x = torch.randn(1, 4, 5, dtype=DTYPE)
        silenced = x.clone()
        silenced[:, channel] = 0
        expected = F.conv1d(silenced, layer.weight, layer.bias, groups=2)
        torch.testing.assert_close(F.conv1d(x, layer.weight_of(matrix), layer.bias, groups=2), expected)


def test_stochastic_operations_are_shown_to_a_mode_once_and_only_in_evaluation():
    seen = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is draw_or_mean:
                seen.append(kwargs["training"])
                with self:  # as an interceptor that keys the draws inside must do
                    return func(*args, **{**kwargs, "training": True})
            if func in (torch.randn, torch.rand):
                seen.append((func.__name__, tuple(args[0])))
            return func(*args, **(kwargs or {}))

    layer = Linear(4, 3, noise=BernoulliNoise(0.3, std=0.2)).eval()
    with Watch():
        layer(torch.zeros(2, 4))
    assert seen == [False, ("rand", (4, 1)), ("randn", (4, 3)), False, ("randn", (3, 1))]


# --- time first ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NOISES)
def test_time_first_layers_draw_one_weight_per_row_for_all_its_time_steps(name):
    layer = Linear(4, 3, noise=NOISES[name], row_axis=1).to(DTYPE)
    y = layer(torch.randn(4, dtype=DTYPE).expand(5, 8, 4))  # [time, row, unit], all alike
    torch.testing.assert_close(y, y[:1].expand_as(y))
    assert (y[0].std(0) > 0).all()
    vectors = Embedding(3, 2, noise=NOISES[name], row_axis=1).to(DTYPE)(torch.tensor([0, 1, 0])[:, None].expand(3, 8))
    torch.testing.assert_close(vectors[0], vectors[2])
    assert vectors[0].std(0).max() > 0


@pytest.mark.parametrize(("name", "masks"), crossed(NOISES, ["shared", "row"]))
def test_a_time_first_network_draws_what_the_same_network_draws_batch_first(name, masks):
    nets = []
    for axis in (0, 1):
        torch.manual_seed(0)
        table, out = Embedding(6, 4, noise=NOISES[name], row_axis=axis), Linear(4, 2, noise=NOISES[name], row_axis=axis)
        nets.append(nn.Sequential(table, nn.Tanh(), out).to(DTYPE).eval())
    words = torch.randint(6, (3, 5))
    batch_first = dropbayes.draws(nets[0], words, n_draws=10, seed=0, masks=masks)
    time_first = dropbayes.draws(nets[1], words.T, n_draws=10, seed=0, masks=masks, sampling=Sampling(row_axis=1))
    torch.testing.assert_close(time_first, batch_first.transpose(1, 2))
    predicted = dropbayes.predict(nets[1], words.T, n_draws=10, seed=0, sampling=Sampling(row_axis=1))
    assert (predicted.std > 0).any()


# --- edges ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NOISES)
def test_one_input_without_a_row_axis_is_a_row(name):
    layer, x = Linear(4, 3, noise=NOISES[name]).to(DTYPE), torch.randn(4, dtype=DTYPE)
    torch.manual_seed(1)
    alone = layer(x)
    torch.manual_seed(1)
    torch.testing.assert_close(alone, layer(x[None])[0])


@pytest.mark.parametrize("name", ["gaussian", "mixture", "concrete"])
def test_a_padding_vector_is_constant_and_costs_nothing(name):
    plain = Embedding(5, 3, noise=NOISES[name]).to(DTYPE)
    padded = Embedding(5, 3, padding_idx=0, noise=NOISES[name]).to(DTYPE)
    padded.load_state_dict(plain.state_dict())
    with torch.no_grad():
        padded.weight[0] = 0
    prior, others = Prior(length_scale=1.3), plain.posterior().at(torch.arange(1, 5)).kl(1.3)
    torch.testing.assert_close(padded.kl(prior), others)
    assert (padded(torch.zeros(4, 6, dtype=torch.long)) == 0).all()
    (padded.kl(prior) + padded(torch.tensor([[0, 1, 2]])).sum()).backward()
    assert all(p.grad.isfinite().all() for p in padded.parameters())


def test_fan_in_of_an_own_layers_kl_is_what_its_outputs_add_up():
    # Mutants that put 1, or the width of an embedding's vectors, in place of K change these.
    prior = Prior(hidden_length_scale="fan_in", bias_length_scale=1.0)
    noise = GaussianNoise(0.5)
    for layer, fan_in in ((Linear(7, 3, bias=False, noise=noise), 7), (Conv2d(4, 6, 3, groups=2, bias=False, noise=noise), 18),
                          (Embedding(9, 4, noise=noise), 1)):  # fmt: skip
        torch.testing.assert_close(layer.kl(prior, first=False), layer.posterior().kl(math.sqrt(fan_in)))


# --- drawn from by the engine --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NOISES)
def test_a_draw_is_one_function_and_rows_can_have_their_own(name):
    """A linear layer without bias is linear in every draw: f(a) + f(b) = f(a + b), whatever the family."""
    layer = Linear(4, 3, bias=False, noise=NOISES[name]).to(DTYPE).eval()
    a, b = torch.randn(2, 4, dtype=DTYPE)
    x = torch.stack([a, b, a + b, a])
    draws = dropbayes.draws(layer, x, n_draws=200, seed=0)
    torch.testing.assert_close(draws[:, 0] + draws[:, 1], draws[:, 2])
    torch.testing.assert_close(draws[:, 0], draws[:, 3])
    by_row = dropbayes.draws(layer, x, n_draws=200, seed=0, masks="row")
    assert (by_row[:, 0] - by_row[:, 3]).abs().amax(0).min() > 0
    mean, variance = exact_moments(layer, a)
    for sample in (draws[:, 0], by_row[:, 0]):
        assert ((sample.mean(0) - mean).abs() < 4.5 * (variance / 200).sqrt()).all()
        assert (sample.var(0) / variance - 1).abs().max() < 0.5


def test_a_draw_drops_a_word_type_in_all_rows():
    layer = Embedding(6, 3, noise=BernoulliNoise(0.5)).to(DTYPE).eval()
    words = torch.tensor([[0, 1, 2], [2, 0, 0], [5, 2, 1]])
    draws = dropbayes.draws(layer, words, n_draws=50, seed=0)
    for word in (0, 1, 2):
        places = draws[:, words == word]
        torch.testing.assert_close(places, places[:, :1].expand_as(places))
