"""Tests of the variational recurrent layers: torch's numbers without dropout, one mask per sequence with it."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import dropbayes
from dropbayes.layers import Prior, kl_coefficients
from dropbayes.layers.recurrent import GRU, LSTM, RNN
from dropbayes.sampling import Sampling
from tests.cases import crossed

DTYPE = torch.float64
PAIRS = [(LSTM, nn.LSTM), (GRU, nn.GRU), (RNN, nn.RNN)]


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def flat(result):
    output, state = result
    return (output, *state) if isinstance(state, tuple) else (output, state)


@pytest.mark.parametrize(("ours", "torchs"), PAIRS)
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_without_dropout_and_in_evaluation_it_is_torchs(ours, torchs, batch_first, bidirectional, bias):
    setting = {"num_layers": 2, "batch_first": batch_first, "bidirectional": bidirectional, "bias": bias}
    reference = torchs(3, 4, **setting).to(DTYPE)
    x = torch.randn(5, 6, 3, dtype=DTYPE)
    rows = 5 if batch_first else 6
    h = torch.randn(4 if bidirectional else 2, rows, 4, dtype=DTYPE)
    hx = (h, torch.randn_like(h)) if torchs is nn.LSTM else h
    for drop_prob, mode in ((0.0, True), (0.4, False)):
        layer = ours(3, 4, drop_prob=drop_prob, **setting).to(DTYPE).train(mode)
        layer.load_state_dict(reference.state_dict())
        for arguments in ((x,), (x, hx)):
            for got, expected in zip(flat(layer(*arguments)), flat(reference(*arguments)), strict=True):
                torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(("ours", "torchs"), PAIRS)
def test_unbatched_sequences_are_torchs_too(ours, torchs):
    reference, layer, x = torchs(3, 4).to(DTYPE), ours(3, 4, drop_prob=0.0).to(DTYPE), torch.randn(5, 3, dtype=DTYPE)
    layer.load_state_dict(reference.state_dict())
    for got, expected in zip(flat(layer(x)), flat(reference(x)), strict=True):
        torch.testing.assert_close(got, expected)


class Masks(torch.overrides.TorchFunctionMode):
    """Records the outputs of F.dropout: the masks."""

    def __init__(self):
        self.found = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is F.dropout:
            self.found.append(out)
        return out


@pytest.mark.parametrize(("ours", "torchs"), PAIRS)
def test_a_draw_is_torchs_network_with_masked_weight_matrices(ours, torchs):
    """With its masks z fixed, row n computes what torch's layer computes with W = zM: the q(W) of the paper."""
    layer = ours(3, 4, drop_prob=0.4, recurrent_drop_prob=0.3, num_layers=2, batch_first=True).to(DTYPE)
    x = torch.randn(6, 5, 3, dtype=DTYPE)
    with Masks() as masks:
        output, _ = layer(x)
    input_0, state_0, input_1, state_1 = masks.found
    assert input_0.shape == (6, 1, 3) and state_0.shape == (6, 1, 4)  # one mask per sequence, no time axis
    assert {tuple(m.unique().tolist()) for m in (input_0, input_1)} == {(0.0, 1 / 0.6)}
    assert {tuple(m.unique().tolist()) for m in (state_0, state_1)} == {(0.0, 1 / 0.7)}
    assert not torch.equal(input_0[0], input_0[1]) or not torch.equal(state_0[0], state_0[1])
    for row in range(6):
        masked = torchs(3, 4, num_layers=2, batch_first=True).to(DTYPE)
        masked.load_state_dict(layer.state_dict())
        with torch.no_grad():
            masked.weight_ih_l0 *= input_0[row]
            masked.weight_hh_l0 *= state_0[row]
            masked.weight_ih_l1 *= input_1[row]
            masked.weight_hh_l1 *= state_1[row]
        torch.testing.assert_close(output[row], masked(x[row])[0])


def test_inputs_are_dropped_with_their_own_probability():
    layer = LSTM(500, 500, drop_prob=0.2, recurrent_drop_prob=0.7)
    with Masks() as masks:
        layer(torch.zeros(1, 12, 500))
    fractions = [(mask == 0).double().mean().item() for mask in masks.found]
    assert fractions == pytest.approx([0.2, 0.7], abs=4 * math.sqrt(0.25 / 6000))


def test_sequence_first_masks_keep_the_row_axis_in_place():
    with Masks() as masks:
        LSTM(3, 4, drop_prob=0.5)(torch.zeros(5, 6, 3))
    assert [tuple(mask.shape) for mask in masks.found] == [(1, 6, 3), (1, 6, 4)]


def test_weight_decay_follows_the_mask_of_each_matrix():
    layer = GRU(3, 4, drop_prob=0.2, recurrent_drop_prob=0.3)
    got = kl_coefficients(layer, prior=Prior(length_scale=2.0, bias_length_scale=0.5))
    expected = {"weight_ih_l0": 4 / 0.8, "weight_hh_l0": 4 / 0.7, "bias_ih_l0": 0.25, "bias_hh_l0": 0.25}
    assert got == pytest.approx(expected)


@pytest.mark.parametrize("ours", [LSTM, GRU])
def test_gradients_are_right(ours):
    layer = ours(2, 3, drop_prob=0.4).to(DTYPE)
    x = torch.randn(3, 2, 2, dtype=DTYPE, requires_grad=True)
    names, values = zip(*layer.named_parameters(), strict=True)

    def output(x, *parameters):
        torch.manual_seed(1)
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))[0]

    assert torch.autograd.gradcheck(output, (x, *values))


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match=r"`drop_prob` must lie in \[0, 1\)"):
        LSTM(2, 3, drop_prob=1.0)
    with pytest.raises(ValueError, match="`dropout` must be 0; got"):
        LSTM(2, 3, num_layers=2, dropout=0.5)
    with pytest.raises(TypeError, match="a tensor or a PackedSequence"):
        GRU(2, 3)([1.0])
    with pytest.raises(ValueError, match=r"`hx` must have shape \[\(1, 4, 3\)\]"):
        GRU(2, 3)(torch.zeros(5, 4, 2), torch.zeros(1, 1, 3))


@pytest.mark.parametrize(("ours", "torchs"), [(LSTM, nn.LSTM), (GRU, nn.GRU), (RNN, nn.RNN)])
@pytest.mark.parametrize("enforce_sorted", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_packed_sequences_are_torchs_without_dropout(ours, torchs, enforce_sorted, batch_first):
    setting = {"num_layers": 2, "bidirectional": True, "batch_first": batch_first}
    reference, layer = torchs(3, 4, **setting).to(DTYPE), ours(3, 4, drop_prob=0.0, **setting).to(DTYPE)
    layer.load_state_dict(reference.state_dict())
    lengths = [5, 3, 2, 1] if enforce_sorted else [2, 5, 1, 3]
    x = torch.randn(4, 5, 3, dtype=DTYPE) if batch_first else torch.randn(5, 4, 3, dtype=DTYPE)
    packed = pack_padded_sequence(x, lengths, batch_first=batch_first, enforce_sorted=enforce_sorted)
    (got, *got_states), (expected, *states) = flat(layer(packed)), flat(reference(packed))
    torch.testing.assert_close(got.data, expected.data)
    assert torch.equal(got.batch_sizes, expected.batch_sizes)
    for a, b in zip(got_states, states, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("ours", "torchs"), [(LSTM, nn.LSTM), (GRU, nn.GRU)])
def test_every_packed_sequence_has_masks_of_its_own_at_all_its_steps(ours, torchs):
    """Row by row, a draw is torch's layer with that row's masked weights, whatever the lengths of the others."""
    layer = ours(3, 4, drop_prob=0.4).to(DTYPE)
    lengths, x = [2, 5, 3], torch.randn(5, 3, 3, dtype=DTYPE)
    with Masks() as masks:
        output, _ = layer(pack_padded_sequence(x, lengths, enforce_sorted=False))
    padded, _ = pad_packed_sequence(output)
    inputs, states = (mask.squeeze(0) for mask in masks.found)
    assert len({tuple(row.tolist()) for row in torch.cat([inputs, states], -1)}) == 3
    for row, length in enumerate(lengths):
        masked = torchs(3, 4).to(DTYPE)
        masked.load_state_dict(layer.state_dict())
        with torch.no_grad():
            masked.weight_ih_l0 *= inputs[row]
            masked.weight_hh_l0 *= states[row]
        torch.testing.assert_close(padded[:length, row], masked(x[:length, row])[0])


@pytest.mark.parametrize(("ours", "batch_first"), crossed([LSTM, GRU], [True, False]))
def test_a_draw_is_one_function_of_the_sequence(ours, batch_first):
    """A row's result under a draw is the same beside other rows as alone: what `predict` means by a function."""
    layer = ours(3, 4, drop_prob=0.4, num_layers=2, batch_first=batch_first).to(DTYPE).eval()
    x = torch.randn(5, 5, 3, dtype=DTYPE)
    axis = 0 if batch_first else 1
    both = dropbayes.draws(layer, x, n_draws=8, seed=0, sampling=Sampling(row_axis=axis))[0]
    alone = dropbayes.draws(layer, x.narrow(axis, 2, 1), n_draws=8, seed=0, sampling=Sampling(row_axis=axis))[0]
    torch.testing.assert_close(both.narrow(axis + 1, 2, 1), alone)
    assert (both.std(0) > 0).all()
