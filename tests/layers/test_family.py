"""What every family must satisfy: moments, products, densities, divergences and gradients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributions as td

from dropbayes.layers import (
    Bernoulli,
    Concrete,
    DiagonalGaussian,
    Mixture,
    multiplicative_gaussian,
)
from tests.layers.families import (
    DTYPE,
    NAMES,
    WITH_DENSITY,
    assert_within_standard_errors,
    families,
    matrix,
    rebuilt,
)


@pytest.mark.parametrize("name", NAMES)
def test_samples_have_the_stated_mean_and_variance(name):
    q = families()[name]
    draws = q.sample(40_000, generator=torch.Generator().manual_seed(1))
    assert_within_standard_errors(draws, q.mean)
    assert_within_standard_errors((draws - q.mean).square(), q.variance)


@pytest.mark.parametrize("name", NAMES)
def test_products_are_distributed_as_products_with_sampled_matrices(name):
    q, x, n = families()[name], matrix(3), 40_000
    local, full = q.product(x.expand(n, 3)), x @ q.sample(n)
    for statistic in (lambda y: y, torch.square, lambda y: y[:, :1] * y[:, 1:], torch.abs, torch.cos):
        a, b = statistic(local), statistic(full)
        gap = (a.mean(0) - b.mean(0)).abs()
        assert (gap < 4.5 * ((a.var(0) + b.var(0)) / n).sqrt()).all()


@pytest.mark.parametrize("name", WITH_DENSITY)
def test_densities_integrate_to_one_and_match_the_samples(name):
    q = families()[name]
    # Importance sampling of ∫q from a wide Gaussian.
    wide = td.Normal(torch.zeros(3, 2, dtype=DTYPE), 2.5)
    draws = wide.sample((200_000,))
    weights = (q.log_density(draws) - wide.log_prob(draws).sum((-2, -1))).exp()
    assert_within_standard_errors(weights[:, None], torch.ones(1, dtype=DTYPE))


@settings(deadline=None, max_examples=40)
@given(
    keep_prob=st.floats(0.02, 1.0),
    std=st.floats(1e-2, 5.0),
    scale=st.floats(0.0, 4.0),
    length_scale=st.floats(0.05, 20.0),
    seed=st.integers(0, 10),
)
def test_every_divergence_is_at_least_zero(keep_prob, std, scale, length_scale, seed):
    loc = scale * torch.randn(3, 2, dtype=DTYPE, generator=torch.Generator().manual_seed(seed))
    probs = torch.tensor([keep_prob, 1 - keep_prob], dtype=DTYPE).clamp(0.01, 0.99)
    tensor_std = torch.tensor(std, dtype=DTYPE)
    mixture = Mixture(probs / probs.sum(), torch.stack([loc, -loc]), tensor_std.expand(1, 1, 1))
    for q in (Bernoulli(loc, keep_prob, std), DiagonalGaussian(loc, tensor_std), mixture):
        assert q.kl(length_scale) >= -1e-6 * (1 + length_scale**2)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_samples_products_and_kl_are_right(name):
    kept, second = matrix(3, 2).requires_grad_(), (matrix(3, 2) + 0.1).requires_grad_()
    x = matrix(2, 3)

    def everything(a, b):
        torch.manual_seed(5)
        q = rebuilt(name, a, b)
        draws = [f for relaxed in (True, False) for f in (q.sample(2, relaxed=relaxed), q.product(x, relaxed=relaxed))]
        return *draws, q.kl(1.3), q.mean, q.variance

    assert torch.autograd.gradcheck(everything, (kept, second))


@pytest.mark.parametrize(
    "divergence",
    [
        lambda kept, scale, std: Bernoulli(kept, 0.7, std).kl(scale),
        lambda kept, scale, std: Bernoulli(kept, 0.7, std).kl_separated(scale),
        lambda kept, scale, std: Bernoulli(kept, 0.7).kl(scale) + 0 * std,
        lambda kept, scale, std: DiagonalGaussian(kept, std).kl(scale),
        lambda kept, scale, std: multiplicative_gaussian(kept, std).kl(scale),
        lambda kept, scale, std: Concrete(kept, std.log()).kl(scale),
        lambda kept, scale, std: Mixture(torch.tensor([0.4, 0.6], dtype=DTYPE), torch.stack([kept, -kept]), std.expand(1, 1, 1)).kl(scale),
        lambda kept, scale, std: Bernoulli(kept, 0.7, std).log_density(kept + 0.3) + 0 * scale,
        lambda kept, scale, std: Bernoulli(kept, 0.7, std).variance.sum() + 0 * scale,
    ],
)  # fmt: skip
def test_length_scale_and_std_are_differentiated_where_they_are_tensors(divergence):
    length_scale, std = (torch.tensor(v, dtype=DTYPE, requires_grad=True) for v in (1.3, 0.4))
    assert torch.autograd.gradcheck(divergence, (matrix(3, 2).requires_grad_(), length_scale, std))


@pytest.mark.parametrize("name", WITH_DENSITY)
def test_gradients_of_densities_are_right(name):
    kept, second, value = matrix(3, 2).requires_grad_(), matrix(3, 2).requires_grad_(), matrix(3, 2)
    assert torch.autograd.gradcheck(lambda a, b: rebuilt(name, a, b).log_density(value), (kept, second))


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (lambda: Bernoulli(matrix(2, 2), 0.0), "`keep_prob` must lie in"),
        (lambda: Bernoulli(matrix(2, 2), 1.5), "`keep_prob` must lie in"),
        (lambda: Bernoulli(matrix(2, 2), 0.5, std=-1.0), "`std` must be"),
        (lambda: Bernoulli(matrix(2, 2), 0.5).log_density(matrix(2, 2)), "must be positive for a density"),
        (lambda: Bernoulli(matrix(2, 2), 0.5).kl(-1.0), "`length_scale` must be"),
        (lambda: Bernoulli(matrix(2, 2), 0.5).kl(0.0), "`length_scale` must be"),
        (lambda: multiplicative_gaussian(matrix(2, 2), -0.1), "`noise_std`"),
        (lambda: Mixture(torch.tensor([0.5, 0.6]), matrix(2, 2, 2), torch.ones(1, 1, 1)), "sum to 1"),
        (
            lambda: Mixture(torch.tensor([0.5, 0.5]), matrix(2, 2, 2), torch.zeros(1, 1, 1)),
            "`stds` .* must be positive",
        ),
        (lambda: DiagonalGaussian(matrix(2, 2), torch.tensor([-0.1])), "`std` .* must be zero or more"),
        (lambda: Bernoulli(matrix(2, 2), 0.5, std=torch.ones(2)), "a number or a scalar tensor"),
        (lambda: Concrete(matrix(2, 2), torch.zeros(()), temperature=0.0), "`temperature` must be a positive"),
    ],
)
def test_impossible_parameters_are_refused(make, rule):
    with pytest.raises(ValueError, match=rule):
        make()


def test_a_mixture_may_have_one_deviation_for_all():
    locs = matrix(2, 4, 3)
    one, each = (Mixture(locs.new_tensor([0.3, 0.7]), locs, locs.new_full(shape, 0.2)) for shape in ((), (2, 4, 3)))
    for relaxed in (False, True):
        ours, theirs = (q.sample(5, generator=torch.Generator().manual_seed(0), relaxed=relaxed) for q in (one, each))
        torch.testing.assert_close(ours, theirs)


def test_units_can_be_looked_up():
    units = torch.tensor([2, 0, 2])
    for q in families().values():
        torch.testing.assert_close(q.at(units).mean, q.mean[units])
        torch.testing.assert_close(q.at(units).variance, q.variance[units])
    assert families()["concrete"].at(units).temperature == 1e-3
