"""The network as its own witness, of its state: what is patched, changed or assigned is followed, and left as it was.

Each group is a cause; its members differ in clothes only.
"""

import enum
import functools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dropbayes as db
from dropbayes.sampling import inspection
from tests.cases import crossed
from tests.sampling.training_loop import Net, assert_right, rows

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


class Rate(enum.Enum):
    LOW = 0.1
    HIGH = 0.5


def test_a_member_of_an_enumeration_is_itself_in_a_draw():
    net = Net(lambda m, h: F.dropout(h, 0.5 if m.rate is Rate.HIGH else 0.1, m.training))
    net.rate = Rate.HIGH
    assert db.sites(net, rows())[0].drop_prob == 0.5


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


# What chooses a branch from outside the modules -----------------------------------------------------------------------


LIE_APART, APART = [False], np.array([0])


class Copies(nn.Module):
    """A network of four copies of each row, which lie apart or beside each other as a flag says that is not its own."""

    apart = False

    def __init__(self, flag):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.d, self.o, self.flag = nn.Linear(6, 16), nn.Dropout(0.3), nn.Linear(16, 3), flag

    def forward(self, x, *given):
        h, apart = torch.tanh(self.a(x)), self.flag(self, *given)
        h = self.d(h.repeat(4, 1) if apart else h.repeat_interleave(4, 0))
        out = self.o(h).view(4, len(x), 3) if apart else self.o(h).view(len(x), 4, 3).transpose(0, 1)
        return (out * torch.arange(1.0, 5.0)[:, None, None]).tanh().sum(0)


FLAGS = {
    "a global": (lambda m: LIE_APART[0], lambda m: LIE_APART.__setitem__(0, True)),
    "an array": (lambda m: APART[0], lambda m: APART.__setitem__(0, 1)),
    "a class": (lambda m: m.apart, lambda m: setattr(Copies, "apart", True)),
    "a default": (lambda m, apart=LIE_APART: apart[0], lambda m: LIE_APART.__setitem__(0, True)),
    "a weight": (lambda m: bool(m.a.bias[0] > 9), lambda m: m.a.bias.data[0].fill_(10.0)),
}


@pytest.mark.parametrize(("name", "masks"), crossed(FLAGS, ["shared", "row"]))
def test_a_branch_that_is_chosen_from_outside_the_modules_is_followed(name, masks, monkeypatch):
    monkeypatch.setattr(Copies, "apart", False)
    LIE_APART[0], APART[0] = False, 0
    flag, change = FLAGS[name]
    net, fresh = Copies(flag), Copies(flag)
    db.draws(net, rows(4), n_draws=20, masks=masks)
    change(net), change(fresh)
    for _ in range(2):
        ours, expected = (db.draws(one, rows(4), n_draws=20, masks=masks) for one in (net, fresh))
        torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("kind", [int, float, torch.tensor])
def test_a_branch_that_an_argument_chooses_is_followed(kind):
    net, fresh = Copies(lambda m, apart: apart > 0), Copies(lambda m, apart: apart > 0)
    for apart in (0, 1, 0, 1):
        ours = db.draws(net, (rows(4), kind(apart)), n_draws=20)
        torch.testing.assert_close(ours, db.draws(fresh, (rows(4), kind(1)), n_draws=20)) if apart else None


def test_an_argument_that_says_how_many_copies_of_a_row_there_are_is_followed():
    def forward(self, x, n):
        return self.o(self.d(torch.tanh(self.a(x)).repeat(n, 1))).view(n, len(x), 3).tanh().square().sum(0)

    nets = [Net(), Net()]
    for net in nets:
        net.forward = functools.partial(forward, net)
    db.draws(nets[0], (rows(4), 1), n_draws=20)
    torch.testing.assert_close(*(db.draws(net, (rows(4), 4), n_draws=20) for net in nets))


def test_batches_that_go_two_ways_in_turn_are_inspected_once_each(monkeypatch):
    seen = []
    made = inspection._inspect
    monkeypatch.setattr(inspection, "_inspect", lambda *given: seen.append(1) or made(*given))
    net = Net(lambda m, h: h if (h < 9).all() else h.clamp(max=9))
    for _ in range(4):
        db.predict(net, rows()), db.predict(net, torch.cat([rows()[:4], 90 * rows()[4:]]))
    assert len(seen) <= 3


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


@pytest.mark.parametrize("make", [lambda: nn.Linear(16, 16), lambda: nn.Parameter(torch.randn(16))])
def test_weights_that_the_first_pass_draws_are_no_noise(make):
    def forward(m, h):
        m.made = make() if m.made is None else m.made
        return m.made(h) if isinstance(m.made, nn.Module) else h * m.made

    net = Net(forward)
    net.made = None
    with pytest.raises(ValueError, match=r"draws weights\. Run it once"):
        db.predict(net, rows())
    net(rows())
    assert_right(net.requires_grad_(False), rows())


def test_lazy_modules_are_refused_until_initialised():
    net = nn.Sequential(nn.LazyLinear(4), nn.Dropout(0.5), nn.LayerNorm(4))
    with pytest.raises(ValueError, match="is lazy"):
        db.predict(net, rows())
    assert net[0].has_uninitialized_params()
    net(rows())
    assert db.predict(net, rows()).std.shape == (5, 4)
