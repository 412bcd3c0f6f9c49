"""A perceptron's moments in one kernel, against the moments of draws made one mask at a time in double precision."""

import pytest
import torch
from torch import nn

pytest.importorskip("triton", reason="Triton is not installed")

from dropbayes.sampling.kernels.all import affine_layers, perceptron_moments
from dropbayes.sampling.masks import Keys, keep_mask
from tests.cases import crossed, slow_except

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROWS = range(3, 12)
NETWORKS = {
    "one hidden layer": [nn.Dropout(0.1), nn.Linear(13, 50), nn.ReLU(), nn.Dropout(0.2), nn.Linear(50, 1)],
    "two, several outputs": [nn.Linear(3, 20), nn.Tanh(), nn.Dropout(0.3), nn.Linear(20, 40, bias=False), nn.SiLU(), nn.Dropout(0.5), nn.Linear(40, 5)],
    "three, dropout twice": [nn.Dropout(0.3), nn.Linear(4, 16), nn.Sigmoid(), nn.Linear(16, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 20), nn.ReLU(), nn.Dropout(0.4), nn.Linear(20, 1)],
    "no hidden layer": [nn.Dropout(0.3), nn.Linear(4, 2)],
}  # fmt: skip


def moments_of_draws(layers, x, keys, draws, rows, integrate_last):
    h, site, integrated = x.double().expand(len(draws), *x.shape), 0, 0.0
    for place, layer in enumerate(layers):
        if isinstance(layer, nn.Dropout) and integrate_last and place == len(layers) - 2:
            squares = layers[-1].weight.double().square()
            integrated = (h.square() @ squares.t()).mean(0) * layer.p / (1 - layer.p)
        elif isinstance(layer, nn.Dropout):
            mask = keep_mask(
                keys,
                site,
                drop_prob=layer.p,
                draws=draws,
                rows=rows,
                shape=(h.shape[-1],),
                dtype=h.dtype,
                device=h.device,
            )
            h, site = h * (mask if rows else mask[:, None]) / (1 - layer.p), site + 1
        elif isinstance(layer, nn.Linear):
            h = h @ layer.weight.double().t() + (0 if layer.bias is None else layer.bias.double())
        else:
            h = layer(h)
    return h.mean(0), h.var(0, unbiased=False) + integrated


@pytest.mark.parametrize("rows", [None, ROWS])
@pytest.mark.parametrize(("name", "integrate"), crossed(NETWORKS, [False, True]))
@pytest.mark.parametrize("sampler", slow_except(["stratified", "independent"], "stratified"))
@torch.no_grad()
def test_the_moments_are_those_of_the_draws(name, sampler, rows, integrate):
    layers, keys = [layer.to(DEVICE) for layer in NETWORKS[name]], Keys(7, 25, sampler)
    draws = range(25) if sampler == "stratified" and rows else range(2, 22)  # rows begin at draws of their own
    x = torch.randn(9, next(layer for layer in layers if isinstance(layer, nn.Linear)).in_features, device=DEVICE)
    moments = perceptron_moments(affine_layers(layers), x, keys, draws=draws, rows=rows, integrate_last=integrate)
    for moment, expected in zip(moments, moments_of_draws(layers, x, keys, draws, rows, integrate), strict=True):
        torch.testing.assert_close(moment.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("sampler", "rows"), crossed(["stratified", "independent"], [range(2), None]))
@torch.no_grad()
def test_moments_of_more_draws_than_a_tile_are_those_of_all(sampler, rows):
    layers, keys = [layer.to(DEVICE) for layer in NETWORKS["one hidden layer"]], Keys(7, 300, sampler)
    x = torch.randn(2, 13, device=DEVICE)
    moments = perceptron_moments(affine_layers(layers), x, keys, draws=range(300), rows=rows, integrate_last=False)
    for moment, expected in zip(moments, moments_of_draws(layers, x, keys, range(300), rows, False), strict=True):
        torch.testing.assert_close(moment.double(), expected, rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_a_far_offset_does_not_swallow_the_variance():
    layers, keys, x = [nn.Dropout(0.1), nn.Linear(4, 1)], Keys(7, 100), torch.randn(3, 4)
    affines = affine_layers([layer.to(DEVICE) for layer in layers])
    _, variance = perceptron_moments(affines, x.to(DEVICE), keys, draws=range(100), rows=None, integrate_last=False)
    layers[1].bias += 1000.0
    mean, moved = perceptron_moments(affines, x.to(DEVICE), keys, draws=range(100), rows=None, integrate_last=False)
    torch.testing.assert_close(moved, variance, rtol=1e-2, atol=1e-7)
    assert mean.min() > 900  # the changed bias was read


def test_layers_that_the_kernel_does_not_know_are_left_to_others():
    assert affine_layers([nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 1)]) is None
    assert affine_layers([nn.Linear(3, 500), nn.ReLU(), nn.Linear(500, 1)]) is None
    assert affine_layers([nn.Linear(3, 4), nn.Dropout(0.1)]) is None
    assert affine_layers([nn.Linear(3, 4), nn.Dropout(0.1), nn.ReLU(), nn.Linear(4, 1)]) is None
    assert affine_layers([nn.Linear(3, 4)] + [nn.Linear(4, 4)] * 5) is None
    assert affine_layers([nn.ReLU(), nn.Linear(3, 4)]) is None
