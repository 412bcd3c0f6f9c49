"""The strategies that evaluate many draws: all give the same numbers, and each is taken where it must be."""

import functools
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dropbayes as db
from dropbayes.sampling import Sampling
from dropbayes.sampling.inputs import as_inputs
from dropbayes.sampling.inspection import inspect
from dropbayes.sampling.source import MaskSpec, NetworkChanged, UnsupportedStrategy
from dropbayes.sampling.strategies import (
    DRAW_BY_DRAW,
    FOLDED,
    MAPPED,
    MAPPED_ROWS,
    ONE_BY_ONE,
    ROW_BY_ROW,
    Work,
    evaluate,
)
from dropbayes.tracing.views import checked_network
from tests.cases import slow_except
from tests.sampling.zoo import ZOO, build
from tests.sampling.zoo.specimens import Module

STRATEGIES = [FOLDED, MAPPED, MAPPED_ROWS, DRAW_BY_DRAW, ROW_BY_ROW]


def run(strategy, net, x, *, per_row, row_axis=0, at_sites=False):
    inputs = as_inputs(x, row_axis=row_axis)
    net = checked_network(net)
    inspection = inspect(net, inputs)
    masks = MaskSpec(inspection.profile, Sampling().keys(6, 1), per_row)
    leaves = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in inputs.leaves]
    network = functools.partial(inspection.network, at_sites=at_sites)
    work = Work(network, inputs, leaves, range(6), range(inputs.n_rows))
    with torch.no_grad():
        return evaluate(strategy, masks, work)


@functools.cache
def one_by_one(name, per_row):
    """A specimen, whose inspection is remembered with it, and its draws one by one."""
    net, x = build(name)
    return net, x, run(ONE_BY_ONE, net, x, per_row=per_row, row_axis=ZOO[name].row_axis)


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize("name", ["functional_dropout", "dropout2d", "transformer_encoder", "lstm", "gpt2"])
def test_every_strategy_gives_the_draws_of_one_by_one(name, strategy, per_row):
    net, x, oracle = one_by_one(name, per_row)
    for ours, expected in zip(run(strategy, net, x, per_row=per_row), oracle, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("name", ["dropout2d", "transformer_encoder", "lstm", "gpt2", "convnet_with_batch_norm"])
def test_draws_folded_with_a_mode_at_the_sites_alone_have_the_bits_of_one_throughout(name, per_row):
    net, x = build(name)
    found = run(FOLDED, net, x, per_row=per_row, at_sites=True)
    assert inspect(net, as_inputs(x)).network(at_sites=True).at_sites
    assert all(map(torch.equal, found, run(FOLDED, net, x, per_row=per_row)))


@pytest.mark.parametrize("call", [lambda m, x: F.dropout(x, 0.5), lambda m, x: m.d(x) if torch.rand(1) < 0.5 else x])
def test_a_network_that_may_ask_for_random_numbers_elsewhere_has_no_mode_at_the_sites_alone(call):
    net = Module(call, d=nn.Dropout(0.5))
    assert not inspect(net, as_inputs(torch.randn(4, 3))).network(at_sites=True).at_sites


def test_random_numbers_that_a_global_variable_switches_on_between_the_sites_are_noticed():
    switched_on = []

    class Between(nn.Module):
        def forward(self, x):
            return F.dropout(x, 0.5, self.training) if switched_on else x

    net, x = Module(lambda m, x: m.between(m.d(x)), between=Between(), d=nn.Dropout(0.5)), torch.randn(4, 3)
    run(FOLDED, net, x, per_row=False, at_sites=True)
    switched_on.append(True)
    with pytest.raises(NetworkChanged, match="asked for elsewhere than before"):
        run(FOLDED, net, x, per_row=False, at_sites=True)


def test_a_mask_without_rows_is_not_folded():
    net, x = build("drop_connect")
    with pytest.raises(UnsupportedStrategy):
        run(FOLDED, net, x, per_row=False)


@pytest.mark.parametrize(
    "name, strategy",
    [
        ("functional_dropout", "mapped"),
        ("lstm", "mapped"),
        ("gpt2", "folded"),
        ("bert_sdpa", "folded"),
        ("drop_path_bernoulli", "folded"),
        ("drop_connect", "mapped"),
    ],
)
def test_the_fastest_strategy_that_a_network_allows_is_taken(name, strategy):
    net, x = build(name)
    assert db.predict(net, x, n_draws=4, sampling=db.Sampling(integrate_last_layer=False)).method == strategy


def test_what_does_not_depend_on_the_draw_is_computed_once():
    calls = []

    class Counted(nn.Linear):
        def forward(self, x):
            calls.append(len(x))
            return super().forward(x)

    net = nn.Sequential(
        Counted(3, 40), nn.ReLU(), nn.Dropout(0.5), nn.Linear(40, 4), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4, 1)
    )
    x = torch.randn(2, 3)
    db.draws(net, x, n_draws=50)
    calls.clear()
    db.draws(net, x, n_draws=50)
    assert len(calls) == 1


class SkipsLayers(nn.Module):
    """LayerDrop: a random number decides whether a layer, with its own dropout, runs."""

    def __init__(self, chance, n_layers=4):
        super().__init__()
        self.chance, self.drop_prob = chance, 0.2
        self.layers = nn.ModuleList(
            [nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.2)) for _ in range(n_layers)]
        )

    def forward(self, x):
        for layer in self.layers:
            if not self.training or self.chance() >= self.drop_prob:
                x = x + layer(x)
        return x


CHANCES = {"torch": lambda: torch.rand([]), "python": random.random, "numpy": lambda: np.random.uniform()}


@pytest.mark.parametrize("chance", slow_except(CHANCES, "torch"))
def test_a_network_that_skips_layers_runs_its_rows_together(chance):
    torch.manual_seed(0)
    net, x = SkipsLayers(CHANCES[chance]), torch.randn(3, 6)
    shared = db.predict(net, x, n_draws=40)
    assert shared.method == ("path by path" if chance == "torch" else "draw by draw")
    alone = torch.cat([db.predict(net, x[i : i + 1], n_draws=40).mean for i in range(3)])
    torch.testing.assert_close(shared.mean, alone)


@pytest.mark.parametrize("masks", ["shared", "row"])
@pytest.mark.parametrize("chance", CHANCES)
@pytest.mark.slow
def test_the_moments_of_a_network_that_skips_layers_are_those_of_the_loop(chance, masks):
    torch.manual_seed(0)
    net, x = SkipsLayers(CHANCES[chance]).train(), torch.randn(2, 6)
    with torch.no_grad():
        loop = torch.stack([net(x) for _ in range(600)])
    ours = db.draws(net, x, n_draws=600, masks=masks, sampling=db.Sampling(sampler="independent"))
    standard_error = ((loop.var(0) + ours.var(0)) / 600).sqrt()
    assert ((ours.mean(0) - loop.mean(0)) / standard_error).abs().max() < 5
    assert 0.8 < float(ours.var(0).sum() / loop.var(0).sum()) < 1.25
