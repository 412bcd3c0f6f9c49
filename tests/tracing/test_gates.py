"""Masks that a network makes of its own comparisons, held at their probability."""

import pytest
import torch
from torch import nn

import dropbayes as db
from dropbayes.tracing import NEUTRAL, AtMeans, Recorder, SiteNames
from tests.cases import slow_except
from tests.sampling.loop import assert_law, made, network
from tests.sampling.training_loop import rows

KEEP = 0.7


def indexed(x):
    x = x.clone()
    x[torch.rand_like(x) >= KEEP] = 0
    return x / KEEP


def floored_in_place(x):
    mask = KEEP + torch.rand_like(x)
    mask.floor_()
    return x.div(KEEP) * mask


MASKS = {
    "compared": lambda x: x * (torch.rand_like(x) < KEEP) / KEEP,
    "compared from the left": lambda x: x * torch.gt(KEEP * torch.ones(()), torch.rand_like(x)).float() / KEEP,
    "floor": lambda x: x * (KEEP + torch.rand_like(x)).floor() / KEEP,
    "floor in place": floored_in_place,
    "floor of a difference": lambda x: x * (torch.rand_like(x) + 1 - 0.3).floor() / KEEP,
    "in place": lambda x: x * torch.empty_like(x).uniform_().lt(KEEP).div(KEEP),
    "masked_fill": lambda x: x.masked_fill(torch.rand_like(x) >= KEEP, 0) / KEEP,
    "masked_fill_": lambda x: x.clone().masked_fill_(torch.rand_like(x) >= KEEP, 0) / KEEP,
    "masked_fill by keyword": lambda x: x.masked_fill(mask=torch.ge(torch.rand_like(x), other=KEEP), value=0) / KEEP,
    "where by keyword": lambda x: torch.where(torch.rand_like(x) < KEEP, input=x / KEEP, other=torch.zeros(())),
    "where": lambda x: torch.where(torch.rand_like(x) < KEEP, x / KEEP, torch.zeros_like(x)),
    "index": indexed,
    "rows": lambda x: x * (torch.rand(len(x), 1) < KEEP).to(x.dtype) / KEEP,
    "not": lambda x: x * ~(torch.rand_like(x) >= KEEP) / KEEP,
    "bernoulli, bool": lambda x: x * torch.bernoulli(torch.full_like(x, KEEP)).bool() / KEEP,
    "bernoulli, one minus": lambda x: (
        x.masked_fill((1 - torch.empty_like(x).bernoulli_(KEEP)).to(torch.bool), 0) / KEEP
    ),
    "bernoulli, equal": lambda x: x.masked_fill(torch.bernoulli(torch.full_like(x, 0.3)) == 1, 0) / KEEP,
    "bernoulli of booleans": lambda x: x * torch.empty_like(x, dtype=torch.bool).bernoulli_(KEEP) / KEEP,
}

WAYS = (
    "compared",
    "floor",
    "in place",
    "masked_fill",
    "where",
    "index",
    "rows",
    "not",
    "bernoulli, bool",
)  # the others are kin


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_at_its_probability_changes_nothing(name):
    x = torch.randn(5, 4)
    with AtMeans(Recorder(SiteNames({}), neutral=NEUTRAL[1])):
        torch.testing.assert_close(MASKS[name](x), x)


class Masked(nn.Module):
    def __init__(self, mask):
        super().__init__()
        self.mask = mask

    def forward(self, x):
        return self.mask(x) if self.training else x


@pytest.mark.parametrize("name", slow_except(MASKS, *WAYS))
def test_a_network_with_such_a_mask_is_drawn_from_as_its_loop(name):
    net, x = made(lambda: (nn.Sequential(nn.Linear(6, 16), Masked(MASKS[name]), nn.Linear(16, 2)), rows(3)))
    assert_law(net, x, n_draws=270)


@pytest.mark.parametrize("name", MASKS)
def test_its_linear_variance_is_that_of_dropout(name):
    torch.manual_seed(0)
    first, last, x = nn.Linear(6, 16), nn.Linear(16, 2), torch.randn(3, 6)
    found = db.predict(nn.Sequential(first, Masked(MASKS[name]), last), x, method="linear").epistemic
    if name == "rows":  # one mask for all units of a row
        expected = (last(first(x)) - last.bias).detach().square() * (1 - KEEP) / KEEP
    else:
        expected = db.predict(nn.Sequential(first, nn.Dropout(1 - KEEP), last), x, method="linear").epistemic
    torch.testing.assert_close(found, expected.to(found), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", slow_except(MASKS, *WAYS))
def test_a_mask_beside_another_end_in_training_is_refused(name):
    def forward(self, x):
        h = self.a(x)
        y = self.o(MASKS[name](h) if self.training else h)
        return y if self.training else y.softmax(-1)

    net, x = made(lambda: (network(forward, a=nn.Linear(6, 16), o=nn.Linear(16, 3)), rows(3)))
    with pytest.raises(ValueError, match="changes its output in another way"):
        db.predict(net, x)


def test_a_permutation_is_noise_that_no_value_leaves_out():
    def forward(self, x):
        h = self.a(x)
        return self.o(h[:, torch.randperm(16)] if self.training else h)

    net, x = made(lambda: (network(forward, a=nn.Linear(6, 16), o=nn.Linear(16, 3)), rows(3)))
    assert db.predict(net, x, n_draws=20).epistemic.min() > 0


NOISES = {
    "a relaxed gate": lambda h: h * torch.sigmoid((0.85 + torch.rand_like(h).logit(1e-6)) / 0.5) / 0.7,
    "the largest of uniforms": lambda h: h * torch.zeros_like(h).scatter(1, torch.rand_like(h).topk(12).indices, 4 / 3),
    "uniforms compared twice": lambda h: h * ((u := torch.rand_like(h)) < 0.8) / 0.8 + 0.1 * (u > 0.9),
}


@pytest.mark.parametrize("name", NOISES)
def test_noise_of_uniforms_that_no_value_leaves_out_is_drawn_from_as_its_loop(name):
    net, x = made(lambda: (nn.Sequential(nn.Linear(6, 16), Masked(NOISES[name]), nn.Linear(16, 2)), rows(3)))
    assert_law(net, x, n_draws=270)


@pytest.mark.parametrize(
    "noise", [lambda h: h + 0.3 * (torch.rand_like(h) - 0.5), lambda h: h * (1 + 0.3 * torch.rand_like(h))]
)
def test_uniform_noise_beside_another_end_in_training_is_refused(noise):
    def forward(self, x):
        h = torch.relu(noise(self.a(x)) if self.training else self.a(x))
        return self.o(h) if self.training else self.o(h).softmax(-1)

    net, x = made(lambda: (network(forward, a=nn.Linear(6, 16), o=nn.Linear(16, 3)), rows(3)))
    with pytest.raises(ValueError, match="changes its output in another way"):
        db.predict(net, x)


def dropped_edges(gate):
    """A graph of which edges are dropped, from the list of their ends."""

    def forward(self, nodes):
        edges, weights = self.edges, torch.ones(20)
        if self.training:
            kept = gate(weights)
            edges, weights = edges[:, kept], weights[kept] / KEEP
        return torch.zeros(6, 2).index_add(0, edges[0], weights[:, None] * self.w[edges[1]])[nodes]

    net = network(forward, w=nn.Parameter(torch.randn(6, 2)))
    net.register_buffer("edges", torch.randint(6, (2, 20)))
    return net, torch.arange(5)


EDGES = {
    "compared": lambda weights: torch.rand_like(weights) < KEEP,
    "floor": lambda weights: torch.floor(KEEP + torch.rand(len(weights))).type(torch.bool),
    "cast": lambda weights: (torch.rand(len(weights)) + KEEP).int().bool(),
}


@pytest.mark.parametrize("name", EDGES)
def test_entries_that_are_dropped_by_an_index_of_several_axes_have_the_law_of_the_loop(name):
    assert_law(*made(lambda: dropped_edges(EDGES[name])))


def test_the_linear_method_refuses_an_index_of_several_axes():
    net, x = made(lambda: dropped_edges(EDGES["compared"]))
    with pytest.raises(NotImplementedError, match="hard choice"):
        db.predict(net, x, method="linear")


@pytest.mark.parametrize("draw", [lambda h: h[:, torch.randperm(16)], lambda h: h[:, torch.randint(16, (16,))]])
def test_the_linear_method_refuses_an_index(draw):
    net = nn.Sequential(nn.Linear(6, 16), Masked(draw), nn.Linear(16, 2))
    with pytest.raises(NotImplementedError, match="hard choice"):
        db.predict(net, torch.randn(3, 6), method="linear")


def test_the_linear_method_refuses_dropped_tokens():
    def forward(self, tokens):
        dropped = torch.where(torch.rand(tokens.shape) < 0.2, torch.zeros_like(tokens), tokens)
        return self.o(self.e(dropped if self.training else tokens).mean(1))

    net = network(forward, e=nn.Embedding(20, 6), o=nn.Linear(6, 2))
    with pytest.raises(NotImplementedError, match="hard choice"):
        db.predict(net, torch.randint(1, 20, (3, 7)), method="linear")
