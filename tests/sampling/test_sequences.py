"""Which axes hold positions: found by the lengths they take, confirmed, and refused by name."""

import pytest
import torch
from torch import nn

import dropbayes as db
from dropbayes.sampling.inputs import as_inputs
from dropbayes.sampling.inspection import inspect
from dropbayes.sampling.sequences import form, sequence_axes, sequence_lengths
from tests.sampling.sequence_models import sequence_model


def positions_of(net, x):
    """The axes that hold positions, with their sequences, of every site by name."""
    sites = inspect(net, as_inputs(x), positions=True).profile.sites
    return {site.name: [(place.axis, place.sequence) for place in site.positions] for site in sites}


def test_an_encoder_and_its_decoder_are_two_sequences():
    ids = torch.randint(3, 40, (2, 5))
    found = positions_of(
        sequence_model("bart"), {"input_ids": ids, "decoder_input_ids": ids[:, :4], "use_cache": False}
    )
    assert found["model.encoder.layers.0.self_attn attention 0"] == [(2, 0), (3, 0)]
    assert found["model.decoder.layers.0.self_attn attention 0"] == [(2, 1), (3, 1)]
    assert found["model.decoder.layers.0.encoder_attn attention 0"] == [(2, 1), (3, 0)]
    assert found["model.decoder.layers.1 dropout 1"] == [(1, 1)]


def test_a_site_has_its_name_whatever_else_runs():
    from transformers.modeling_outputs import BaseModelOutput

    net, ids = sequence_model("t5"), torch.randint(3, 40, (2, 5))
    whole = positions_of(net, {"input_ids": ids, "decoder_input_ids": ids, "use_cache": False})
    encoded = BaseModelOutput(last_hidden_state=torch.randn(2, 5, 32))
    half = positions_of(net, {"encoder_outputs": encoded, "decoder_input_ids": ids, "use_cache": False})
    assert 0 < len(half) < len(whole) and half.items() <= whole.items()


def test_an_input_as_long_as_the_network_takes_is_made_shorter_instead():
    net = sequence_model("gpt2")
    assert positions_of(net, {"input_ids": torch.randint(3, 40, (1, 64)), "use_cache": False})[
        "transformer.drop dropout 0"
    ] == [(1, 0)]


class Shared(nn.Module):
    """One dropout module in two places."""

    def __init__(self):
        super().__init__()
        dropout = nn.Dropout(0.5)
        self.first, self.second = nn.Sequential(nn.Identity(), dropout), nn.Sequential(dropout)

    def forward(self, x, with_first=True):
        return self.second(self.first(x) if with_first else x)


def test_a_module_in_two_places_has_two_names():
    x, net = torch.ones(2, 4, 8), Shared()
    both = positions_of(net, {"x": x, "with_first": True})
    one = positions_of(net, {"x": x, "with_first": False})
    assert len(both) == 2 and len(one) == 1 and one.items() <= both.items()


class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(x.mean(1))


def test_a_mask_that_does_not_grow_holds_no_positions():
    assert positions_of(Pooled(), torch.ones(2, 4, 8)) == {"dropout dropout 0": []}


class TimeFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.recurrence = nn.LSTM(8, 8, num_layers=2, dropout=0.5)

    def forward(self, x):
        return self.recurrence(x)[0]


def test_a_network_with_time_first_has_its_positions_first():
    inputs = as_inputs(torch.ones(4, 2, 8), row_axis=1)
    (site,) = inspect(TimeFirst(), inputs, positions=True).profile.sites
    assert [(place.axis, place.sequence) for place in site.positions] == [(0, 0)]


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(x)


class Experts(nn.Module):
    """A feed-forward layer on tokens of all rows in one list, as mixtures of experts have it."""

    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(x.flatten(0, 1)).unflatten(0, x.shape[:2])


@pytest.mark.parametrize("positions", ["tied", "per_position"])
def test_positions_are_found_in_a_flat_list_of_tokens(positions):
    x = torch.ones(3, 4, 8)
    flat, plain = (
        db.draws(net, x, n_draws=4, sampling=db.Sampling(positions=positions)) for net in (Experts(), Reader())
    )
    assert torch.equal(flat, plain)


class Loop(nn.Module):
    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        return torch.stack([self.dropout(x[:, n]) for n in range(x.shape[1])], 1)


class Pyramid(nn.Module):
    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(torch.cat([x, x], 1))


@pytest.mark.parametrize("net", [Loop(), Pyramid()], ids=lambda net: type(net).__name__)
def test_a_site_whose_positions_cannot_be_found_is_named(net):
    with pytest.raises(ValueError, match=r"`positions` cannot be found for .*dropout"):
        db.draws(net, torch.ones(2, 4, 8), n_draws=2, sampling=db.Sampling(positions="tied"))


def test_an_input_without_positions_is_refused():
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    with pytest.raises(ValueError, match="`positions` cannot be found: the network takes its input in no other length"):
        db.predict(net, torch.ones(3, 4), sampling=db.Sampling(positions="tied"))


def test_lengths_count_what_the_cache_holds():
    net, ids = sequence_model("gpt2"), torch.randint(3, 40, (2, 5))
    cache = net(ids, use_cache=True).past_key_values
    assert sequence_lengths(as_inputs({"input_ids": ids[:, :1], "past_key_values": cache})) == (6, 0, 0)


def test_a_form_tells_one_position_from_many_and_a_filled_cache_from_none():
    net, ids = sequence_model("gpt2"), torch.randint(3, 40, (2, 5))
    cache = net(ids, use_cache=True).past_key_values
    forms = [
        form(as_inputs({"input_ids": ids[:, :n], "past_key_values": past}))
        for n, past in ((5, None), (3, None), (1, None), (1, cache))
    ]
    assert forms[0] == forms[1] and len(set(forms)) == 3


def test_a_mask_of_four_axes_has_positions_of_queries_and_of_keys():
    inputs = as_inputs({"input_ids": torch.ones(2, 3, dtype=torch.long), "attention_mask": torch.ones(2, 1, 3, 3)})
    assert sequence_axes(inputs) == [((1, 0),), ((2, 0), (3, 0))]
