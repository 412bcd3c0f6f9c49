"""Random numbers held at their means: what multiplies, what is added, what has no derivative."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dropbayes as db
from tests.sampling.zoo.specimens import Module


def variance(forward, x, **children):
    """The linear variance of a network in float64."""
    net = Module(forward, **children).double()
    return db.predict(net, x.double(), method="linear").epistemic


X = torch.tensor([[1.0, -2.0, 3.0], [0.5, 0.0, 1.0]])


def test_a_dropped_unit_has_its_square_times_p_over_1_minus_p():
    torch.testing.assert_close(variance(lambda m, x: F.dropout(x, 0.2, m.training), X), 0.25 * X.double().square())


def test_alpha_dropout_is_expanded_around_its_mean():
    keep, saturation = 0.8, -1.7580993408473766
    scale = (keep * (1 + (1 - keep) * saturation**2)) ** -0.5
    expected = keep * (1 - keep) * (scale * (X.double() - saturation)).square()
    net = Module(lambda m, x: F.alpha_dropout(x, 0.2, m.training)).double()
    prediction = db.predict(net, X.double(), method="linear")
    torch.testing.assert_close(prediction.epistemic, expected)
    torch.testing.assert_close(prediction.mean, keep * scale * X.double())


def test_gaussian_noise_has_its_own_variance():
    found = variance(lambda m, x: x + 0.3 * torch.randn_like(x), X)
    torch.testing.assert_close(found, torch.full_like(found, 0.09))


def test_uniform_noise_has_variance_one_twelfth():
    found = variance(lambda m, x: x * (1 + torch.rand_like(x)), X)
    torch.testing.assert_close(found, X.double().square() / 12)


def test_a_bernoulli_number_is_random_around_a_probability_that_may_itself_be_random():
    # p z with z of variance 1/4: Var = p (1 - p) + p² / 4, for p = 1/2 under dropout of 1/5
    found = variance(lambda m, x: torch.bernoulli(0.5 * F.dropout(torch.ones_like(x), 0.2, m.training)), X)
    torch.testing.assert_close(found, torch.full_like(found, 0.25 + 0.25 * 0.25))


@pytest.mark.parametrize("spelling", [torch.floor, lambda sum: sum.floor_()], ids=["floor", "in place"])
def test_stochastic_depth_written_with_a_floor_is_a_bernoulli_gate(spelling):
    def forward(m, x):
        return x / 0.7 * spelling(0.7 + torch.rand(len(x), 1, dtype=x.dtype)) if m.training else x

    torch.testing.assert_close(variance(forward, X), 0.3 / 0.7 * X.double().square())


def test_dropout_in_place_changes_what_else_reads_the_tensor():
    def forward(m, x):
        hidden = 2 * x
        F.dropout(hidden, 0.5, m.training, inplace=True)
        return hidden

    torch.testing.assert_close(variance(forward, X), 4 * X.double().square())


def test_a_module_that_is_left_out_adds_no_variance():
    net = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 1), nn.Dropout1d(0.5)).double()
    left = db.predict(net, X.double(), method="linear", sampling=db.Sampling(ignore_modules="0")).epistemic
    torch.testing.assert_close(left, net[1](X.double()).detach().square())


def test_tied_positions_share_one_mask():
    net = Module(lambda m, x: F.dropout(x, 0.5, m.training).sum(1)).double()
    x = torch.randn(2, 5, 3, dtype=torch.float64)
    own, tied = (
        db.predict(net, x, method="linear", sampling=db.Sampling(positions=positions)).epistemic
        for positions in ("per_position", "tied")
    )
    torch.testing.assert_close(own, x.square().sum(1))
    torch.testing.assert_close(tied, x.sum(1).square())


def refused(forward, error, words):
    with pytest.raises(error, match=words):
        db.predict(Module(forward, head=nn.Linear(3, 3)), X, method="linear")


@pytest.mark.parametrize(
    "gate",
    [
        lambda shape: (torch.rand(shape) < 0.7).to(torch.float64),
        lambda shape: (torch.rand(shape) > 0.3).double(),
        lambda shape: (0.7 >= torch.rand(shape)).type(torch.float64),  # noqa: SIM300 - the spelling is the test
    ],
    ids=["less", "more", "reversed"],
)
def test_a_comparison_of_random_numbers_that_becomes_a_number_is_a_bernoulli_gate(gate):
    found = variance(lambda m, x: x / 0.7 * gate(x.shape) if m.training else x, X)
    torch.testing.assert_close(found, 0.3 / 0.7 * X.double().square(), rtol=1e-6, atol=0)


def test_this_librarys_layers_are_linearised():
    net = nn.Sequential(db.layers.Linear(3, 2, noise=db.layers.BernoulliNoise(0.2))).double()
    drawn = db.predict(net, X.double(), n_draws=10_000).std
    torch.testing.assert_close(db.predict(net, X.double(), method="linear").std, drawn, rtol=0.03, atol=0)


def test_several_gates_of_one_random_number_and_a_choice_of_components_are_refused():
    keep, words = torch.tensor([0.6, 0.7, 0.8]), 'hard choice.*method="sampling"'
    refused(lambda m, x: (x * (torch.rand(len(x), 1) < keep)).sum(-1), NotImplementedError, words)
    for n_components in (2, 3):
        net = nn.Sequential(db.layers.Linear(3, 2, noise=db.layers.MixtureNoise(n_components)))
        with pytest.raises(NotImplementedError, match=words):
            db.predict(net, X, method="linear")


def test_a_comparison_of_random_numbers_that_chooses_is_refused():
    words = "comparison of torch.rand.*torch.bernoulli"
    refused(lambda m, x: m.head(x) * (torch.rand_like(x) < 0.7).cumsum(-1), NotImplementedError, words)


def test_a_choice_between_two_values_has_the_variance_of_its_probability():
    found = variance(lambda m, x: torch.where(torch.rand_like(x) < 0.7, 3 * x, x), X)
    torch.testing.assert_close(found, 0.3 * 0.7 * (2 * X.double()).square(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("choice", [torch.round, lambda h: h.argmax(-1, keepdim=True) + 0 * h], ids=["round", "argmax"])
def test_a_hard_choice_is_refused(choice):
    words = 'hard choice.*method="sampling"'
    refused(lambda m, x: m.head(choice(F.dropout(m.head(x), 0.5, m.training))), NotImplementedError, words)


def test_a_choice_that_no_mask_reaches_is_no_hard_choice():
    net = Module(lambda m, x: m.head(x.round()) * F.dropout(x, 0.5, m.training), head=nn.Linear(3, 3))
    assert db.predict(net, X, method="linear").epistemic.max() > 0


def test_a_branch_on_a_draw_is_refused():
    refused(lambda m, x: m.head(x) if m.training and torch.rand(()) < 0.2 else x, ValueError, "branches on a value")


class Doubling(nn.Module):
    """Doubles what it has dropped from, in place or not."""

    def __init__(self, inplace):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.inplace = nn.Linear(3, 8), nn.Linear(8, 2), inplace

    def forward(self, x):
        hidden = nn.functional.dropout(self.first(x).tanh(), 0.3, self.training)
        return self.second(hidden.mul_(2) if self.inplace else hidden * 2)


def test_a_tensor_written_into_after_its_dropout_counts_as_it_was():
    x = torch.randn(4, 3)
    ours, plain = (db.predict(Doubling(inplace).eval(), x, method="linear") for inplace in (True, False))
    torch.testing.assert_close(ours.std, plain.std)
    assert float(plain.std.min()) > 0


@pytest.mark.parametrize(
    "bend",
    [lambda h: torch.where(h > 0, h, 0.1 * h), lambda h: h * (h > 0) + 0.1 * h * (h <= 0), lambda h: h.sort(-1).values],
    ids=["where", "product", "sort"],
)
def test_a_comparison_of_what_is_dropped_has_the_derivative_of_each_side(bend):
    torch.manual_seed(0)
    net = Module(lambda m, x: m.head(bend(F.dropout(x, 0.3, m.training))), head=nn.Linear(3, 3))
    weight = net.head.weight.detach().double()
    x = torch.tensor([[-2.0, 0.5, 3.0]])  # rises, so that sorting leaves its order
    bent = bend(x).double()[0]
    found = db.predict(net, x, method="linear").epistemic[0].double()
    torch.testing.assert_close(found, 0.3 / 0.7 * (weight * bent).square().sum(1), rtol=1e-5, atol=0)


class _Dropped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, training):
        mask = torch.bernoulli(torch.full_like(x, 0.7)) / 0.7 if training else torch.ones_like(x)
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0], None


def _frozen(m, x):
    with torch.no_grad():
        h = m.d(torch.relu(m.a(x)))
    return m.o(m.e(h))


@pytest.mark.parametrize("forward", [lambda m, x: m.o(m.e(_Dropped.apply(m.a(x), m.training))), _frozen])
def test_dropout_where_derivatives_are_switched_off_is_refused(forward):
    parts = {"a": nn.Linear(4, 8), "d": nn.Dropout(0.3), "e": nn.Dropout(0.2), "o": nn.Linear(8, 2)}
    with pytest.raises(NotImplementedError, match="derivatives are switched off"):
        db.predict(Module(forward, **parts).eval(), torch.randn(3, 4), method="linear")
