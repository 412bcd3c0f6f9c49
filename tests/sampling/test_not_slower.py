"""How many passes a prediction takes: those of its draws and few more, whatever the network looks like.

A network notes the rows of each of its passes. Few passes of few rows are as bad as many: both are counted.
"""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import dropbayes as db
from dropbayes.sampling import masks, source
from dropbayes.tracing.entries import RowsOfEntries
from dropbayes.tracing.transforms import is_batched
from tests.cases import crossed, slow_except
from tests.sampling.loop import assert_law, assert_same_alone, cut, made, unchanged

PASSES: list[int] = []


class Noted(nn.Module):
    """A network that notes the rows of its passes; `mapped` draws are one pass."""

    def __init__(self, function, **children):
        super().__init__()
        self.function = function
        for name, child in children.items():
            setattr(self, name, child)

    def forward(self, x, *others):
        PASSES.append(x.shape[0])
        return self.function(self, x, *others)


def passes(act):
    """The number of calls of the network, and the rows that went through it."""
    PASSES.clear()
    act()
    return len(PASSES), sum(PASSES)


# Draw by draw ---------------------------------------------------------------------------------------------------------

GATES = {
    "torch.rand([])": lambda: torch.rand([]) < 0.3,
    "torch.rand(1)": lambda: torch.rand(1) < 0.3,
    "bernoulli": lambda: torch.empty(1).bernoulli_(0.3).item() == 1,
    "NumPy's": lambda: np.random.rand() < 0.3,
    "Python's": lambda: random.random() < 0.3,
}


def skipped_once(gate):
    def function(self, x):
        h = torch.tanh(self.a(x))
        return self.o(h if self.training and gate() else self.d(h))

    return Noted(function, a=nn.Linear(8, 8), d=nn.Dropout(0.1), o=nn.Linear(8, 2)), torch.randn(64, 8)


def skipped(gate):
    def function(self, x):
        for layer in self.layers:
            if self.training and gate():
                continue
            x = x + self.d(torch.tanh(layer(x)))
        return self.o(x)

    layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
    return Noted(function, layers=layers, d=nn.Dropout(0.1), o=nn.Linear(8, 2)), torch.randn(64, 8)


def batch_depth():
    def function(self, x):
        h = torch.tanh(self.a(x))
        if self.training:
            h = h * torch.empty(1, 1).bernoulli_(0.8).div_(0.8)
        return self.o(self.d(h + x))

    return Noted(function, a=nn.Linear(8, 8), d=nn.Dropout(0.1), o=nn.Linear(8, 2)), torch.randn(64, 8)


def dropped_weights():
    def function(self, x):
        return self.o(torch.tanh(nn.functional.linear(x, nn.functional.dropout(self.w, 0.3, self.training))))

    return Noted(function, w=nn.Parameter(torch.randn(8, 8)), o=nn.Linear(8, 2)), torch.randn(64, 8)


def siamese():
    def function(self, a, b):
        one, two = self.o(self.d(torch.relu(self.a(torch.cat([a, b]))))).chunk(2)
        return (one - two).square().sum(-1)

    net = Noted(function, a=nn.Linear(8, 16), d=nn.Dropout(0.3), o=nn.Linear(16, 4))
    return net, (torch.randn(64, 8), torch.randn(64, 8))


def packed():
    def function(self, x, lengths):
        return self.o(self.l(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))[1][0][-1])

    net = Noted(function, l=nn.LSTM(5, 8, 2, dropout=0.4, batch_first=True), o=nn.Linear(8, 1))
    return net, (torch.randn(64, 6, 5), torch.randint(2, 7, (64,)))


def packed_after_dropout():
    def function(self, x, lengths):
        steps = pack_padded_sequence(self.d(x), lengths, batch_first=True, enforce_sorted=False)
        return self.o(self.l(steps)[1][0][-1])

    net = Noted(function, d=nn.Dropout(0.2), l=nn.LSTM(5, 8, batch_first=True), o=nn.Linear(8, 1))
    return net, (torch.randn(64, 6, 5), torch.randint(2, 7, (64,)))


def experts(n=3, *, skips=False, noise=0.0):
    def function(self, x):
        chosen, out = self.gate(self.d(x)).argmax(-1), x.new_zeros(len(x), 2)
        for i, expert in enumerate(self.experts):
            where = (chosen == i).nonzero()[:, 0]
            if where.numel() or not skips:
                out = out.index_add(0, where, expert(x[where]))
        return out

    made_of = (nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 2)) for _ in range(n))
    gate, d = nn.Linear(8, n), nn.Dropout(noise)
    return Noted(function, gate=gate, d=d, experts=nn.ModuleList(made_of)), torch.randn(64, 8)


def experts_skipped():
    return experts(12, skips=True)


def experts_met_by_chance():
    return experts(6, skips=True, noise=0.2)


def experts_with_any():
    """Each takes the rows of its mask, if it has any; dropout is before the gate, too."""

    def function(self, x):
        h = self.d(x)
        chosen, out = self.gate(h).argmax(-1), x.new_zeros(len(x), 2)
        for i, expert in enumerate(self.experts):
            mine = chosen == i
            if mine.any():
                out[mine] = expert(h[mine])
        return out

    made_of = (nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 2)) for _ in range(3))
    return Noted(function, gate=nn.Linear(8, 3), d=nn.Dropout(0.2), experts=nn.ModuleList(made_of)), torch.randn(64, 8)


def experts_that_are_hit():
    """Those alone run that are among the best two of any row."""

    def function(self, x):
        weight, chosen = self.gate(self.d(x)).softmax(-1).topk(2)
        places, out = nn.functional.one_hot(chosen, len(self.experts)).permute(2, 1, 0), x.new_zeros(len(x), 2)
        for i in (places.sum((1, 2)) > 0).nonzero():
            rank, row = torch.where(places[i[0]])
            out = out.index_add(0, row, self.experts[i[0]](x[row]) * weight[row, rank, None])
        return out

    made_of = (nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 2)) for _ in range(4))
    return Noted(function, gate=nn.Linear(8, 4), d=nn.Dropout(0.2), experts=nn.ModuleList(made_of)), torch.randn(64, 8)


def marked():
    """The last token of each row that is marked, as BART takes the state at the end of a text."""

    def function(self, x):
        selected = self.d(torch.tanh(self.a(x)))[x[..., 0] > 0]
        if selected.shape[0] % x.shape[0]:
            raise ValueError("every row must have as many marked tokens")
        return self.o(selected.view(x.shape[0], -1, 8)[:, -1])

    x = torch.randn(64, 5, 8)
    x[..., 0] = -1.0
    x[torch.arange(64), torch.arange(64) % 5, 0] = 1.0
    return Noted(function, a=nn.Linear(8, 8), d=nn.Dropout(0.1), o=nn.Linear(8, 2)), x


def micro_batches(size=16):
    def function(self, x):
        return torch.cat([self.o(self.d(torch.relu(self.a(part)))) for part in x.split(size)])

    return Noted(function, a=nn.Linear(8, 16), d=nn.Dropout(0.3), o=nn.Linear(16, 2)), torch.randn(64, 8)


def a_drop_probability_by_chance():
    def function(self, x):
        p = 0.5 * float(torch.rand(())) if self.training else 0.0
        return self.o(nn.functional.dropout(torch.relu(self.a(x)), p))

    return Noted(function, a=nn.Linear(8, 512), o=nn.Linear(512, 2)), torch.randn(64, 8)


NETWORKS = {f"layers skipped by {name}": lambda gate=gate: skipped(gate) for name, gate in GATES.items()} | {
    f.__name__: f for f in (batch_depth, dropped_weights, siamese, packed, packed_after_dropout, experts, experts_with_any,
                       experts_that_are_hit, marked, micro_batches, a_drop_probability_by_chance)
}  # fmt: skip


@pytest.mark.parametrize("name", NETWORKS)
def test_a_prediction_takes_the_passes_of_its_draws_and_few_more(name):
    net, x = made(NETWORKS[name])
    first = 30 if name == "experts_that_are_hit" else 15  # which learns the sites of an expert when it meets it
    for few in (first, 2):  # of the first call, of the second
        calls, rows = passes(lambda few=few: db.predict(net, x, n_draws=30, seed=few))
        most = 30 * 1.3 + few
        assert calls <= most and rows <= 64 * most, (few, calls, rows / 64)


def test_sorted_rows_are_followed_only_where_their_masks_may_differ(monkeypatch):
    net, x = made(packed)
    db.predict(net, x, n_draws=30)
    followed = []
    monkeypatch.setattr(RowsOfEntries, "follow", lambda *call: followed.append(call))
    db.predict(net, x, n_draws=30, seed=1)
    assert not followed


@pytest.mark.parametrize("make", [experts_with_any, experts_that_are_hit])
def test_experts_that_are_asked_which_have_rows_have_the_law_of_the_loop(make):
    net, x = made(make)
    assert_law(net, x[:6], n_draws=150)
    assert_same_alone(net, x[:20], rows=(0, 19))


def test_rows_that_are_cut_into_fours_go_by_fours_from_the_second_call_on():
    net, x = made(lambda: micro_batches(size=4))
    db.predict(net, x, n_draws=30)
    calls, rows = passes(lambda: db.predict(net, x, n_draws=30, seed=1))
    assert calls <= 16 * 1.3 and rows <= 30 * 64 * 1.3, (calls, rows)


def test_tokens_that_the_rows_mark_run_with_all_draws_at_once():
    net, x = made(marked)
    db.predict(net, x, n_draws=30)
    assert passes(lambda: db.predict(net, x, n_draws=30, seed=1))[0] <= 5
    assert_law(net, x[:6], n_draws=150)
    assert_same_alone(net, x[:20], rows=(0, 19))


@pytest.mark.slow
@pytest.mark.parametrize("make", [micro_batches, a_drop_probability_by_chance])
def test_networks_that_cut_their_rows_or_choose_their_rate_have_the_law_of_the_loop(make):
    net, x = made(make)
    assert_law(net, x[:20], n_draws=600)
    assert_same_alone(net, x[:20], rows=(0, 19), functions=make is micro_batches)


def one_of_many():
    def function(self, x):
        return self.o(self.experts[int(torch.randint(len(self.experts), ()))](x))

    made_of = (nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Dropout(0.3)) for _ in range(24))
    return Noted(function, experts=nn.ModuleList(made_of), o=nn.Linear(64, 2)), torch.randn(64, 8)


def test_sites_that_draws_are_the_first_to_meet_are_learned_without_beginning_again():
    net, x = made(one_of_many)
    calls, rows = passes(lambda: db.predict(net, x, n_draws=60))
    assert calls <= 60 + 24 * 4 + 30 and rows <= 64 * 60 * 2.5, (calls, rows / 64)
    calls, rows = passes(lambda: db.predict(net, x, n_draws=60))
    assert calls <= 70 and rows <= 64 * 62, (calls, rows / 64)


@pytest.mark.parametrize("make", [experts_skipped, experts_met_by_chance])
def test_experts_that_a_pass_may_skip_are_learned_once(make):
    net, x = made(make)
    db.predict(net, x, n_draws=30)
    for seed in (1, 2):
        calls, _ = passes(lambda seed=seed: db.predict(net, x, n_draws=30, seed=seed))
    assert calls <= 33, calls


@pytest.mark.slow
@pytest.mark.parametrize("make", [experts_skipped, experts_met_by_chance])
def test_experts_that_were_learned_have_the_law_of_the_loop(make):
    net, x = made(make)
    db.predict(net, x[:6], n_draws=5)
    assert_law(net, x[:10])
    assert_same_alone(net, x[:10], rows=(0, 4, 9))


def in_place(out, token, value):
    out[token] += value
    return out


WRITES = {
    "functional": lambda out, token, value: out.index_add(0, token, value),
    "index_add_": lambda out, token, value: out.index_add_(0, token, value),
    "in place": in_place,
}


def tokens_sent_to_experts(write):
    def function(self, x):
        flat = x.flatten(0, 1)
        weight, chosen = self.gate(flat).softmax(-1).topk(2, -1)
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            token, place = torch.where(chosen == i)
            if token.numel():
                out = write(out, token, expert(flat[token]) * weight[token, place, None])
        return self.o(out.view(x.shape)).mean(1)

    made_of = (nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Dropout(0.3), nn.Linear(12, 8)) for _ in range(4))
    net = Noted(function, gate=nn.Linear(8, 4), experts=nn.ModuleList(made_of), o=nn.Linear(8, 2))
    return net, torch.randn(10, 4, 8)


@pytest.mark.parametrize("write", slow_except(list(WRITES), "index_add_"))
def test_tokens_that_are_sent_to_experts_run_with_those_of_all_draws_at_once(write):
    net, x = made(lambda: tokens_sent_to_experts(WRITES[write]))
    for shared in ("shared", "row"):
        db.predict(net, x, n_draws=30, masks=shared)
        calls, _ = passes(lambda shared=shared: db.predict(net, x, n_draws=30, seed=1, masks=shared))
        assert calls <= 2, calls
        assert_law(net, x[:3], masks=shared)
    assert_same_alone(net, x, rows=(0, 9))


def sampled_class():
    def function(self, x):
        logits = self.a(x)
        chosen = torch.distributions.Categorical(logits=logits).sample() if self.training else logits.argmax(-1)
        return self.o(nn.functional.one_hot(chosen, 5).float())

    return Noted(function, a=nn.Linear(8, 5), o=nn.Linear(5, 2)), torch.randn(64, 8)


def locked():
    def function(self, x):
        h = torch.relu(self.a(self.d(x)))
        if self.training:
            h = h * h.data.new(1, h.size(1), h.size(2)).bernoulli_(0.7) / 0.7
        return self.o(self.l(h)[0][:, -1])

    parts = {"a": nn.Linear(5, 8), "d": nn.Dropout(0.1), "l": nn.LSTM(8, 8, batch_first=True), "o": nn.Linear(8, 2)}
    return Noted(function, **parts), torch.randn(64, 4, 5)


@pytest.mark.parametrize("make", [batch_depth, sampled_class, locked])
def test_numbers_that_are_filled_in_and_classes_as_columns_run_with_all_draws_at_once(make):
    net, x = made(make)
    method = db.predict(net, x, n_draws=30).method
    assert "mapped" in method or "folded" in method
    assert_law(net, x[:3])


def test_a_block_of_one_row_is_mapped_over_as_the_trial_was():
    def function(self, x):
        h = self.d(torch.relu(self.b(torch.relu(self.a(x)))))
        return self.o(h) + self.p(self.l(x[:, None])[0][:, 0])  # whose states are zeros that are made after a mask

    parts = {"a": nn.Linear(6, 512), "b": nn.Linear(512, 512), "d": nn.Dropout(0.3), "o": nn.Linear(512, 256)}
    recurrent = {"l": nn.LSTM(6, 4, batch_first=True), "p": nn.Linear(4, 256)}
    net, x = made(lambda: (Noted(function, **parts, **recurrent), torch.randn(3, 6)))
    n_passes, n_rows = passes(lambda: db.draws(net, x, n_draws=100))
    assert n_passes < 20 and n_rows < 50


def test_a_tensor_that_is_filled_in_and_read_itself_is_mapped_over():
    def function(self, x):
        noise = torch.zeros(1, 8)
        noise.normal_()
        return self.o(torch.tanh(self.a(x)) + (noise if self.training else 0))

    net, x = made(lambda: (Noted(function, a=nn.Linear(8, 8), o=nn.Linear(8, 2)), torch.randn(3, 8)))
    assert db.predict(net, x, n_draws=30).method == "mapped"
    assert_law(net, x)


class NoisyLinear(nn.Module):
    """Fortunato and others (2018): weights with noise of two vectors, which is written into a buffer."""

    def __init__(self, n_in, n_out):
        super().__init__()
        self.weight, self.size = nn.Linear(n_in, n_out).weight, nn.Parameter(torch.full((n_out, n_in), 0.2))
        self.register_buffer("noise", torch.zeros(n_out, n_in))

    def forward(self, x):
        if self.training:
            left, right = (torch.randn(n) for n in self.noise.shape)
            self.noise.copy_(torch.outer(left.sign() * left.abs().sqrt(), right.sign() * right.abs().sqrt()))
        return nn.functional.linear(x, self.weight + self.size * self.noise if self.training else self.weight)


def written_buffer():
    return Noted(lambda self, x: self.b(torch.relu(self.a(x))), a=NoisyLinear(8, 8), b=NoisyLinear(8, 2))


def written_places():
    def function(self, x):  # as in the sparse attention of Informer: the mean, and a few places of their own
        places = torch.arange(len(x))[:, None], torch.rand(6).topk(2).indices.expand(len(x), 2)
        result = x.mean(1, keepdim=True).expand(x.shape).clone()
        result[places] = self.d(torch.tanh(self.a(x)))[places]
        return self.o(result)

    return Noted(function, a=nn.Linear(8, 8), d=nn.Dropout(0.2), o=nn.Linear(8, 2))


def written_view():
    def function(self, x):
        mask = torch.ones(2, 8)
        if self.training:
            mask[0].copy_(torch.bernoulli(torch.full((8,), 0.7)) / 0.7)
        return self.o(torch.tanh(self.a(x)) * mask[0]) * mask[1, 0]

    return Noted(function, a=nn.Linear(8, 8), o=nn.Linear(8, 2))


class WeightDrop(nn.Module):
    """Merity and others (2018): the recurrent weights of an LSTM are dropped, and put into it for each pass."""

    def __init__(self, n_in, n_out):
        super().__init__()
        self.lstm = nn.LSTM(n_in, n_out, batch_first=True)
        self.raw = nn.Parameter(self.lstm._parameters.pop("weight_hh_l0").data)
        self.lstm.flatten_parameters = lambda: None

    def forward(self, x):
        self.lstm.weight_hh_l0 = nn.functional.dropout(self.raw, 0.4, self.training)
        return self.lstm(x)[0]


def dropped_recurrent_weights():
    return Noted(lambda self, x: self.o(self.l(x)[:, -1]), l=WeightDrop(8, 6), o=nn.Linear(6, 2))


@pytest.mark.parametrize("make", [written_buffer, written_places, written_view, dropped_recurrent_weights])
def test_what_draws_write_into_one_tensor_is_mapped_over(make):
    net, x = made(lambda: (make(), torch.randn(3, 6, 8)))
    assert db.predict(net, x, n_draws=30).method == "mapped"
    with unchanged(net, x):
        assert passes(lambda: db.draws(net, x, n_draws=30))[0] <= 3
    assert_law(net, x)
    assert_same_alone(net, x)


def test_rows_of_two_kinds_that_are_written_into_their_places_are_mapped_over():
    def function(self, x):
        result = x.new_empty(len(x), 2)
        for kind in (0, 1):
            result[kind::2] = self.o(self.d(torch.relu(self.a(x[kind::2]))))
        return result

    net, x = made(lambda: (Noted(function, a=nn.Linear(8, 8), d=nn.Dropout(0.3), o=nn.Linear(8, 2)), torch.randn(6, 8)))
    assert db.predict(net, x, n_draws=30).method == "mapped over rows"
    assert passes(lambda: db.draws(net, x, n_draws=30))[0] <= 3


def test_the_numbers_of_draws_that_run_one_at_a_time_are_generated_at_once(monkeypatch):
    net, x = made(NETWORKS["layers skipped by bernoulli"])
    db.predict(net, x, n_draws=30)
    generated, words = [], masks._words
    monkeypatch.setattr(masks, "_words", lambda *args: (generated.append(args), words(*args))[1])
    db.predict(net, x, n_draws=30, seed=1)
    assert len(generated) <= 6  # three gates and three dropouts


# Rows that choose branches --------------------------------------------------------------------------------------------


def asserted():
    def function(self, x):
        h = self.d(torch.relu(self.a(x)))
        assert torch.isfinite(h).all()
        return self.o(h)

    return Noted(function, a=nn.Linear(8, 16), d=nn.Dropout(0.2), o=nn.Linear(16, 2)), torch.randn(16, 8)


def two_heads():
    def function(self, x):
        h = self.d(torch.relu(self.a(x)))
        return torch.stack([self.o(row) if row.mean() > 0.3 else self.p(row) for row in h])

    children = {"a": nn.Linear(8, 16), "d": nn.Dropout(0.2), "o": nn.Linear(16, 2), "p": nn.Linear(16, 2)}
    return Noted(function, **children), torch.randn(16, 8)


def steps_up_to_the_longest(cell=nn.GRUCell):
    def function(self, x, lengths):
        h = x.new_zeros(len(x), 8)
        for t in range(int(lengths.max())):
            h = torch.where((t < lengths)[:, None], self.c(self.d(x[:, t]), h), h)
        return self.o(h)

    net = Noted(function, c=cell(5, 8), d=nn.Dropout(0.2), o=nn.Linear(8, 1))
    return net, (torch.randn(16, 6, 5), torch.randint(2, 7, (16,)))


def steps_without_biases():
    return steps_up_to_the_longest(lambda *sizes: nn.RNNCell(*sizes, bias=False))


def halting():
    def function(self, x):
        out = []
        for h in x:
            for _ in range(5):
                h = torch.tanh(self.a(self.d(h)))
                if torch.sigmoid(self.gate(h)) > 0.55:
                    break
            out.append(self.o(h))
        return torch.stack(out)

    return Noted(function, a=nn.Linear(8, 8), gate=nn.Linear(8, 1), d=nn.Dropout(0.2), o=nn.Linear(8, 2)), torch.randn(
        16, 8
    )


def without_a_rule():
    def function(self, x):
        h = self.d(torch.relu(self.a(x)))
        return torch.stack([self.o(torch.tensor(row.tolist())) if row.mean() > 0.5 else self.o(row) for row in h])

    return Noted(function, a=nn.Linear(8, 16), d=nn.Dropout(0.2), o=nn.Linear(16, 2)), torch.randn(16, 8)


def attending_without_dropout():
    def function(self, x):
        h = self.d(x.unflatten(1, (2, 2, 2)))  # [row, head, position, feature]
        h = nn.functional.scaled_dot_product_attention(h, torch.tanh(h), h, is_causal=True).flatten(1)
        if self.training and (torch.isinf(h).any() or torch.isnan(h).any()):  # as many encoders do
            h = h.clamp(-1e4, 1e4)
        return self.o(h)

    return Noted(function, d=nn.Dropout(0.2), o=nn.Linear(8, 2)), torch.randn(16, 8)


def written_step_by_step(buffer=torch.zeros):
    def function(self, x):
        outputs, h = buffer(len(x), 3, 8), x
        for t in range(3):
            h = self.c(self.d(h), h)
            assert (h.abs() < 10).all()
            outputs[:, t] = h
        return self.o(outputs)

    return Noted(function, c=nn.GRUCell(8, 8), d=nn.Dropout(0.2), o=nn.Linear(8, 2)), torch.randn(16, 8)


def written_into_empty_memory():
    return written_step_by_step(torch.empty)


BRANCHES = [
    asserted,
    attending_without_dropout,
    two_heads,
    steps_up_to_the_longest,
    steps_without_biases,
    halting,
    written_step_by_step,
    written_into_empty_memory,
]


@pytest.mark.parametrize(("make", "masks"), crossed(BRANCHES, ["shared", "row"]))
def test_rows_that_read_the_same_values_go_together(make, masks):
    net, x = made(make)
    assert db.predict(net, x, n_draws=30, masks=masks).method == "branch by branch"
    calls, _ = passes(lambda: db.predict(net, x, n_draws=30, seed=1, masks=masks))
    assert calls <= 30, calls


KIN = {steps_without_biases, written_into_empty_memory}


@pytest.mark.parametrize("make", slow_except([*BRANCHES, without_a_rule], *(set(BRANCHES) - KIN), without_a_rule))
def test_a_row_that_chooses_a_branch_is_as_it_is_alone(make):
    net, x = made(make)
    assert_law(net, cut(x, slice(3)))
    assert_same_alone(net, x, rows=(0, 7, 15), functions=False)


@pytest.mark.parametrize("make", [two_heads, halting])
def test_a_row_that_chooses_a_branch_has_the_same_bits_in_any_batch(make):
    net, x = made(make)
    whole = db.draws(net, x, n_draws=20)
    for rows in (slice(0, 1), slice(3, 8), slice(9, 16)):
        assert torch.equal(db.draws(net, x[rows], n_draws=20), whole[:, rows])


def test_rows_that_choose_a_branch_together_are_refused():
    def function(self, x):
        h = self.d(torch.relu(self.a(x)))
        return self.o(h) if (h.mean(1) > 0.45).any() else self.p(h)

    children = {"a": nn.Linear(8, 16), "d": nn.Dropout(0.2), "o": nn.Linear(16, 2), "p": nn.Linear(16, 2)}
    net, x = made(lambda: (Noted(function, **children), torch.randn(16, 8)))
    with pytest.raises(ValueError, match="rows depend on each other"):
        db.predict(net, x, n_draws=30)


def reading(read):
    def function(self, x):
        return read(self, self.d(torch.relu(self.a(x))))

    children = {"a": nn.Linear(8, 16), "d": nn.Dropout(0.2), "o": nn.Linear(16, 2), "p": nn.Linear(16, 2)}
    return Noted(function, **children), torch.randn(16, 8)


@pytest.mark.parametrize(("limit", "masks"), crossed([0.45, 0.3, 0.52, 0.58], ["shared", "row"]))
def test_a_number_of_all_rows_that_chooses_a_branch_is_refused(limit, masks):
    net, x = made(lambda: reading(lambda self, h: self.o(h) if h.mean(1).max().item() > limit else self.p(h)))
    with pytest.raises(ValueError, match="rows depend on each other"):
        db.predict(net, x, n_draws=30, masks=masks)


def test_the_draws_of_a_small_network_with_one_gate_are_a_pass_for_each_branch():
    net, x = made(lambda: skipped_once(GATES["torch.rand(1)"]))
    assert db.predict(net, x, n_draws=30).method == "path by path"
    calls, _ = passes(lambda: db.predict(net, x, n_draws=30, seed=1))
    assert calls == 2, calls
    assert_law(net, x[:5])
    assert_same_alone(net, x, rows=(0, 31, 63))


# Inspections ----------------------------------------------------------------------------------------------------------


def diffusion():
    def function(self, x, t):
        return self.o(self.d(torch.nn.functional.silu(self.b(self.d(torch.nn.functional.silu(self.a(x) * t))))))

    children = {"a": nn.Linear(8, 16), "b": nn.Linear(16, 16), "d": nn.Dropout(0.1), "o": nn.Linear(16, 8)}
    return Noted(function, **children), torch.randn(32, 8)


@pytest.mark.parametrize("step", [float, int, np.float32], ids=["float", "int", "NumPy"])
def test_a_number_that_changes_with_every_call_is_not_inspected_again(step):
    net, x = made(diffusion)
    plain = net.function
    net.function = lambda self, x, t: plain(self, x, float(t))
    db.predict(net, (x, step(0)), n_draws=20)
    own, own_rows = passes(lambda: db.predict(net, (x, step(0)), n_draws=20, seed=1))
    for i in range(1, 4):
        calls, rows = passes(lambda i=i: db.predict(net, (x, step(i)), n_draws=20))
        assert calls <= own + 2 and rows <= own_rows + 2 * 32, (calls, own, rows / 32)


def test_a_number_that_changes_the_network_is_followed():
    net, x = made(diffusion)
    fresh, _ = made(diffusion)
    db.predict(net, (x, 0.5), n_draws=20)
    torch.testing.assert_close(db.draws(net, (x, 2.0), n_draws=5), db.draws(fresh, (x, 2.0), n_draws=5))


def texts():
    def function(self, tokens):
        return self.o(self.l(self.e(tokens)).mean(1))

    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
    return Noted(function, e=nn.Embedding(9, 8), l=layer, o=nn.Linear(8, 2)), None


@pytest.mark.slow
def test_texts_of_many_lengths_are_inspected_once_each_at_most():
    net, _ = made(texts)
    tokens = torch.randint(0, 9, (1, 24), generator=torch.Generator().manual_seed(0))
    for n in range(4, 24):
        db.predict(net, tokens[:, :n], n_draws=20)
    for n in range(4, 24):  # more lengths than a small table of forms remembers
        calls, own = (passes(lambda n=n, seed=seed: db.predict(net, tokens[:, :n], n_draws=20, seed=seed))[0]
                      for seed in (1, 2))  # fmt: skip
        assert calls <= own + 2, (n, calls, own)


def first_convolutions():
    def function(self, x):
        return self.o(torch.relu(self.b(torch.relu(self.a(self.d(x))))).mean((2, 3)))

    children = {"d": nn.Dropout(0.1), "a": nn.Conv2d(3, 8, 3), "b": nn.Conv2d(8, 8, 3), "o": nn.Linear(8, 2)}
    return Noted(function, **children), torch.randn(16, 3, 8, 8)


def first_transformer():
    def function(self, tokens):
        return self.o(self.l(self.e(tokens)).mean(1))

    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
    return Noted(function, e=nn.Embedding(9, 8), l=nn.TransformerEncoder(layer, 2), o=nn.Linear(8, 2)), torch.randint(
        0, 9, (16, 6)
    )


def first_lstm():
    def function(self, x):
        return self.o(self.l(x)[0][:, -1])

    return Noted(function, l=nn.LSTM(5, 8, 2, dropout=0.2, batch_first=True), o=nn.Linear(8, 1)), torch.randn(16, 6, 5)


@pytest.mark.parametrize("make", [first_convolutions, first_transformer, first_lstm])
def test_a_first_call_costs_few_passes_beside_its_draws(make):
    net, x = made(make)
    passes(lambda: db.predict(net, x, n_draws=20))
    inspection, blocks = ([n for n in PASSES if (n > 2 * 4) == is_block] for is_block in (False, True))
    assert len(inspection) <= 8 and len(blocks) <= 2 and sum(blocks) <= 32 * 20, PASSES  # two draws of four rows


def residual():
    def function(self, x):
        for layer in self.layers:
            x = x + self.d(torch.tanh(layer(x)))
        return self.o(x)

    layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(4))
    return Noted(function, layers=layers, d=nn.Dropout(0.1), o=nn.Linear(256, 1)), torch.randn(70, 256)


def residual_with_a_mask_for_all_rows():
    def function(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) * (torch.empty(1, 1).bernoulli_(0.8) if self.training else 0.8)
        return self.o(x)

    layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(4))
    return Noted(function, layers=layers, o=nn.Linear(256, 1)), torch.randn(70, 256)


@pytest.mark.parametrize("make", [residual, residual_with_a_mask_for_all_rows])
def test_many_rows_of_vectors_are_few_blocks_with_the_bits_that_each_row_has_alone(make):
    net, x = made(make)
    whole = db.draws(net, x, n_draws=50)
    calls, _ = passes(lambda: db.draws(net, x, n_draws=50))
    assert calls <= 10, calls  # of blocks as small as a lone row's, it would be 70
    for some in (slice(0, 1), slice(69, 70), slice(7, 30)):
        assert torch.equal(db.draws(net, x[some], n_draws=50), whole[:, some])


def test_the_masks_of_draws_in_turn_are_held_up_to_a_bound(monkeypatch):
    def function(self, x):
        for _ in range(12):
            x = x + self.d(torch.tanh(self.a(x))) if torch.rand(1) < 0.7 else x
        return self.o(x)

    children = {"a": nn.Linear(8, 8), "d": nn.Dropout(0.1), "o": nn.Linear(8, 2)}
    net, x = made(lambda: (Noted(function, **children), torch.randn(5, 8)))
    expected = db.draws(net, x, n_draws=30)
    held = list[int]()
    precomputed = source.KeyedSource._precomputed

    def noted(self, *args):
        result = precomputed(self, *args)
        held.append(sum(len(numbers) * numbers[0].nbytes for numbers in self._made.values()))
        return result

    monkeypatch.setattr(source, "SHARED_BYTES", 1000)
    monkeypatch.setattr(source.KeyedSource, "_precomputed", noted)
    assert torch.equal(db.draws(net, x, n_draws=30), expected)
    assert 4 * 1000 < max(held) <= 8 * 1000


SCRATCH = torch.zeros(8)


def test_a_tensor_that_outlives_the_pass_is_not_divided():
    def function(self, x):
        if self.training:
            SCRATCH.normal_()
        return self.o(torch.tanh(self.a(x)) + (SCRATCH if self.training else 0))

    net, x = made(lambda: (Noted(function, a=nn.Linear(8, 8), o=nn.Linear(8, 2)), torch.randn(3, 8)))
    assert db.predict(net, x, n_draws=30).method == "draw by draw"
    assert not is_batched(SCRATCH)
    assert_law(net, x)
