"""The prepared draws of a perceptron: the same bits in any batch, and never another network's."""

import copy

import pytest
import torch
from torch import nn

import dropbayes as db
from dropbayes.sampling import perceptron as sequential
from dropbayes.training import EarlyStopping
from tests.sampling.test_perceptron import NETS, pair


@pytest.mark.parametrize("products_agree", [True, False])
@pytest.mark.parametrize("name", NETS)
def test_a_row_has_the_same_bits_in_batches_of_any_size(name, products_agree, monkeypatch):
    # Where products of several sizes do not agree, rows are padded to blocks of one size instead.
    if not products_agree:
        monkeypatch.setattr(sequential, "_sizes_agree", lambda *_: False)
    net, general = pair(name)
    x = torch.randn(203, 3)
    whole = db.predict(net, x, n_draws=30)
    for size in (1, 2, 3, 5, 17, 36, 64, 100, 131):
        part = db.predict(net, x[:size], n_draws=30)
        last = db.predict(net, x[-size:], n_draws=30)
        assert torch.equal(part.mean, whole.mean[:size]) and torch.equal(part.epistemic, whole.epistemic[:size])
        assert torch.equal(last.mean, whole.mean[-size:]) and torch.equal(last.epistemic, whole.epistemic[-size:])
    torch.testing.assert_close(whole.variance, db.predict(general, x, n_draws=30).variance)


@pytest.mark.parametrize("masks", ["shared", "row"])
def test_a_row_in_float64_has_the_same_bits_in_batches_of_any_size(masks):
    net, _ = pair("input and hidden")
    net, x = copy.deepcopy(net).double(), torch.randn(90, 3, dtype=torch.float64)
    whole = db.predict(net, x, n_draws=40, masks=masks)
    for size in (1, 2, 37):
        part = db.predict(net, x[:size], n_draws=40, masks=masks)
        assert torch.equal(part.mean, whole.mean[:size]) and torch.equal(part.epistemic, whole.epistemic[:size])


@pytest.mark.parametrize(("n_outputs", "n_draws", "masks"), [(1, 50, "shared"), (2, 100, "row"), (100, 100, "row")])
@pytest.mark.parametrize("products_agree", [True, False])
def test_a_row_of_a_wide_network_has_the_same_bits_wherever_it_stands(
    n_outputs, n_draws, masks, products_agree, monkeypatch
):
    if not products_agree:
        monkeypatch.setattr(sequential, "_sizes_agree", lambda *_: False)
    torch.manual_seed(0)
    hidden = nn.Linear(5, 320), nn.ReLU(), nn.Dropout(0.1), nn.Linear(320, 320), nn.ReLU(), nn.Dropout(0.1)
    net, x = nn.Sequential(*hidden, nn.Linear(320, n_outputs)).eval(), torch.randn(12, 5)
    whole = db.predict(net, x, n_draws=n_draws, masks=masks)
    for row in range(12):
        sampling = db.Sampling(row_offset=row if masks == "row" else 0)
        alone = db.predict(net, x[row : row + 1], n_draws=n_draws, masks=masks, sampling=sampling)
        assert torch.equal(alone.mean[0], whole.mean[row]) and torch.equal(alone.epistemic[0], whole.epistemic[row])


def test_many_rows_have_larger_products_with_the_bits_of_a_row_alone(monkeypatch):
    monkeypatch.setattr(sequential, "_TESTED_OPERATIONS", 1e5)
    torch.manual_seed(0)
    hidden = nn.Linear(5, 320), nn.ReLU(), nn.Dropout(0.1), nn.Linear(320, 320), nn.ReLU(), nn.Dropout(0.1)
    net, x = nn.Sequential(*hidden, nn.Linear(320, 1)).eval(), torch.randn(140, 5)
    whole = db.predict(net, x, n_draws=100, masks="row")
    for row in (0, 1, 63, 64, 139):
        alone = db.predict(net, x[row : row + 1], n_draws=100, masks="row", sampling=db.Sampling(row_offset=row))
        assert torch.equal(alone.mean[0], whole.mean[row]) and torch.equal(alone.epistemic[0], whole.epistemic[row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("activation", [nn.ELU, nn.GELU, nn.Mish, nn.Sigmoid, nn.SiLU, nn.Softplus])
def test_a_row_has_the_same_bits_wherever_its_units_lie_among_those_of_a_batch(activation, dtype):
    # torch rounds the units after the last whole vector by other code: 7 and 13 units shift them with every row.
    torch.manual_seed(0)
    layers = nn.Linear(3, 13), activation(), nn.Dropout(0.2), nn.Linear(13, 7), activation(), nn.Dropout(0.2)
    net, x = nn.Sequential(*layers, nn.Linear(7, 2)).to(dtype), torch.randn(70, 3, dtype=dtype)
    for n_draws in (3, 11):
        whole = db.draws(net, x, n_draws=n_draws)
        for first in (0, 1, 6):
            for size in (1, 2, 3, 5, 8, 17):
                part = db.draws(net, x[first : first + size], n_draws=n_draws)
                assert torch.equal(part, whole[:, first : first + size])


def test_a_bias_is_not_taken_for_the_weight_of_the_next_layer():
    # The values of the weights, in order, are those of both networks.
    first = nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 1), nn.ReLU(), nn.Linear(1, 1, bias=False))
    second = nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 1, bias=False), nn.ReLU(), nn.Linear(1, 1))
    for net in (first, second):
        for parameter in net.parameters():
            nn.init.constant_(parameter, 3.0)
    x = torch.ones(1, 2)
    expected = {first: 3 * (6 + 3), second: 3 * 6 + 3}  # the masks have mean 1 and ReLU of a positive number is linear
    for net, value in expected.items():
        assert float(db.predict(net, x, n_draws=2000).mean) == pytest.approx(value, rel=0.01)


def test_products_that_sum_in_another_order_are_noticed(monkeypatch):
    affine = sequential._affine

    def reordered(x, weight, bias):  # the small sizes sum from the last feature to the first
        if len(x) > 8:
            return affine(x, weight, bias)
        return sum(x[:, [k]] * weight[[k]] for k in reversed(range(len(weight)))) + (0 if bias is None else bias)

    weight = torch.randn(24, 3)
    sequential._sizes_agree.cache_clear()
    monkeypatch.setattr(sequential, "_affine", reordered)
    assert not sequential._sizes_agree((24, 3), weight.stride(), weight.dtype, 1, (64, 16, 4), 1)
    sequential._sizes_agree.cache_clear()


@pytest.mark.parametrize("masks", ["shared", "row"])
@pytest.mark.parametrize("n_outputs", [1, 3])
def test_a_network_changed_in_place_lends_its_numbers_to_no_copy(masks, n_outputs):
    net = nn.Sequential(nn.Linear(2, 20), nn.ReLU(), nn.Dropout(0.1), nn.Linear(20, n_outputs)).eval()
    x = torch.randn(5, 2)
    before, snapshot = db.predict(net, x, n_draws=8, masks=masks), copy.deepcopy(net)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(10.0)
    assert torch.equal(db.predict(snapshot, x, n_draws=8, masks=masks).mean, before.mean)
    assert not torch.equal(db.predict(net, x, n_draws=8, masks=masks).mean, before.mean)


def test_the_same_fit_three_times_in_one_process_gives_the_same_weights():
    x = torch.linspace(-1, 1, 60)[:, None]
    y = torch.sin(3 * x) + 0.1 * torch.randn(60, 1, generator=torch.Generator().manual_seed(0))
    states = []
    for _ in range(3):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(1, 20), nn.ReLU(), nn.Dropout(0.1), nn.Linear(20, 1))
        db.fit(
            net,
            x[:40],
            y[:40],
            likelihood=db.Gaussian(10.0),
            epochs=12,
            seed=0,
            stopping=EarlyStopping((x[40:], y[40:]), patience=3),
        )
        states.append(torch.cat([p.detach().flatten() for p in net.parameters()]))
    assert torch.equal(states[0], states[1]) and torch.equal(states[0], states[2])
