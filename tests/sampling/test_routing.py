"""Draws that take one of a few paths, folded path by path; rows sent to places are in `test_data_dependent`."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dropbayes import Sampling
from dropbayes.sampling.inputs import as_inputs
from dropbayes.sampling.inspection import inspect
from dropbayes.sampling.masks import Keys, site_number, uniform
from dropbayes.sampling.plan import make_plan
from dropbayes.sampling.routing import same_paths
from dropbayes.sampling.source import MaskSpec
from dropbayes.sampling.strategies import BY_PATH, DRAW_BY_DRAW, ONE_BY_ONE
from tests.sampling.zoo import Module


def skipping(m, x):
    for layer in (m.a, m.b):
        if m.training and torch.rand(1) < 0.3:
            continue
        x = x + m.d(torch.tanh(layer(x)))
    return m.o(x)


def either_side(m, x):
    if m.training and torch.rand([]) >= 0.7:
        x = m.d(m.a(x))
    if m.training and 0.4 < torch.rand(()):  # noqa: SIM300
        return m.o(m.d(m.b(x)))
    return m.o(m.d(x))


def as_variable(m, x):
    skip = torch.rand(1) < 0.4
    h = m.d(m.b(x))
    return m.o(m.a(h) if m.training and bool(skip) else h)


def another_threshold(m, x):
    rate = 0.1 if m.training and torch.rand(1) < 0.4 else 0.5  # only one of the two is compared where it is inspected
    if m.training and torch.rand([]) < rate:
        x = torch.tanh(m.a(x))
    return m.o(m.d(x))


def number_used(m, x):
    number = torch.rand(1)
    if m.training and number < 0.2:  # a branch that no inspection takes
        x = m.d(m.a(x)) * (number / 0.2)
    return m.o(m.d(x))


def nested(m, x):
    if m.training and torch.rand(1) < 0.4:
        x = m.d(m.a(x))
        x = m.d(m.b(x)) if torch.rand(1) < 0.5 else torch.tanh(x)
    return m.o(m.d(x))


def masked_weights(m, x):
    if m.training and torch.rand(1) < 0.5:
        x = m.d(m.a(x))
    return m.o(m.d(x) @ F.dropout(m.b.weight, 0.3, m.training))


def caught(m, x):
    number = torch.rand(1)
    if m.training and number < 0.5:
        try:
            x = x * (1 + number)
        except Exception:
            x = 3 * x
    return m.o(m.d(x))


CPU = torch.device("cpu")


def by_keywords(m, x):
    if m.training and torch.lt(input=torch.rand(1), other=0.4):
        x = m.d(m.a(x))
    return m.o(m.d(x))


FOLDED = [skipping, either_side, as_variable]
OTHERS = [another_threshold, number_used, nested, masked_weights, caught, by_keywords]


def network(forward):
    torch.manual_seed(0)
    return Module(forward, a=nn.Linear(6, 6), b=nn.Linear(6, 6), o=nn.Linear(6, 2), d=nn.Dropout(0.3)).eval()


@pytest.mark.parametrize("forward", FOLDED + OTHERS)
@pytest.mark.parametrize("n_rows", [1, 5])
def test_draws_of_one_path_have_the_outputs_of_the_loop(forward, n_rows):
    inputs = as_inputs(torch.randn(n_rows, 6))
    plan = make_plan(network(forward), inputs, keys=Sampling().keys(40, 0))
    assert plan.strategy == BY_PATH or forward not in FOLDED
    loop = replace(plan, strategy=ONE_BY_ONE, block_rows=1).collected(inputs)[0]
    torch.testing.assert_close(plan.collected(inputs)[0], loop)
    if plan.profile.gates:  # where the trial would take another strategy, too
        torch.testing.assert_close(replace(plan, strategy=BY_PATH).collected(inputs)[0], loop)


def test_draws_are_grouped_by_the_sides_of_their_numbers():
    net, inputs = network(either_side), as_inputs(torch.randn(3, 6))
    profile = inspect(net, inputs).profile
    assert [at for _, at in profile.gates] == [0.7, 0.4]
    groups = same_paths(MaskSpec(profile, Keys(0, 50), per_row=False), range(50))
    assert sorted(draw for group in groups for draw in group) == list(range(50))
    uniforms = torch.stack(
        [
            uniform(Keys(0, 50), site_number(s), draws=range(50), rows=None, shape=(), device=CPU)
            for s in profile.sites
            if s.kind == "rand"
        ],
        1,
    )
    above = uniforms >= torch.tensor([0.7, 0.4])
    assert len(groups) == len(above.unique(dim=0))
    assert all(len(above[list(group)].unique(dim=0)) == 1 for group in groups)


def test_one_path_takes_one_pass():
    calls = []

    def forward(m, x):
        calls.append(len(x))
        return skipping(m, x)

    net, inputs = network(forward), as_inputs(torch.randn(8, 6))
    plan = make_plan(net, inputs, keys=Sampling().keys(40, 0))
    plan.collected(inputs)
    calls.clear()
    plan.collected(inputs)
    assert len(calls) == 4 and sum(calls) == 40 * plan.block_rows
    calls.clear()
    replace(plan, strategy=DRAW_BY_DRAW).collected(inputs)
    assert calls == 40 * [plan.block_rows]


def test_a_network_that_takes_few_rows_at_once_runs_draw_by_draw():
    def forward(m, x):
        if len(x) > 30:
            raise RuntimeError("no room for so many rows")
        return skipping(m, x)

    net, inputs = network(forward), as_inputs(torch.randn(8, 6))
    sampling = Sampling(batch_invariant=False)
    plan = make_plan(net, inputs, keys=sampling.keys(40, 0), sampling=sampling)
    loop = replace(plan, strategy=ONE_BY_ONE, block_rows=1).collected(inputs)[0]
    torch.testing.assert_close(plan.collected(inputs)[0], loop)
