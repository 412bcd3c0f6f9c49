"""The ways to evaluate many draws: all give the same numbers, and each is taken where it must be."""

import pytest
import torch
from torch import nn

import dropbayes as db
from dropbayes.sampling import plan as sampling
from dropbayes.sampling.anatomy import anatomy
from dropbayes.sampling.strategies import BY_WAY, Randomness
from dropbayes.sampling.trees import as_inputs
from dropbayes.sampling.views import view
from tests.sampling.zoo import build


def run(way, net, x, *, per_row):
    inputs = as_inputs(x)
    plain, found = anatomy(net, inputs)
    randomness = Randomness(found, sampling.checked_keys(6, 1, "stratified"), per_row, False)
    own = view(plain, found.raised)
    leaves = inputs.padded_rows(0, inputs.n_rows, 1)
    with torch.no_grad():
        return BY_WAY[way](randomness, own, inputs, leaves, range(6), range(inputs.n_rows), inputs.n_rows)


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize(
    "name", ["functional_dropout", "dropout2d", "transformer_encoder", "lstm", "drop_connect", "gpt2"]
)
def test_all_ways_agree(name, per_row):
    net, x = build(name)
    results = {way: run(way, net, x, per_row=per_row) for way in BY_WAY}
    for way in BY_WAY:
        for ours, oracle in zip(results[way], results["one by one"], strict=True):
            torch.testing.assert_close(ours, oracle, rtol=1e-4, atol=1e-5, msg=way)


@pytest.mark.parametrize(
    "name, way",
    [
        ("functional_dropout", "mapped"),
        ("lstm", "mapped"),
        ("gpt2", "mapped"),
        ("drop_path_bernoulli", "mapped whole"),
        ("writes_into_a_buffer", "mapped whole"),
        ("in_place_result_ignored", "mapped whole"),
        ("branches_on_its_input", "row by row"),
        ("bert_sdpa", "row by row"),
        ("branches_on_its_mask", "one by one"),
    ],
)
def test_the_fastest_way_that_a_network_allows_is_taken(name, way):
    net, x = build(name)
    assert db.predict(net, x, n_draws=4, analytic=False).method == way


def test_what_does_not_depend_on_the_draw_is_computed_once():
    calls = []

    class Counted(nn.Linear):
        def forward(self, x):
            calls.append(x.shape)
            return super().forward(x)

    net = nn.Sequential(
        Counted(3, 4), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4, 4), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4, 1)
    )
    db.draws(net, torch.randn(2, 3), n_draws=50)
    assert len(calls) <= 2  # one look at the network, and one tile of all draws
