"""Random numbers under interception, against the quantiles of the source's uniforms."""

import math

import numpy as np
import pytest
import scipy.stats
import torch

import dropbayes as db
from tests.sampling.zoo.specimens import Module
from tests.tracing.fixed_source import run_with_fixed_source


def test_random_numbers_have_the_asked_distribution_and_dtype():
    out, source = run_with_fixed_source(
        lambda: (torch.rand(3, 2), torch.randn((4,), dtype=torch.float64), torch.rand_like(torch.ones(2)))
    )
    assert out[0].shape == (3, 2) and out[1].dtype == torch.float64
    assert out[1].tolist() == pytest.approx(torch.special.ndtri(torch.linspace(0.05, 0.95, 4).double()).tolist())
    assert [kind for kind, _, _ in source.kinds] == ["rand", "randn", "rand"]


def test_in_place_random_numbers_are_written():
    def fill():
        a = torch.empty(4).bernoulli_(0.5)
        b = torch.empty(4).uniform_(-1, 1)
        c = torch.empty(4).normal_(2.0, 0.0)
        d = torch.empty(4).exponential_()
        return a, b, c, d

    (a, b, c, d), _ = run_with_fixed_source(fill)
    assert a.tolist() == [1, 1, 0, 0]
    assert b.tolist() == pytest.approx([-0.9, -0.3, 0.3, 0.9])
    assert c.tolist() == [2.0] * 4
    assert d.tolist() == pytest.approx((-torch.log(torch.tensor([0.05, 0.35, 0.65, 0.95]))).tolist())


@pytest.mark.parametrize("rate", [0.0, 0.1, 3.0, 40.0, 1e4])
def test_poisson_numbers_are_those_of_their_quantile_function(rate):
    found, _ = run_with_fixed_source(lambda: torch.poisson(torch.full((500,), rate)))
    levels = torch.linspace(0.05, 0.95, 500, dtype=torch.float64).numpy()
    assert found.tolist() == scipy.stats.poisson.ppf(levels, rate).tolist()


def test_random_numbers_are_written_where_the_caller_wants_them():
    uniform, coin, normal = torch.empty(4), torch.empty(4), torch.empty(0)

    def draw():
        torch.rand(4, out=uniform)
        torch.bernoulli(torch.full((4,), 0.5), out=coin)
        return torch.randn(4, out=normal)

    out, _ = run_with_fixed_source(draw)
    assert out is normal and uniform.tolist() == pytest.approx([0.05, 0.35, 0.65, 0.95])
    assert coin.tolist() == [1, 1, 0, 0] and normal.tolist() == pytest.approx(torch.special.ndtri(uniform).tolist())


def test_coins_in_the_shape_of_whole_numbers_have_their_probability():
    out, _ = run_with_fixed_source(lambda: torch.bernoulli(torch.zeros(4, dtype=torch.int64), 0.5))
    assert out.dtype == torch.int64 and out.tolist() == [1, 1, 0, 0]


def test_whole_numbers_lie_between_bounds_of_any_kind():
    def draw():
        example, ten = torch.empty(4), torch.tensor(10)
        yield torch.randint(10, (4,))
        yield torch.randint(np.int64(5), np.int32(15), [4]) - 5
        yield torch.randint(ten, (4,))
        yield torch.randint(low=-ten, high=0, size=(4,)) + 10
        yield torch.randint_like(example, np.int64(10))
        yield torch.randint_like(input=example, high=ten, low=0)

    out, _ = run_with_fixed_source(lambda: list(draw()))
    assert [numbers.tolist() for numbers in out] == [[0, 3, 6, 9]] * 6
    assert [numbers.dtype for numbers in out] == [torch.int64] * 4 + [torch.float32] * 2


def test_comparisons_take_keywords():
    out, _ = run_with_fixed_source(lambda: torch.lt(torch.tensor([1.0, 3.0]), other=2.0))
    assert out.tolist() == [True, False]


@pytest.mark.parametrize("shape", [0.05, 0.6, 1.0, 7.0, 300.0])
def test_gamma_beta_and_dirichlet_numbers_have_their_distributions(shape):
    other, width = 2.5, 2000
    numbers = {
        "gamma": lambda m, x: x * torch.distributions.Gamma(shape, 1.0).sample(x.shape),
        "beta": lambda m, x: x * torch.distributions.Beta(shape, other).sample(x.shape),
        "dirichlet": lambda m, x: (
            x * torch.distributions.Dirichlet(torch.tensor([shape, other])).sample(x.shape)[..., 0]
        ),
    }
    for name, forward in numbers.items():
        net, x = Module(forward), torch.ones(1, width, dtype=torch.float64)
        found = db.draws(net, x, n_draws=5, sampling=db.Sampling(sampler="independent")).flatten().numpy()
        law = scipy.stats.gamma(shape) if name == "gamma" else scipy.stats.beta(shape, other)
        # Below the least float32, which torch gives in its place, the law of a small shape has an atom.
        found, least = found[found > 1e-30], law.cdf(1e-30)
        result = scipy.stats.kstest(found, lambda value, law=law, least=least: (law.cdf(value) - least) / (1 - least))
        assert result.pvalue > 1e-4, (name, result)


def test_log_normal_and_cauchy_numbers_have_their_distributions():
    numbers = {
        "log-normal": (
            lambda x: torch.empty_like(x).log_normal_(0.3, 0.7),
            scipy.stats.lognorm(0.7, scale=math.exp(0.3)),
        ),
        "Cauchy": (lambda x: torch.empty_like(x).cauchy_(1.0, sigma=2.0), scipy.stats.cauchy(1.0, 2.0)),
    }
    for name, (draw, law) in numbers.items():
        net, x = Module(lambda m, x, draw=draw: x * draw(x)), torch.ones(1, 4000, dtype=torch.float64)
        found = db.draws(net, x, n_draws=5, sampling=db.Sampling(sampler="independent"))
        assert scipy.stats.kstest(found.flatten().numpy(), law.cdf).pvalue > 1e-4, name


def test_geometric_numbers_have_their_distribution():
    net, x = Module(lambda m, x: x * torch.empty_like(x).geometric_(0.3)), torch.ones(1, 20000, dtype=torch.float64)
    counts = db.draws(net, x, n_draws=1)[0].flatten().long().bincount(minlength=12)
    expected = 20000 * torch.tensor(scipy.stats.geom(0.3).pmf(range(1, 12)))
    assert (
        counts[0] == 0
        and scipy.stats.chisquare(counts[1:12], expected * counts[1:12].sum() / expected.sum()).pvalue > 1e-4
    )


def test_the_mean_derivative_of_gamma_numbers_is_that_of_their_mean():
    """The mean of a standard gamma number is its shape."""
    net, shape = Module(lambda m, x: torch._standard_gamma(x)), torch.full((1, 20000), 0.8, requires_grad=True)
    db.function_draw(net, 0, n_draws=2)(shape).sum().backward()
    derivative = shape.grad
    assert abs(float(derivative.mean()) - 1) < 5 * float(derivative.std()) / 20000**0.5


@pytest.mark.parametrize("shapes", [((3, 1), (1, 2)), ((), (3, 2)), ((3, 2), (2,)), ((3, 2), (3, 2))])
def test_every_entry_of_broadcast_counts_and_probabilities_has_a_number_of_its_own(shapes):
    count, chance = 6 * torch.ones(shapes[0]), torch.full(shapes[1], 0.4)
    net = Module(lambda m, x: (x + torch.binomial(count, chance)).flatten(1))
    found = db.draws(net, torch.zeros(1, 3, 2), n_draws=3000)[:, 0].double()
    law = scipy.stats.binom(6, 0.4)
    torch.testing.assert_close(found.mean(0), torch.full((6,), law.mean()).double(), atol=0.1, rtol=0)
    torch.testing.assert_close(found.T.cov(), law.var() * torch.eye(6).double(), atol=0.2, rtol=0)
