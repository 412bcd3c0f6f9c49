"""Keyed masks: exact in law for every draw, and the same however the work is cut."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

import dropbayes as db
from dropbayes.sampling import masks
from dropbayes.sampling.masks import Keys, Units, keep_mask, uniform

CPU = torch.device("cpu")


def mask(keys, site=0, drop_prob=0.3, draws=None, rows=None, shape=(5,)):
    draws = range(keys.n_draws) if draws is None else draws
    return keep_mask(
        keys, site, drop_prob=drop_prob, draws=draws, rows=rows, shape=shape, dtype=torch.float32, device=CPU
    )


@pytest.mark.parametrize("sampler", masks.SAMPLERS)
@pytest.mark.parametrize("rows", [None, range(7)])
def test_masks_do_not_depend_on_how_draws_and_rows_are_cut(sampler, rows):
    keys = Keys(3, 20, sampler)
    whole = mask(keys, rows=rows, shape=(2, 3))
    parts = torch.cat([mask(keys, draws=range(a, b), rows=rows, shape=(2, 3)) for a, b in ((0, 1), (1, 13), (13, 20))])
    assert torch.equal(whole, parts)
    if rows is not None:
        blocks = [mask(keys, rows=range(a, b), shape=(2, 3)) for a, b in ((0, 2), (2, 3), (3, 7))]
        assert torch.equal(whole, torch.cat(blocks, dim=1))


@pytest.mark.parametrize("rows", [None, range(2)])
def test_units_are_hashed_once_for_all_draws_of_a_site(monkeypatch, rows):
    keys, hashed, hash_numbers = Keys(41 if rows is None else 42, 30), [], masks._hash_numbers
    monkeypatch.setattr(masks, "_hash_numbers", lambda key, n: hashed.append(len(n)) or hash_numbers(key, n))
    for first in range(0, 30, 10):
        mask(keys, draws=range(first, first + 10), rows=rows, shape=(9, 11))
    assert hashed.count(99) == 1


def test_first_independent_draws_do_not_depend_on_how_many_follow():
    few, many = mask(Keys(1, 50, "independent")), mask(Keys(1, 100, "independent"))
    assert torch.equal(few, many[:50])


def test_seeds_sites_and_replicates_give_different_masks():
    shape = (64,)
    base = mask(Keys(0, 10), shape=shape)
    others = [
        mask(Keys(1, 10), shape=shape),
        mask(Keys(0, 10), site=1, shape=shape),
        mask(Keys(0, 10, replicate=1), shape=shape),
    ]
    for other in others:
        agreement = float((base == other).double().mean())
        assert abs(agreement - (0.7**2 + 0.3**2)) < 0.1


@pytest.mark.parametrize("drop_prob", [0.005, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("sampler", masks.SAMPLERS)
def test_every_draw_is_marginally_bernoulli_over_seeds(sampler, drop_prob):
    # Draw 0 and draw 7 of many seeds: the number of zeros must be binomial.
    zeros = np.array([(mask(Keys(seed, 10, sampler), drop_prob=drop_prob, shape=(64,))[[0, 7]] == 0).sum(1).numpy()
                      for seed in range(400)])  # fmt: skip
    for column in zeros.T:
        total = int(column.sum())
        assert stats.binomtest(total, 400 * 64, drop_prob).pvalue > 1e-4
        spread = column.var(ddof=1) / (64 * drop_prob * (1 - drop_prob))  # (n-1)·spread is nearly chi-square(n-1)
        assert abs(spread - 1) < 5 * math.sqrt(2 / 399)


@pytest.mark.parametrize("sampler", masks.SAMPLERS)
def test_units_are_independent_in_pairs_within_a_draw(sampler):
    drop_prob, seeds, units = 0.3, 1500, 6
    draws = torch.stack([mask(Keys(seed, 9, sampler), drop_prob=drop_prob, shape=(units,))[4] for seed in range(seeds)])
    dropped = (draws == 0).numpy()
    for a in range(units):
        for b in range(a):
            table = np.array([[np.sum((dropped[:, a] == i) & (dropped[:, b] == j)) for j in (0, 1)] for i in (0, 1)])
            probabilities = np.outer([1 - drop_prob, drop_prob], [1 - drop_prob, drop_prob])
            assert stats.chisquare(table.ravel(), seeds * probabilities.ravel()).pvalue > 1e-5


def test_rows_with_masks_of_their_own_are_independent_within_a_draw():
    drop_prob, seeds = 0.3, 1500
    draws = np.stack(
        [(mask(Keys(s, 9), rows=range(2), drop_prob=drop_prob, shape=(1,))[4] == 0).numpy() for s in range(seeds)]
    )
    both = int((draws[:, 0, 0] & draws[:, 1, 0]).sum())
    assert stats.binomtest(both, seeds, drop_prob**2).pvalue > 1e-4


@pytest.mark.parametrize("units", [None, Units((4,), (0,), (7,))])
def test_rows_with_masks_of_their_own_are_uncorrelated_over_the_draws_of_one_seed(units):
    """Rows that share the lattice of a unit correlate by about .5 in the mean, however many draws there are."""
    keys, rows, shape = Keys(seed=3, n_draws=2000), range(40), (4,)
    masks = keep_mask(
        keys, 0, drop_prob=0.5, draws=range(2000), rows=rows, shape=shape, dtype=torch.float64, device=CPU, units=units
    )
    correlations = torch.stack([masks[..., unit].T.corrcoef() for unit in range(4)])
    apart = correlations[:, *torch.triu_indices(40, 40, 1)].abs()
    assert apart.mean() == pytest.approx((2 / np.pi / 2000) ** 0.5, rel=0.15)  # of independent masks
    assert apart.max() < 5 / 2000**0.5


@pytest.mark.parametrize("drop_prob", [0.05, 0.3, 0.5])
def test_stratified_units_are_dropped_as_evenly_as_integers_allow(drop_prob):
    dropped = (mask(Keys(5, 100), drop_prob=drop_prob, shape=(200,)) == 0).sum(0)
    assert ((dropped - 100 * drop_prob).abs() < 1 + 1e-6).all()


@pytest.mark.slow
def test_drop_probabilities_are_not_rounded_to_sixteen_bits():
    # 0.4 of the spacing 1/65536: rounding to it would drop nothing.
    drop_prob = 0.4 / 65536
    draws, units = 64, 2**19
    count = int((mask(Keys(0, draws, "independent"), drop_prob=drop_prob, shape=(units,)) == 0).sum())
    expected = draws * units * drop_prob  # about 205
    assert abs(count - expected) < 5 * math.sqrt(expected)
    stratified = int((mask(Keys(0, draws), drop_prob=drop_prob, shape=(units,)) == 0).sum())
    assert abs(stratified - expected) < 5 * math.sqrt(expected)


@pytest.mark.parametrize("drop_prob", [1e-6, 1 - 1e-6])
def test_extreme_drop_probabilities_stay_masks(drop_prob):
    values = mask(Keys(0, 50), drop_prob=drop_prob, shape=(1000,))
    assert abs(float(values.mean()) - (1 - drop_prob)) < 1e-3


@pytest.mark.parametrize("sampler", masks.SAMPLERS)
def test_uniforms_are_uniform(sampler):
    values = uniform(Keys(2, 5, sampler), 1, draws=range(5), rows=range(40), shape=(50,), device=CPU)
    assert values.shape == (5, 40, 50)
    assert ((values > 0) & (values < 1)).all()
    assert stats.kstest(values[3].flatten().numpy(), "uniform").pvalue > 1e-3


def test_hash_is_splitmix64():
    # The first outputs of SplitMix64 seeded with 1234567, as published with its reference implementation.
    state, expected = 1234567, [6457827717110365317, 3203168211198807973, 9817491932198370423]
    ours = masks._hash(state, 1, 4, CPU).numpy().view(np.uint64).tolist()
    assert ours == expected


def test_torch_and_numpy_hash_the_same_words():
    key = masks.fold(7, 3)
    plain = masks._hash(key, 5, 105, CPU)
    words = torch.arange(5, 105) * masks.as_signed(masks._INCREMENT) + masks.as_signed(key)
    for shift, multiplier in masks._ROUNDS:
        words = (words ^ masks._shift_right(words, shift)) * masks.as_signed(multiplier)
    assert torch.equal(plain, words ^ masks._shift_right(words, 31))


@pytest.mark.parametrize("rows", [None, range(2)])
def test_cached_masks_are_used_again_until_others_need_their_memory(monkeypatch, rows):
    monkeypatch.setattr(masks, "kept", masks._Kept())
    monkeypatch.setattr(masks, "_CACHED_BYTES", 3 * 20 * 100 * 4)
    first = mask(Keys(0, 20), rows=rows, shape=(100,))
    assert mask(Keys(0, 20), rows=rows, shape=(100,)) is first
    for seed in range(1, 9):
        mask(Keys(seed, 20), rows=rows, shape=(100,))
    assert masks.kept._bytes <= masks._CACHED_BYTES
    again = mask(Keys(0, 20), rows=rows, shape=(100,))
    assert again is not first and torch.equal(again, first)


def test_a_network_that_works_in_place_leaves_the_cached_masks_as_they_are(monkeypatch):
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), torch.nn.Dropout2d(0.5, inplace=True), torch.nn.ReLU(True))
    x = torch.randn(3, 3, 5, 5)
    first = db.draws(net, x, n_draws=20)
    assert torch.equal(db.draws(net, x, n_draws=20), first)
    monkeypatch.setattr(masks, "kept", masks._Kept())
    assert torch.equal(db.draws(net, x, n_draws=20), first)


@pytest.mark.parametrize("shape", [(0, 6), (1, 1)])
@pytest.mark.parametrize("by_position", [False, True])
def test_sites_of_no_unit_and_of_one_have_masks(shape, by_position):
    units = Units(shape, (0,), (3,)) if by_position else None
    spec = {"drop_prob": 0.5, "draws": range(4), "rows": None, "dtype": torch.float32, "device": CPU}
    assert keep_mask(Keys(0, 4), 1, shape=shape, units=units, **spec).shape == (4, *shape)


@pytest.mark.parametrize("sampler", masks.SAMPLERS)
@pytest.mark.parametrize("shape", [(5,), (2**17 + 3,)])  # the second is made in parts
def test_masks_of_some_draws_are_those_among_all(sampler, shape):
    keys, some = Keys(3, 20, sampler), (1, 2, 7, 19)
    whole = mask(keys, shape=shape)
    assert torch.equal(mask(keys, draws=some, shape=shape), whole[list(some)])
    assert torch.equal(torch.cat([mask(keys, draws=range(t, t + 1), shape=shape) for t in range(20)]), whole)
