"""The network as its own witness: what breaks an assumption is right or refused, never silently wrong.

Each group is a cause; its members differ in clothes only.
"""

import copy
import functools
import random
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dropbayes as db
from tests.sampling.zoo import Module

N_DRAWS = 1500


class Net(nn.Module):
    """Linear 6-16, Dropout 0.1, Linear 16-3, with `middle` between."""

    def __init__(self, middle=None):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.d, self.o = nn.Linear(6, 16), nn.Dropout(0.1), nn.Linear(16, 3)
        self.function = middle

    def middle(self, h):
        return self.function(self, h)

    def forward(self, x):
        return self.o(self.d(self.middle(self.a(x))))


def rows(n=5):
    return torch.randn(n, 6, generator=torch.Generator().manual_seed(1))


def assert_right(net, x, **options):
    """The moments are those of a loop in training mode."""
    trained = copy.deepcopy(net).train()
    state = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tobytes()
    with torch.no_grad():
        loop = torch.stack([trained(x) for _ in range(N_DRAWS)])
    torch.set_rng_state(state[0]), random.setstate(state[1])
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tobytes()
    ours = db.predict(net, x, n_draws=N_DRAWS, **options)
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tobytes()
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:]
    error = 6 * ((loop.var(0) + ours.epistemic) / N_DRAWS).sqrt() + 1e-5
    assert ((ours.mean - loop.mean(0)).abs() <= error).all()
    assert float(ours.epistemic.sum()) == pytest.approx(float(loop.var(0).sum()), rel=0.12)


# The output is changed after the last layer ---------------------------------------------------------------------------

AFTER_LAST = {
    "relu": nn.ReLU(inplace=True),
    "sigmoid": Module(lambda m, y: y.sigmoid_()),
    "scaled": Module(lambda m, y: y.mul_(3.0)),
    "one column": Module(lambda m, y: y.index_fill_(1, torch.tensor([0]), 0.0)),
    "written by index": Module(lambda m, y: y.__setitem__((slice(None), 0), 2 * y[:, 1]) or y),
}


@pytest.mark.parametrize("name", AFTER_LAST)
@pytest.mark.parametrize("direct", [True, False])
def test_an_output_changed_in_place_is_not_integrated_as_the_last_layer(name, direct):
    layers = [nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 3), copy.deepcopy(AFTER_LAST[name])]
    torch.manual_seed(0)
    assert_right(nn.Sequential(*layers) if direct else nn.Sequential(nn.Sequential(*layers), nn.Flatten()), rows())


def test_an_output_changed_in_place_by_a_hook_is_not_integrated():
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 3))
    net[3].register_forward_hook(lambda m, args, out: out.mul_(2.0))
    assert_right(net, rows())


# The training flag is read elsewhere ----------------------------------------------------------------------------------


def helper(module, h):
    return F.dropout(h, 0.5) if module.training else h


class ParentReadsChild(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Net(lambda m, h: h)

    def forward(self, x):
        h = self.net.a(x)
        return self.net.o(self.net.d(F.dropout(h, 0.4) if self.net.d.training else h))


class Property(Net):
    @property
    def noisy(self):
        return self.training

    def middle(self, h):
        return F.dropout(h, 0.5) if self.noisy else h


FLAGS = {
    "helper": lambda: Net(helper),
    "lambda": lambda: Net(lambda m, h: F.dropout(h, 0.5) if m.training else h),
    "getattr": lambda: Net(lambda m, h: F.dropout(h, 0.5, getattr(m, "train" + "ing"))),
    "parent": ParentReadsChild,
    "property": Property,
    "hook": lambda: _hooked(),
}


def _hooked():
    net = Net(lambda m, h: h)
    net.a.register_forward_hook(lambda m, args, out: F.dropout(out, 0.5) if m.training else out)
    return net


@pytest.mark.parametrize("name", FLAGS)
def test_dropout_behind_a_flag_is_found_wherever_the_flag_is_read(name):
    assert_right(FLAGS[name](), rows())


def test_a_part_that_stays_in_evaluation_stays_so():
    class Frozen(Net):
        def train(self, mode=True):
            super().train(mode)
            self.d.eval()
            return self

        def middle(self, h):
            return F.dropout(h, 0.5, self.training)

    assert_right(Frozen(), rows())


# A training branch that does more than drop ---------------------------------------------------------------------------


class MoreInTraining(nn.Module):
    def forward(self, h):
        return F.dropout(3 * h, 0.5) if self.training else h


class Shuffled(nn.Module):
    def forward(self, h):
        return h[:, torch.randperm(h.shape[1])] if self.training else h


@pytest.mark.parametrize("block", [MoreInTraining, Shuffled])
def test_a_branch_that_drops_and_changes_more_is_refused_by_name_and_can_be_left_out(block):
    net = Net(lambda m, h: m.block(h))
    net.block = block()
    with pytest.raises((ValueError, NotImplementedError), match=r"leave_out|torch\.rand"):
        db.predict(net, rows())
    for name in ("block", block.__name__):
        assert len([s for s in db.sites(net, rows(), leave_out=name) if not s.left_out]) == 1
        assert db.predict(net, rows(), leave_out=name).epistemic.sum() > 0


def test_dropout_left_out_by_name_takes_no_part_and_is_listed_as_such():
    net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.LayerNorm(8), nn.Dropout(0.2), nn.Linear(8, 2))
    found = db.sites(net, rows(), leave_out="1")
    assert [(s.path, s.left_out) for s in found] == [("3", False), ("1", True)]
    alone = nn.Sequential(net[0], net[2], net[3], net[4])
    torch.testing.assert_close(db.predict(net, rows(), leave_out="1").std, db.predict(alone, rows()).std)
    with pytest.raises(ValueError, match="`leave_out` must name modules"):
        db.predict(net, rows(), leave_out="nothing")


# Randomness outside of torch's functions ------------------------------------------------------------------------------

HOST = {
    "python": lambda m, h: 0 * h if m.training and random.random() < 0.3 else h,
    "numpy": lambda m, h: 0 * h if m.training and np.random.rand() < 0.3 else h,
    "choice": lambda m, h: random.choice([h, 2 * h]) if m.training else h,
    "layer drop": lambda m, h: h if m.training and torch.rand([]) < 0.6 else 3 * h,
}


@pytest.mark.parametrize("name", HOST)
def test_random_numbers_of_the_host_are_keyed_to_the_seed(name):
    net = Net(HOST[name])
    assert_right(net, rows(1))
    one, two = (db.draws(net, rows(), n_draws=20, seed=3) for _ in range(2))
    assert torch.equal(one, two)
    assert not torch.equal(one, db.draws(net, rows(), n_draws=20, seed=4))


UNSEEN = {
    "aten": lambda h: torch.ops.aten.dropout(h, 0.5, True),
    "binomial": lambda h: h * torch.binomial(torch.ones_like(h), torch.full_like(h, 0.5)) * 2,
    "gamma": lambda h: h * torch.distributions.Gamma(1.0, 1.0).sample(h.shape),
    "dirichlet": lambda h: h * torch.distributions.Dirichlet(torch.ones(h.shape[1])).sample(),
    "poisson": lambda h: h + torch.poisson(h.abs()),
    "permutation": lambda h: h[:, torch.randperm(h.shape[1])],
}


@pytest.mark.parametrize("name", UNSEEN)
def test_random_operations_that_cannot_be_keyed_are_refused_by_name(name):
    net = Net(lambda m, h: UNSEEN[name](h) if m.training else h)
    state = torch.get_rng_state()
    with pytest.raises(NotImplementedError, match="cannot be keyed"):
        db.predict(net, rows())
    assert torch.equal(state, torch.get_rng_state())


def test_dropout_in_another_thread_is_refused():
    def in_thread(m, h):
        box = []
        worker = threading.Thread(target=lambda: box.append(F.dropout(h, 0.5, m.training)))
        worker.start(), worker.join()
        return box[0]

    with pytest.raises((NotImplementedError, ValueError), match=r"another thread|switched on alone"):
        db.predict(Net(in_thread), rows())


def test_initialisers_in_a_forward_pass_are_keyed():
    assert_right(Net(lambda m, h: h * nn.init.uniform_(torch.empty_like(h), 0.0, 2.0) if m.training else h), rows())


def test_rrelu_is_drawn():
    assert_right(Net(lambda m, h: F.rrelu(h, 0.1, 0.9, m.training)), rows())


# Random numbers that are fixed ----------------------------------------------------------------------------------------


def seeded(m, h):
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return torch.cos(h @ torch.randn(16, 16))


FIXED = {
    "generator": lambda m, h: torch.cos(h @ torch.randn(16, 16, generator=torch.Generator().manual_seed(7))),
    "fork": seeded,
}


@pytest.mark.parametrize("name", FIXED)
def test_numbers_from_a_generator_seeded_in_the_forward_pass_are_no_site(name):
    net = Net(FIXED[name])
    assert len(db.sites(net, rows())) == 1
    assert_right(net, rows())


def test_a_generator_that_goes_on_from_call_to_call_is_refused():
    source = torch.Generator().manual_seed(3)
    with pytest.raises(NotImplementedError, match=r"its own torch\.Generator"):
        db.predict(Net(lambda m, h: h + torch.randn(16, generator=source)), rows())


# Rows -----------------------------------------------------------------------------------------------------------------

DEPENDENT = {
    "attention": lambda m, x: m.o(m.d((lambda h: (h @ h.T).softmax(-1) @ h)(m.a(x)))),
    "batch statistics": lambda m, x: m.o(m.d(m.a(x) - m.a(x).mean(0))),
    "position in the batch": lambda m, x: m.o(m.d(m.a(x))) + torch.arange(5.0)[: len(x), None],
    "branch": lambda m, x: m.o(m.d(m.a(x))) * (1 if float(x.sum()) > 0 else -1),
}


@pytest.mark.parametrize("name", DEPENDENT)
def test_rows_that_depend_on_each_other_are_refused_with_the_remedy(name):
    net = Module(DEPENDENT[name], a=nn.Linear(6, 16), d=nn.Dropout(0.1), o=nn.Linear(16, 3)).eval()
    with pytest.raises(ValueError, match="row_axis=None"):
        db.predict(net, rows() + torch.tensor([[1.0], [1], [1], [1], [-9]]))
    assert db.predict(net, rows(), row_axis=None).mean.shape == (5, 3)


def test_a_small_difference_of_large_numbers_is_no_dependence():
    net = Module(lambda m, x: m.d(m.o(1e6 * m.a(x)) - m.o(1e6 * m.a(x) + 1.0)), a=nn.Linear(6, 64), d=nn.Dropout(0.2),
                 o=nn.Linear(64, 1)).eval()  # fmt: skip
    assert db.predict(net, rows(50)).mean.shape == (50, 1)


def test_pairwise_outputs_are_refused_and_right_as_one_row():
    net = Module(lambda m, x: (lambda h: h @ h.T)(m.d(m.a(x))), a=nn.Linear(6, 16), d=nn.Dropout(0.2)).eval()
    with pytest.raises(ValueError, match="row_axis=None"):
        db.predict(net, rows())
    assert_right(net, rows(), row_axis=None)


def test_a_graph_is_one_row_or_has_whole_arguments():
    class Convolution(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.d = nn.Linear(6, 8), nn.Linear(8, 2), nn.Dropout(0.3)

        def forward(self, x, edges):
            h = torch.relu(self.a(x))
            h = h.index_add(0, edges[1], h[edges[0]])
            return self.b(self.d(h))

    net, edges = Convolution().eval(), torch.tensor([[0, 1, 2, 3, 4], [1, 2, 3, 4, 0]])
    with pytest.raises((ValueError, IndexError)):
        db.predict(net, {"x": rows(), "edges": edges})
    ours = db.predict(net, {"x": rows(), "edges": edges}, row_axis=None)
    assert ours.mean.shape == (5, 2) and float(ours.epistemic.sum()) > 0
    torch.testing.assert_close(ours.mean, net(rows(), edges))


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.e, self.p, self.d, self.o = nn.Embedding(20, 8), nn.Embedding(20, 8), nn.Dropout(0.3), nn.Linear(8, 2)

    def forward(self, tokens, positions):
        return self.o(self.d(self.e(tokens) + self.p(positions)))


def test_an_argument_as_long_as_the_batch_is_not_cut_in_silence():
    net, tokens, positions = Positions().eval(), torch.randint(0, 20, (6, 6)), torch.arange(6)
    with pytest.raises(ValueError, match="row_axis="):
        db.predict(net, (tokens, positions))
    for x, axes in (
        ((tokens, positions), (0, None)),
        ({"tokens": tokens, "positions": positions}, {"tokens": 0, "positions": None}),
    ):
        torch.testing.assert_close(db.predict(net, x, row_axis=axes).mean, net(tokens, positions))


@pytest.mark.parametrize("length", [4, 5])
def test_the_last_layer_is_integrated_with_rows_along_the_second_axis(length):
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 2)).eval()
    x = torch.randn(length, 5, 6)
    ours = db.predict(net, x, row_axis=1)
    torch.testing.assert_close(ours.mean, net(x))
    torch.testing.assert_close(ours.std, db.predict(net, x.transpose(0, 1)).std.transpose(0, 1))


# What is bound to the network itself ----------------------------------------------------------------------------------


class Feature(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.5))
        self.d, self.o = nn.Dropout(0.1), nn.Linear(16, 2)
        self.body[2].register_forward_hook(self.keep)

    def keep(self, module, args, out):
        self.feature = out

    def forward(self, x):
        self.body(x)
        return self.o(self.d(self.feature))


def test_a_hook_that_is_a_method_stores_what_the_draw_reads():
    net = Feature().eval().requires_grad_(False)
    net(rows(1))
    assert_right(net, 3 * rows(1))


def patched_by_lambda(net):
    forward = net[0].forward
    net[0].forward = lambda x: 3 * forward(x)


def patched_by_partial(net):
    net[0].forward = functools.partial(lambda layer, x: 3 * F.linear(x, layer.weight), net[0])


@pytest.mark.parametrize("patch", [patched_by_lambda, patched_by_partial])
def test_a_patched_forward_is_run(patch):
    net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))
    x = rows()
    db.predict(net, x)
    patch(net)
    assert_right(net, x)


def test_global_hooks_run():
    net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3)).eval()
    handle = nn.modules.module.register_module_forward_hook(
        lambda m, args, out: 2 * out if isinstance(m, nn.Linear) else out
    )
    try:
        torch.testing.assert_close(db.predict(net, rows()).mean, net(rows()))
    finally:
        handle.remove()


# Nothing remembered goes stale ----------------------------------------------------------------------------------------


class Annealed(nn.Module):
    def __init__(self, drop_prob=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.o = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.settings = {"p": drop_prob}

    def forward(self, x):
        h = F.dropout(self.a(x), self.settings["p"], self.training)
        return self.o(F.dropout(torch.tanh(self.b(h)), 0.3, self.training))


@pytest.mark.parametrize("start, end", [(0.0, 0.4), (0.4, 0.0), (0.2, 0.6)])
def test_a_functional_drop_probability_that_changes_between_calls_is_followed(start, end):
    net = Annealed(start)
    db.predict(net, rows())
    net.settings["p"] = end
    assert_right(net, rows())


def test_a_layer_that_was_swapped_is_used():
    net = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Dropout(0.5), nn.Linear(8, 2)).eval()
    db.predict(net, rows())
    net[0] = nn.Linear(6, 8)
    torch.testing.assert_close(db.predict(net, rows()).mean, net(rows()))


# The network is left as it was ----------------------------------------------------------------------------------------


def test_buffers_and_parameters_assigned_in_a_forward_pass_stay_the_networks_own():
    class Assigned(Net):
        def __init__(self):
            super().__init__(lambda m, h: h)
            self.register_buffer("last", torch.zeros(1, 16))

        def middle(self, h):
            self.last = h * 2
            return h

    net = Assigned().eval()
    db.predict(net, rows())
    assert torch.isfinite(net.state_dict()["last"].sum())


def test_weights_dropped_by_assignment_are_drawn_and_left_alone():
    class WeightDrop(Net):
        def __init__(self):
            super().__init__(lambda m, h: h)
            self.raw = nn.Parameter(self.a.weight.detach().clone())

        def forward(self, x):
            self.a.weight = nn.Parameter(F.dropout(self.raw, 0.5, self.training))
            return self.o(self.a(x))

    net = WeightDrop().eval()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    assert db.predict(net, rows()).epistemic.sum() > 0
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_lazy_modules_are_refused_until_initialised():
    net = nn.Sequential(nn.LazyLinear(4), nn.Dropout(0.5), nn.LayerNorm(4))
    with pytest.raises(ValueError, match="is lazy"):
        db.predict(net, rows())
    assert net[0].has_uninitialized_params()
    net(rows())
    assert db.predict(net, rows()).std.shape == (5, 4)


# Attention and padding ------------------------------------------------------------------------------------------------


def test_a_query_that_sees_no_key_keeps_its_dropout_elsewhere():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q = nn.Linear(6, 6)

        def forward(self, x, mask):
            p = 0.5 if self.training else 0.0
            return F.scaled_dot_product_attention(self.q(x), x, x, attn_mask=mask[:, None, :], dropout_p=p)

    net, x = Attention().eval(), torch.randn(3, 4, 6)
    mask = torch.ones(3, 4, dtype=torch.bool)
    whole = db.draws(copy.deepcopy(net), (x, mask), n_draws=50)
    padded = mask.clone()
    padded[0] = False
    drawn = db.draws(net, (x, padded), n_draws=50)
    assert torch.isfinite(drawn).all() and (drawn[:, 0] == 0).all()
    torch.testing.assert_close(drawn[:, 1:], whole[:, 1:])
    torch.testing.assert_close(db.draws(net, (x, mask), n_draws=50), whole)


# Transforms inside the forward pass -----------------------------------------------------------------------------------


def test_dropout_under_a_vmap_of_the_networks_own_is_refused():
    class Ensemble(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(1, 6, 3).repeat(8, 1, 1))

        def forward(self, x):
            member = lambda w: F.dropout(x, 0.5, self.training) @ w  # noqa: E731
            return torch.func.vmap(member, randomness="different")(self.w).mean(0)

    with pytest.raises((NotImplementedError, RuntimeError), match=r"transform|vmap"):
        db.predict(Ensemble(), rows())


# Outputs and inputs of every kind -------------------------------------------------------------------------------------


def test_complex_outputs_have_the_variance_of_both_parts():
    net = Module(lambda m, x: m.o(m.d(x) + 0j), d=nn.Dropout(0.3), o=nn.Linear(6, 2, dtype=torch.complex64)).eval()
    ours, drawn = db.predict(net, rows(), n_draws=400), db.draws(net, rows(), n_draws=400)
    assert ours.mean.dtype == torch.complex64
    torch.testing.assert_close(ours.mean, drawn.mean(0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.epistemic, drawn.var(0, correction=0), rtol=1e-4, atol=1e-5)


def test_numbers_in_an_output_have_no_statistics():
    net = Module(lambda m, x: {"y": m.d(m.a(x)), "scale": 2.5}, a=nn.Linear(6, 2), d=nn.Dropout(0.3)).eval()
    ours = db.predict(net, rows())
    assert ours.mean["scale"] == 2.5 and ours.epistemic["scale"] is None


@pytest.mark.parametrize(
    "make", [lambda x, y: TensorDataset(x, y), lambda x, y: [{"x": a, "labels": b} for a, b in zip(x, y, strict=True)]]
)
def test_loaders_with_targets_are_taken_for_their_inputs(make):
    net = Module(lambda m, x: m.d(m.a(x)), a=nn.Linear(6, 2), d=nn.Dropout(0.3)).eval()
    net.forward = None
    del net.forward

    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, x):
            return self.net(x)

    y = torch.zeros(5, 2)
    loader = DataLoader(make(rows(), y), batch_size=2)
    wrapped = Wrapped().eval()
    torch.testing.assert_close(db.predict(wrapped, loader, progress=False).std, db.predict(wrapped, rows()).std)
    judged = db.evaluate(wrapped, loader, likelihood=db.Gaussian(1.0), progress=False)
    assert judged.n_rows == 5
