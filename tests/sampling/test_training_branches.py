"""What a network does in training alone: randomness is drawn, everything else stays as in evaluation.

A branch that is no dropout (a softmax in evaluation alone, a normalisation by the batch) keeps the flag of evaluation,
also beside bare random numbers; a flag that the network itself keeps up or down is left where it is.
"""

import os

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dropbayes as db
from tests.cases import crossed, slow_except
from tests.sampling.loop import assert_functions, assert_law, made, may_be_refused, network, unchanged
from tests.sampling.training_loop import rows

# Bare random numbers beside a branch that is no dropout ---------------------------------------------------------------


class DropPath(nn.Module):
    def forward(self, x):
        return x * x.new_empty(len(x), 1).bernoulli_(0.8).div_(0.8) if self.training else x


class DropPathByUniform(nn.Module):
    def forward(self, x):
        return x * (torch.rand(len(x), 1, dtype=x.dtype) + 0.8).floor() / 0.8 if self.training else x


@pytest.mark.parametrize("seed", slow_except(range(3), 0))
def test_a_path_is_dropped_in_a_network_that_gives_a_row_nearly_what_it_gives_another(seed):
    def forward(self, x):
        h = self.first(x)
        for layer in self.layers:
            h = h + self.path(layer(h))
        return self.last(h)

    torch.manual_seed(seed)
    net = network(forward, first=nn.Linear(6, 16), path=DropPathByUniform(), last=nn.LayerNorm(16)).eval()
    net.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(12)])
    net.first.weight.data *= 1e-5
    net.first.bias.data += 300
    assert float(db.predict(net, rows(1), n_draws=20).std.mean()) > 0.01


class Noise(nn.Module):
    def forward(self, x):
        return x + 0.3 * torch.randn_like(x) if self.training else x


class Jitter(nn.Module):
    def forward(self, x):
        return x * torch.empty_like(x).uniform_(0.5, 1.5) if self.training else x


class Leaky(nn.Module):
    def forward(self, x):
        return F.rrelu(x, 0.1, 0.9, self.training)


NOISES = [DropPath, DropPathByUniform, Noise, Jitter, Leaky, lambda: nn.Dropout(0.3)]
NAMES = ["drop path", "drop path by rand", "normal noise", "uniform noise", "rrelu", "dropout"]


class Head(nn.Module):
    """A network whose end is `function` in evaluation alone."""

    def __init__(self, noise, function):
        super().__init__()
        self.a, self.noise, self.o, self.function = nn.Linear(6, 16), noise(), nn.Linear(16, 3), function

    def forward(self, x):
        y = self.o(self.noise(torch.tanh(self.a(x))))
        return y if self.training else self.function(y)


ENDS = {
    "softmax": lambda y: y.softmax(-1),
    "temperature": lambda y: y / 3,
    "sigmoid": torch.sigmoid,
    "clamp": lambda y: y.clamp(0, 1),
    "units of the target": lambda y: 40 * y + 300,
    "one column": lambda y: torch.cat([y[:, :1].exp(), y[:, 1:]], 1),
}


@pytest.mark.parametrize("noise", NOISES, ids=NAMES)
def test_probabilities_in_evaluation_alone_stay_probabilities(noise):
    net, x = made(lambda: (Head(noise, ENDS["softmax"]), rows(3)))
    with may_be_refused():
        assert_law(net, x, evaluation=("",))
        torch.testing.assert_close(db.predict(net, x).mean.sum(-1), torch.ones(3))


@pytest.mark.parametrize(("name", "noise"), crossed(ENDS, [DropPath, Noise]))
def test_an_end_of_evaluation_alone_stays_beside_bare_random_numbers(name, noise):
    net, x = made(lambda: (Head(noise, ENDS[name]), rows(3)))
    with may_be_refused():
        assert_law(net, x, evaluation=("",), n_draws=270)
        assert_functions(net, x)


class Normalised(nn.Module):
    """A batch normalisation of one's own, by the batch in training."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.full((16,), 0.2))

    def forward(self, x):
        return x - (x.mean(0) if self.training else self.mean)


class Scaled(nn.Module):
    """Divides by the batch's largest value in training, by a remembered one in evaluation."""

    def forward(self, x):
        return x / (x.abs().max() if self.training else 2.0)


class Quantised(nn.Module):
    """Rounds in evaluation alone."""

    def forward(self, x):
        return x if self.training else (4 * x).round() / 4


class Updated(Normalised):
    """The same with a running mean that training moves."""

    def forward(self, x):
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return super().forward(x)


@pytest.mark.parametrize(
    ("middle", "noise"), crossed([Normalised, Scaled, Quantised, Updated], [DropPath, Noise, DropPathByUniform])
)
def test_a_layer_with_a_training_branch_of_its_own_stays_in_evaluation(middle, noise):
    layers = nn.Linear(6, 16), nn.Tanh(), noise(), middle(), nn.Linear(16, 3)
    net, x = made(lambda: (nn.Sequential(*layers), rows(3)))
    with may_be_refused(), unchanged(net, x):
        assert_law(net, x, evaluation=("3",), n_draws=270)


def test_a_class_that_draws_and_has_another_end_in_training_is_refused():
    def forward(self, x):
        y = self.o(self.a(x) + (0.3 * torch.randn(len(x), 16) if self.training else 0))
        return y if self.training else y.softmax(-1)

    net, x = made(lambda: (network(forward, a=nn.Linear(6, 16), o=nn.Linear(16, 3)), rows(3)))
    with may_be_refused() as refused:
        db.predict(net, x)
    assert refused


def more_outputs():
    def forward(self, x):
        h = self.d(torch.relu(self.a(x)))
        return (self.o(h), self.aux(h)) if self.training else self.o(h)

    return network(forward, a=nn.Linear(6, 16), d=Noise(), o=nn.Linear(16, 2), aux=nn.Linear(16, 2)), rows(3)


def test_outputs_of_training_alone_are_left_out_beside_noise():
    net, x = made(more_outputs)
    with may_be_refused():
        assert_law(net, x, evaluation=("",), n_draws=270)


def auxiliary_head_and_functional_dropout():
    def forward(self, x):
        h = F.dropout(torch.relu(self.a(x)), 0.3, training=self.training)
        return (self.o(h), self.aux(h)) if self.training else self.o(h)

    return network(forward, a=nn.Linear(6, 16), o=nn.Linear(16, 2), aux=nn.Linear(16, 2)), rows(3)


def averaged_teacher():
    def forward(self, x):
        return self.student(x) if self.training else self.teacher(x)

    make = lambda: nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 2))  # noqa: E731
    return network(forward, student=make(), teacher=make()), rows(3)


def drawn_classes():
    def forward(self, x):
        y = self.o(self.d(torch.relu(self.a(x))))
        return y, torch.multinomial(y.softmax(-1), 1)

    return network(forward, a=nn.Linear(6, 16), d=nn.Dropout(0.3), o=nn.Linear(16, 3)), rows(3)


def boxes_above_a_threshold():
    def forward(self, x):
        y = self.o(self.d(torch.relu(self.a(x)))).view(-1)
        return y[y > 0.1]

    return network(forward, a=nn.Linear(6, 16), d=nn.Dropout(0.3), o=nn.Linear(16, 8)), rows(1)


def _dropped_and_added(x, y, training: bool):
    return torch.dropout(x, 0.3, training) + y


def compiled_function():
    def forward(self, x):
        return self.o(self.function(torch.relu(self.a(x)), self.b(x), self.training))

    net = network(forward, a=nn.Linear(6, 16), b=nn.Linear(6, 16), o=nn.Linear(16, 2))
    net.function = torch.jit.script(_dropped_and_added)
    return net, rows(3)


def loss_over_the_batch():
    def forward(self, x):
        y = self.o(self.d(torch.relu(self.a(x))))
        return y, y.softmax(-1).mean(0).var()

    return network(forward, a=nn.Linear(6, 16), d=nn.Dropout(0.3), o=nn.Linear(16, 3)), rows(3)


UNDRAWN = [
    auxiliary_head_and_functional_dropout, averaged_teacher, drawn_classes, boxes_above_a_threshold, compiled_function,
    loss_over_the_batch,
]  # fmt: skip


@pytest.mark.parametrize(("make", "ask"), crossed(UNDRAWN, [db.predict, db.draws, db.sites]))
def test_an_error_on_what_cannot_be_drawn_names_an_argument(make, ask):
    net, x = made(make)
    with unchanged(net, x), may_be_refused():
        ask(net, x)


# Dropout that is always on --------------------------------------------------------------------------------------------


class Always(nn.Dropout):
    """Cannot be switched into evaluation."""

    def __init__(self, p=0.5):
        super().__init__(p)
        self.training = True

    def train(self, mode):
        return self


class SwitchedOn(nn.Dropout):
    def train(self, mode=True):
        return super().train(True)


class Property(nn.Dropout):
    training = property(lambda self: True, lambda self, mode: None)


class Functional(nn.Module):
    def forward(self, x):
        return F.dropout(x, 0.5, True)


class NoisyAlways(Always):
    """The same with bare random numbers."""

    def forward(self, x):
        return x * (torch.rand_like(x) < 0.5) * 2 if self.training else x


ALWAYS = [Always, SwitchedOn, Property, Functional, NoisyAlways]


@pytest.mark.parametrize(("kind", "beside"), crossed(ALWAYS, [True, False]))
def test_dropout_that_cannot_be_switched_off_is_drawn(kind, beside):
    other = nn.Dropout(0.1) if beside else nn.Identity()
    layers = nn.Linear(6, 16), nn.ReLU(), kind(), nn.Linear(16, 16), nn.Tanh(), other, nn.Linear(16, 2)
    net, x = made(lambda: (nn.Sequential(*layers), rows(3)))
    assert {site.path for site in db.sites(net, x)} == ({"2", "5"} if beside else {"2"})
    assert_law(net, x)
    assert net[2].training == kind().eval().training


def test_dropout_alone_in_training_is_the_usual_recipe():
    net = made(lambda: (nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 2)), None))[0]
    net[2].train()
    with unchanged(net, rows()):
        assert_law(net, rows())


# Dropout that stays off -----------------------------------------------------------------------------------------------


class Frozen(nn.Module):
    """A backbone that train() leaves in evaluation."""

    def __init__(self, end=None):
        super().__init__()
        self.back = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.5))
        self.d, self.o, self.end = nn.Dropout(0.1), nn.Linear(16, 3), end

    def train(self, mode=True):
        super().train(mode)
        self.back.eval()
        return self

    def forward(self, x):
        y = self.o(self.d(self.back(x)))
        return y if self.training or self.end is None else self.end(y)


class FrozenInForward(Frozen):
    def train(self, mode=True):
        return nn.Module.train(self, mode)

    def forward(self, x):
        self.back.eval()
        return super().forward(x)


class Off(nn.Dropout):
    def train(self, mode=True):
        return super().train(False)


class FrozenChild(Frozen):
    def __init__(self, end=None):
        super().__init__(end)
        self.back[2] = Off(0.5)

    def train(self, mode=True):
        return nn.Module.train(self, mode)


class FrozenNoise(Frozen):
    def __init__(self, end=None):
        super().__init__(end)
        self.back[2] = Noise()


@pytest.mark.parametrize(
    ("kind", "end"),
    crossed([Frozen, FrozenInForward, FrozenChild, FrozenNoise], [None, lambda y: y.log_softmax(-1), lambda y: y / 2]),
)
def test_dropout_that_the_network_keeps_off_stays_off(kind, end):
    net, x = made(lambda: (kind(end), rows(3)))
    assert [site.path for site in db.sites(net, x) if site.drop_prob != 0] == ["d"]
    assert_law(net, x, evaluation=("",), n_draws=270)


def rate_of_the_batch(self, x):
    return self.o(F.dropout(self.a(x), float(torch.sigmoid(x.mean())), self.training))


def mixed_rows(self, x):
    h = self.a(x)
    return self.o(0.9 * h + 0.1 * h[torch.randperm(len(h))] if self.training else h)


@pytest.mark.parametrize("forward", [rate_of_the_batch, mixed_rows])
def test_rows_that_depend_on_each_other_in_training_alone_are_refused(forward):
    net, x = made(lambda: (network(forward, a=nn.Linear(6, 16), o=nn.Linear(16, 3)), rows(3)))
    with pytest.raises(ValueError, match="permutes its rows, or drops with a probability that depends on them all"):
        db.predict(net, x)
    assert_law(net, x, sampling=db.Sampling(row_axis=None))


def test_rows_mixed_in_training_are_left_as_they_are_by_the_remedy_that_the_refusal_names():
    class Mixed(nn.Module):
        def forward(self, x):
            share = np.random.beta(0.4, 0.4)
            return share * x + (1 - share) * x[torch.randperm(len(x))] if self.training else x

    net, x = made(lambda: (nn.Sequential(Mixed(), nn.Linear(6, 16), nn.Dropout(0.3), nn.Linear(16, 3)), rows(3)))
    with pytest.raises(ValueError, match=r"augmentation, name its module in Sampling\(ignore_modules=...\)"):
        db.predict(net, x)
    assert_law(net, x, evaluation=("0",), sampling=db.Sampling(ignore_modules="Mixed"))


# A coin of the system -------------------------------------------------------------------------------------------------


class CoinOfTheSystem(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.d, self.o = nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1)

    def forward(self, x):
        h = self.d(torch.relu(self.a(x)))
        return self.o(h * 0.5 if self.training and os.urandom(1)[0] < 128 else h)


def test_a_coin_that_no_seed_controls_is_refused_every_time():
    for _ in range(12):
        with pytest.raises(NotImplementedError, match="cannot be keyed to a seed"):
            db.predict(CoinOfTheSystem(), torch.randn(5, 4))


# Dropout in the training branch of another class ----------------------------------------------------------------------


class Skipping(nn.Module):
    """Stochastic depth, scaled in training alone; `gate` draws whether the layer is skipped."""

    def __init__(self, gate):
        super().__init__()
        self.layers, self.drop, self.gate = nn.ModuleList(nn.Linear(8, 8) for _ in range(2)), nn.Dropout(0.2), gate

    def forward(self, x):
        for layer in self.layers:
            if not self.training:
                x = x + torch.relu(layer(x))
            elif not self.gate():
                x = x + torch.relu(layer(self.drop(x))) / 0.7
        return x


GATES = {
    "of one number": lambda: torch.rand(1) < 0.3,
    "of a Python number": lambda: torch.rand(()).item() < 0.3,
    "of ones and zeros": lambda: torch.bernoulli(torch.tensor(0.3)).item(),
}


@pytest.mark.parametrize("gate", GATES)
def test_dropout_in_a_branch_that_is_scaled_in_training_is_switched_on(gate):
    net, x = made(lambda: (nn.Sequential(Skipping(GATES[gate]), nn.Linear(8, 2)), torch.randn(3, 8)))
    assert {site.kind for site in db.sites(net, x)} >= {"dropout"}
    with unchanged(net, x):
        assert_law(net, x)
    assert_functions(net, x)


class OwnDrop(nn.Module):
    def forward(self, x):
        return x * (torch.rand_like(x) > 0.5) * 2 if self.training else x


def test_dropout_of_ones_own_in_a_branch_that_no_probe_takes_is_refused():
    net, x = made(lambda: (Skipping(GATES["of ones and zeros"]), torch.randn(3, 8)))
    net.drop = OwnDrop()
    with pytest.raises(ValueError, match="rand in drop"):
        db.predict(net, x, n_draws=30)
