"""The draws of a network as tensors, and one draw as a function."""

import collections
import copy
import pickle
import re

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import dropbayes as db
from dropbayes.sampling import evaluation_output
from tests.cases import crossed
from tests.sampling.test_plan import PERCEPTRON
from tests.sampling.zoo import Module, build


@pytest.mark.parametrize(
    ("name", "sampler"),
    crossed(
        ["dropout_mlp", "dropout2d", "transformer_encoder", "lstm", "gpt2", "drop_connect"],
        ["stratified", "independent"],
    ),
)
def test_function_draw_is_the_draw_of_its_index(name, sampler):
    net, x = build(name)
    every = db.draws(net, x, n_draws=6, seed=9, sampling=db.Sampling(sampler=sampler))
    for index in (0, 5):
        one = db.function_draw(net, index, n_draws=6, seed=9, sampling=db.Sampling(sampler=sampler))(x)
        pairs = zip(torch.utils._pytree.tree_leaves(one), torch.utils._pytree.tree_leaves(every), strict=True)
        for a, b in pairs:
            torch.testing.assert_close(a, b[index], rtol=1e-4, atol=1e-5)


def test_function_draw_is_a_differentiable_function():
    f = db.function_draw(copy.deepcopy(PERCEPTRON).double(), 2, n_draws=10)
    x = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    (gradient,) = torch.autograd.grad(f(x).sum(), x)
    step = 1e-7  # a larger one could cross the kink of a unit
    for place in range(5):
        moved = x.detach().clone()
        moved[:, place] += step
        difference = (f(moved) - f(x)).sum(-1) / step
        torch.testing.assert_close(difference.detach(), gradient[:, place], rtol=1e-4, atol=1e-5)
    recurrent = db.function_draw(nn.LSTM(3, 4, 2, dropout=0.3, batch_first=True), 1, n_draws=3)
    sequence = torch.randn(2, 5, 3, requires_grad=True)
    assert torch.autograd.grad(recurrent(sequence)[0].sum(), sequence)[0].abs().sum() > 0


@pytest.mark.parametrize("kind", [lambda *parts: list(parts), collections.namedtuple("Parts", "first second")])
def test_function_draw_takes_an_argument_of_several_parts_as_the_network_does(kind):
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop, self.last = nn.Dropout(0.5), nn.Linear(3, 2)

        def forward(self, parts):
            return self.last(self.drop(parts[0] + parts[1]))

    net, parts = Sum().eval(), kind(torch.randn(4, 3), torch.randn(4, 3))
    torch.testing.assert_close(db.function_draw(net, 2, n_draws=5)(parts), db.draws(net, (parts,), n_draws=5)[2])


@pytest.mark.parametrize("index", [5, -1, 1.5, "first", None, torch.ones(1, 2)])
def test_function_draw_refuses_an_index_outside_its_draws(index):
    with pytest.raises(ValueError, match=re.escape(f"`index` must be one of the 5 draws, 0 to 4; got {index!r}")):
        db.function_draw(PERCEPTRON, index, n_draws=5)


def test_a_draw_is_called_as_the_network_is():
    net, x = build("gpt2")
    f = db.function_draw(net, 1, n_draws=4)
    assert torch.equal(f(**x).last_hidden_state, f(x).last_hidden_state)
    pair = Module(lambda m, a, b: m.d(m.l(a + b)), l=nn.Linear(6, 3), d=nn.Dropout(0.5))
    g = db.function_draw(pair, 0, n_draws=4)
    a, b = torch.randn(2, 4, 6)
    assert torch.equal(g(a, b), g((a, b)))


def test_a_draw_takes_and_returns_a_cache():
    net, x = build("gpt2")
    f = db.function_draw(net, 2, n_draws=4)
    ids = x["input_ids"]
    first = f(input_ids=ids[:, :-1], use_cache=True)
    step = f(input_ids=ids[:, -1:], past_key_values=first.past_key_values, use_cache=True)
    assert step.last_hidden_state.shape[1] == 1 and step.past_key_values.get_seq_length() == ids.shape[1]


@pytest.mark.parametrize("call", [db.draws, db.predict])
def test_arrays_are_taken_for_tensors(call):
    x = torch.randn(4, 5)
    ours, theirs = call(PERCEPTRON, x.double().numpy(), n_draws=5), call(PERCEPTRON, x, n_draws=5)
    assert torch.equal(getattr(ours, "mean", ours), getattr(theirs, "mean", theirs)) if call is db.predict else True


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.d, self.calls = nn.Linear(3, 2), nn.Dropout(0.5), 0
        self.register_buffer("average", torch.zeros(2))

    def forward(self, x):
        self.calls += 1
        h = self.a(x)
        self.average.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        return self.d(h)


def test_a_network_with_a_state_is_left_as_it_was():
    net, x = Counting().eval(), torch.randn(4, 3)
    db.predict(net, x, n_draws=6)
    assert net.calls == 0 and not net.average.any()


@pytest.mark.parametrize(("x", "hint"), [
    (torch.randn(4, 3, dtype=torch.float64), "pass x.to(torch.float32)"),
    (torch.randn(4, 7), "got the shape (4, 7)"),
    ((torch.randn(4, 3), torch.randn(4, 1)), "Leave targets out of `x`"),
])  # fmt: skip
def test_an_input_that_does_not_fit_is_explained_beside_the_message_of_torch(x, hint):
    net = nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.5), nn.Linear(5, 1))
    with pytest.raises((RuntimeError, TypeError)) as raised:
        db.draws(net, x, n_draws=2)
    assert hint in raised.value.__notes__[0]


def test_a_draw_is_pickled_with_its_network():
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2))
    draw, x = db.function_draw(net, 3, n_draws=10, seed=1), torch.ones(2, 3)
    assert torch.equal(pickle.loads(pickle.dumps(draw))(x), draw(x))


def test_a_plain_pass_leaves_flags_alone_and_takes_named_inputs():
    net = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)).train()
    x = torch.ones(3, 2)
    torch.testing.assert_close(evaluation_output(net, {"input": x}), net[0](x))
    assert all(module.training for module in net.modules())


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("n_rows", [1, 4])
def test_the_gradient_of_what_is_computed_again_with_other_masks_is_refused(use_reentrant, n_rows):
    def forward(m, x):
        return m.o(checkpoint(m.inner, x, use_reentrant=use_reentrant))

    net = Module(forward, inner=nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(0.5)), o=nn.Linear(8, 1)).eval()
    x = torch.randn(n_rows, 2, requires_grad=True)
    one = db.function_draw(net, 1, n_draws=4)(x)
    torch.testing.assert_close(one, db.draws(net, x, n_draws=4)[1])
    with pytest.raises(NotImplementedError, match="Switch checkpointing off"):
        one.sum().backward()


# A draw of a batch is a batch whose rows have what they have alone -----------------------------------------------------


class Turned(nn.Module):
    """Steps of a sequence, which come first inside where an argument or a variable elsewhere says so."""

    first = 0

    def __init__(self):
        super().__init__()
        self.a, self.dropout, self.b = nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 2)

    def forward(self, x, first=0):
        turned = first or type(self).first
        hidden = torch.tanh(self.a(x))
        hidden = torch.tanh(self.dropout(hidden.transpose(0, 1) if turned else hidden))
        return self.b(hidden.transpose(0, 1) if turned else hidden).flatten(1)


class TurnedByAxis(Turned):
    """The same operations whichever comes first: a number says which axis."""

    def forward(self, x, first=0):
        axis = first or type(self).first
        hidden = torch.tanh(self.dropout(torch.tanh(self.a(x)).transpose(0, axis)))
        return self.b(hidden.transpose(0, axis)).flatten(1)


@pytest.mark.parametrize("cls", [Turned, TurnedByAxis])
@pytest.mark.parametrize("chosen", ["by an argument", "from elsewhere"])
@pytest.mark.parametrize("masks", ["shared", "row"])
def test_a_branch_under_which_rows_lie_along_another_axis_is_followed(monkeypatch, cls, chosen, masks):
    x = torch.randn(4, 4, 6, generator=torch.Generator().manual_seed(0))  # as many rows as steps
    net, other, fresh = (built(cls) for _ in range(3))
    as_given = db.Sampling(batch_invariant=False)
    for first in (0, 1):
        if chosen == "from elsewhere":
            monkeypatch.setattr(cls, "first", first)
        arguments = (x, first) if chosen == "by an argument" else (x,)
        one = db.function_draw(net, 2, n_draws=5, masks=masks)(*arguments)
        rows = [
            db.draws(fresh, (x[i : i + 1], *arguments[1:]), n_draws=5, masks=masks, sampling=db.Sampling(row_offset=i))
            for i in range(4)
        ]
        torch.testing.assert_close(one, torch.cat(rows, 1)[2])
        several = db.draws(other, arguments, n_draws=5, masks=masks, sampling=as_given)
        torch.testing.assert_close(several, torch.cat(rows, 1))


def built(cls):
    torch.manual_seed(0)
    return cls().eval()


class OfMany(nn.Module):
    """A network that does otherwise with more than nine rows."""

    def __init__(self, change):
        super().__init__()
        self.a, self.dropout, self.b, self.change = nn.Linear(6, 16), nn.Dropout(0.3), nn.Linear(16, 2), change

    def forward(self, x):
        hidden = torch.tanh(self.a(x))
        if len(x) <= 9:
            return self.b(self.dropout(hidden))
        if self.change == "centred":
            return self.b(self.dropout(hidden - hidden.mean(0)))
        return self.b(self.dropout(hidden.flip(0)).flip(0))


@pytest.mark.parametrize("seen", [3, 20])
def test_a_draw_of_more_rows_than_before_is_refused_where_they_depend_on_each_other(seen):
    torch.manual_seed(0)
    net, x = OfMany("centred"), torch.randn(20, 6)
    with pytest.raises(ValueError, match=r"`net` gives a row another output alone"):
        for rows in (x[:seen], x):
            db.function_draw(net, 2, n_draws=5)(rows)


def test_a_draw_of_rows_that_the_network_cuts_in_half_has_the_masks_of_each_row():
    def forward(m, x):
        h = m.a(x) if m.training and torch.rand(1).item() < 0.4 else m.a(x).tanh()
        return torch.cat([m.d(some) for some in h.tensor_split(2)])

    net, x = Module(forward, a=nn.Linear(4, 16), d=nn.Dropout(0.5)).eval(), torch.randn(4, 4)
    whole = db.draws(net, x, n_draws=6)
    for index in range(6):
        torch.testing.assert_close(db.function_draw(net, index, n_draws=6)(x), whole[index])


def test_a_draw_of_more_rows_than_before_has_the_masks_of_each_row():
    torch.manual_seed(0)
    net, x = OfMany("reversed"), torch.randn(20, 6)
    f = db.function_draw(net, 2, n_draws=5, masks="row")
    torch.testing.assert_close(f(x)[:3], f(x[:3]))


@pytest.mark.parametrize("name", ["dropout_mlp", "drop_connect", "drop_path_rand"])
def test_a_draw_of_a_shard_has_the_masks_of_the_whole(name):
    net, x = build(name)
    whole = db.draws(net, x, n_draws=5, masks="row")[2]
    for start, stop in ((0, 1), (1, 4), (3, 4)):
        offset = db.Sampling(row_offset=start)
        shard = db.function_draw(net, 2, n_draws=5, masks="row", sampling=offset)(x[start:stop])
        torch.testing.assert_close(shard, whole[start:stop])
