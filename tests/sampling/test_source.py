"""The keyed source gives a network the same masks by torch operations and by kernels, and notices other sites."""

import dataclasses

import pytest
import torch
from torch import nn

from dropbayes.sampling import Sampling
from dropbayes.sampling import source as sources
from dropbayes.sampling.inputs import as_inputs
from dropbayes.sampling.inspection import inspect
from dropbayes.sampling.kernels import kernels_on
from dropbayes.sampling.masks import Keys, keep_mask
from dropbayes.sampling.source import KeyedSource, MaskSpec, NetworkChanged, UnsupportedStrategy
from dropbayes.sampling.strategies import FOLDED, MAPPED, MAPPED_ROWS
from dropbayes.tracing import Interception, RowLayout, Site
from tests.sampling.test_strategies import run
from tests.sampling.zoo import build

CPU, KEYS, DRAWS, ROWS = torch.device("cpu"), Keys(7, 10), range(2, 5), RowLayout(0, 1)


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("strategy", [FOLDED, MAPPED], ids=str)
@pytest.mark.parametrize("name", ["dropout2d", "transformer_encoder", "lstm", "drop_path_rand"])
@pytest.mark.slow
def test_kernels_give_every_strategy_the_same_masks(name, strategy, per_row, monkeypatch):
    kernels = kernels_on(torch.device("cuda"))
    if kernels is None or torch.cuda.is_available():
        pytest.skip("needs Triton's interpreter, which runs where Triton is installed and no GPU is")
    net, x = build(name)
    expected = run(strategy, net, x, per_row=per_row)
    monkeypatch.setattr(sources, "kernels_on", lambda device: kernels)
    for ours, other in zip(run(strategy, net, x, per_row=per_row), expected, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-4, atol=1e-5)


def test_other_sites_than_were_inspected_are_noticed():
    net, x = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.3), nn.LayerNorm(4)), torch.randn(2, 3)
    masks = MaskSpec(inspect(net, as_inputs(x)).profile, Sampling().keys(4, 0), False)
    others = {
        "another": nn.Dropout(0.4),
        "one more": nn.Sequential(nn.Dropout(0.3), nn.Dropout(0.3)),
        "none": nn.Identity(),
    }
    for other in others.values():
        source = KeyedSource(masks, range(4), range(2), folded=True)
        with pytest.raises(NetworkChanged):
            with Interception(source):
                outputs = other.train()(torch.ones(8, 4))
            source.finish([outputs])


def spec_of(*sites, keys=KEYS, per_row=False, **options):
    """The masks of a network with these sites, each `[row, 3]`."""
    profile = dataclasses.replace(inspect(nn.Dropout(0.3), as_inputs(torch.ones(2, 3))).profile, sites=sites)
    return MaskSpec(profile, keys, per_row, **options)


def site(index=0, kind="dropout", drop_prob=0.3, layout=ROWS, **options):
    return Site(index, "", kind, drop_prob, (1, 3), layout=layout, number=index, **options)


def expected_mask(per_row, draws=DRAWS, rows=range(4, 6)):
    """The masks of the definition, `[draw, row, 3]`."""
    mask = keep_mask(KEYS, 0, drop_prob=0.3, draws=draws, rows=rows if per_row else None, shape=(1, 3),
                     dtype=torch.float32, device=CPU)  # fmt: skip
    return mask.reshape(len(draws), -1, 3).expand(len(draws), len(rows), 3)


@pytest.mark.parametrize("per_row", [False, True])
def test_draws_folded_into_the_rows_have_the_masks_of_the_definition(per_row):
    source = KeyedSource(spec_of(site(), per_row=per_row), DRAWS, range(4, 6), folded=True)
    mask = source.keep("dropout", 0.3, (6, 3), torch.ones(6, 3))
    assert torch.equal(mask.view(3, 2, 3), expected_mask(per_row))


@pytest.mark.parametrize("per_row", [False, True])
def test_dropout_is_the_product_with_the_mask(per_row):
    x = torch.randn(6, 3)
    source = KeyedSource(spec_of(site(), per_row=per_row), DRAWS, range(4, 6), folded=True)
    dropped = source.dropout("dropout", x, 0.3, (6, 3), False)
    torch.testing.assert_close(dropped, x * expected_mask(per_row).reshape(6, 3) / 0.7)


@pytest.mark.parametrize("rows_mapped", [False, True])
@pytest.mark.parametrize("per_row", [False, True])
def test_draws_and_rows_that_are_mapped_over_have_the_same_masks(per_row, rows_mapped):
    strategy = MAPPED_ROWS if rows_mapped else MAPPED
    net, x = nn.Sequential(nn.Dropout(0.3)), torch.ones(5, 3)
    masked = run(strategy, net, x, per_row=per_row)[0]
    assert torch.equal(masked, run(FOLDED, net, x, per_row=per_row)[0]) and (masked == 0).any()


def test_an_in_place_dropout_writes_into_its_input():
    x = torch.ones(6, 3)
    source = KeyedSource(spec_of(site()), DRAWS, range(4, 6), folded=True)
    assert source.dropout("dropout", x, 0.3, (6, 3), True) is x and (x == 0).any()


@pytest.mark.parametrize(
    ("layout", "shape", "options"),
    [
        (None, (6, 3), {"folded": True}),  # several draws, and no axis for them
        (RowLayout(5, 1), (6, 3), {"folded": True}),
        (RowLayout(0, 1), (7, 3), {"folded": True}),  # not a multiple of draws and rows
        (RowLayout(0, 0), (2, 3), {"folded": True}),  # some of the rows
    ],
)
def test_masks_that_a_strategy_cannot_place_are_refused(layout, shape, options):
    source = KeyedSource(spec_of(site(layout=layout)), DRAWS, range(4, 6), **options)
    with pytest.raises(UnsupportedStrategy):
        source.keep("dropout", 0.3, shape, torch.ones(shape))


def test_a_row_alone_may_meet_other_sites():
    source = KeyedSource(spec_of(site()), range(1), range(1), folded=True)
    source.keep("dropout", 0.3, (1, 3), torch.ones(1, 3))
    assert source.keep("dropout", 0.5, (1, 4), torch.ones(1, 4)).shape == (1, 4)
    assert source.finish([torch.ones(1)])


def test_a_single_uniform_is_keyed_to_the_draw_and_shared_by_rows():
    sites = spec_of(dataclasses.replace(site(kind="rand", drop_prob=None, layout=None), shape=()))
    numbers = [
        float(KeyedSource(sites, range(draw, draw + 1), range(3), folded=True).uniform("rand", None, (), CPU))
        for draw in range(5)
    ]
    assert len(set(numbers)) == 5 and all(0 < number < 1 for number in numbers)


def mask_of_a_trial(draws, n_units):
    source = KeyedSource(spec_of(site(), per_row=True, trial=True), draws, range(4, 6), folded=True)
    shape = (2 * len(draws), n_units)
    return source.keep("dropout", 0.3, shape, torch.ones(shape)) / 0.7  # as dropout does


def test_the_masks_of_a_trial_differ_in_every_unit_draw_and_row():
    mask = mask_of_a_trial(range(2), 3)
    assert len(mask.unique()) == mask.numel() and mask.abs().min() > 0.5 and mask.abs().max() < 1.5
    assert mask.min() < 0 < mask.max()  # a sign is seen where a non-linearity saturates


def test_few_units_are_dropped_under_further_draws_of_a_trial_and_some_of_many_under_every_draw():
    few, many = mask_of_a_trial(range(2, 5), 3), mask_of_a_trial(range(2), 40)
    assert few.unique().tolist() == [0, 1] and many[many >= 0].unique()[0] == 0
    assert ((many == 0).any(1) & (many == 1).any(1)).all() and len(many.unique()) > many.numel() / 2


def test_an_integrated_layer_gives_mean_and_variance():
    net, x = nn.Sequential(nn.Dropout(0.25), nn.Linear(3, 2)), torch.randn(2, 3)
    profile = inspect(net, as_inputs(x)).profile
    source = KeyedSource(MaskSpec(profile, KEYS, False, integrate=True), range(1), range(2), folded=True)
    with torch.no_grad(), Interception(source):
        output = net.train()(x)
    mean, variance = source.finish([output])
    torch.testing.assert_close(mean, net.eval()(x).detach())
    torch.testing.assert_close(variance, (x.square() @ net[1].weight.square().t()).detach() * 0.25 / 0.75)
    with pytest.raises(NetworkChanged, match="not the network's"):
        source.finish([output + 0])
