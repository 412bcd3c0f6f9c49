"""Tests of the approximating distributions: moments, densities and divergences, each computed another way."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributions as td

from dropbayes.variational import (
    Bernoulli,
    Concrete,
    DiagonalGaussian,
    Mixture,
    kl_monte_carlo,
    multiplicative_gaussian,
)

DTYPE = torch.float64


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def matrix(*shape):
    return torch.randn(shape, dtype=DTYPE)


def families():
    locs = matrix(3, 3, 2)
    probs = torch.tensor([0.5, 0.2, 0.3], dtype=DTYPE)
    stds = torch.rand(3, 3, 2, dtype=DTYPE) + 0.2
    return {
        "bernoulli": Bernoulli(matrix(3, 2), 0.7),
        "non-diminishing bernoulli": Bernoulli(matrix(3, 2), 0.7, std=0.4),
        "gaussian": DiagonalGaussian(matrix(3, 2), torch.tensor(0.3, dtype=DTYPE)),
        "multiplicative gaussian": multiplicative_gaussian(matrix(3, 2), 0.5),
        "mixture": Mixture(probs, locs, stds),
        "low-rank mixture": Mixture(probs, locs, stds, matrix(3, 3, 2, 1)),
        "concrete": Concrete(matrix(3, 2), torch.tensor(-0.4, dtype=DTYPE), temperature=1e-3),
    }


NAMES = list(families())
WITH_DENSITY = [name for name in NAMES if name not in ("bernoulli", "concrete")]


def assert_within_standard_errors(samples, truth, k=4.5):
    error = samples.std(0) / math.sqrt(len(samples))
    assert ((samples.mean(0) - truth).abs() <= k * error + 1e-9).all()


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


def test_mixture_density_is_that_of_torch_distributions():
    q, value = families()["low-rank mixture"], matrix(5, 3, 2)
    covariance = torch.diag_embed(q.stds.square()) + q.factors @ q.factors.mT
    oracle = td.MixtureSameFamily(
        td.Categorical(q.probs.expand(3, 3)),
        td.MultivariateNormal(q.locs.movedim(0, 1), covariance.movedim(0, 1)),
    )
    torch.testing.assert_close(q.log_density(value), oracle.log_prob(value).sum(-1))


def test_bernoulli_is_the_two_component_mixture():
    kept, value = matrix(4, 3), matrix(6, 4, 3)
    q = Bernoulli(kept, 0.8, std=0.3)
    mixture = Mixture(
        torch.tensor([0.8, 0.2], dtype=DTYPE),
        torch.stack([kept, torch.zeros_like(kept)]),
        torch.full((1, 1, 1), 0.3, dtype=DTYPE),
    )
    torch.testing.assert_close(q.log_density(value), mixture.log_density(value))
    torch.testing.assert_close(q.kl_separated(1.7), mixture.kl_separated(1.7))
    torch.testing.assert_close(q.mean, mixture.mean)
    torch.testing.assert_close(q.variance, mixture.variance)


def test_reparametrisation_is_the_papers_line():
    # W = z(M + σε) + (1 - z)σε [GG16, eq:reparam_reg], from the same uniforms and normals.
    kept, generator = matrix(3, 2), torch.Generator()
    draw = Bernoulli(kept, 0.6, std=0.5).sample(generator=generator.manual_seed(3))
    generator.manual_seed(3)
    z = (torch.rand(3, 1, generator=generator, dtype=DTYPE) < 0.6).to(DTYPE)
    epsilon = torch.randn(3, 2, generator=generator, dtype=DTYPE)
    torch.testing.assert_close(draw, z * (kept + 0.5 * epsilon) + (1 - z) * 0.5 * epsilon)


def test_small_std_tends_to_dropout():
    kept = matrix(3, 2)

    def draw(std):
        return Bernoulli(kept, 0.6, std=std).sample(200, generator=torch.Generator().manual_seed(3))[:1]

    gaps = [(draw(std) - draw(0.0)).abs().max().item() for std in (1e-2, 1e-4, 1e-300)]
    assert gaps[0] < 0.1 and gaps[1] < 1e-3 and gaps[2] < 1e-298


def test_dropout_is_masked_matrix_multiplication_as_torch_does_it():
    # torch's inverted dropout with stored weight θ is z·M with M = θ/p.
    stored, x, keep = matrix(4, 2), matrix(4), 0.75
    q = Bernoulli(stored / keep, keep)
    outcomes = {tuple((x * torch.tensor(z) / keep @ stored).tolist()) for z in itertools.product([0.0, 1.0], repeat=4)}
    drawn = q.product(x.expand(400, 4))
    assert all(min(math.dist(row, outcome) for outcome in outcomes) < 1e-12 for row in drawn.tolist())
    torch.testing.assert_close(q.mean, stored)


# --- the KL --------------------------------------------------------------------------------------------------------


def test_gaussian_kl_is_that_of_torch_distributions_and_zero_at_the_prior():
    q = DiagonalGaussian(matrix(3, 2), torch.rand(3, 2, dtype=DTYPE) + 0.1)
    prior = td.Normal(torch.zeros(3, 2, dtype=DTYPE), 1 / 2.5)
    torch.testing.assert_close(q.kl(2.5), td.kl_divergence(td.Normal(q.loc, q.std), prior).sum())
    at_prior = DiagonalGaussian(torch.zeros(3, 2, dtype=DTYPE), torch.tensor(0.4, dtype=DTYPE))
    assert at_prior.kl(2.5).abs() < 1e-12


def test_multiplicative_gaussian_kl_is_exact():
    q = multiplicative_gaussian(matrix(3, 2), 0.5)
    exact = td.kl_divergence(td.Normal(q.loc, 0.5 * q.loc.abs()), td.Normal(torch.zeros_like(q.loc), 1 / 1.3)).sum()
    torch.testing.assert_close(q.kl(1.3), exact)


def test_multiplicative_gaussian_has_the_variance_of_dropout_when_matched():
    stored, keep = matrix(3, 2), 0.8
    gaussian = multiplicative_gaussian(stored, math.sqrt((1 - keep) / keep))
    torch.testing.assert_close(gaussian.variance, Bernoulli(stored / keep, keep).variance)


@pytest.mark.parametrize("length_scale", [0.3, 1.0, 4.0])
def test_kl_of_separated_components_is_that_of_monte_carlo(length_scale):
    kept = 6 * torch.nn.functional.normalize(matrix(3, 5), dim=1)  # 20 σ apart: proposition 1 is exact
    q = Bernoulli(kept, 0.7, std=0.3)
    estimate, error = kl_monte_carlo(q, length_scale=length_scale, n_draws=20_000)
    assert (q.kl_separated(length_scale) - estimate).abs() < 4 * error
    factors = 0.2 * matrix(3, 2, 4, 2)
    mixture = Mixture(
        torch.tensor([0.5, 0.3, 0.2], dtype=DTYPE),
        torch.stack([torch.full((2, 4), 8.0 * i, dtype=DTYPE) for i in range(3)]),
        torch.full((1, 1, 1), 0.4, dtype=DTYPE),
        factors,
    )
    estimate, error = kl_monte_carlo(mixture, length_scale=length_scale, n_draws=20_000)
    assert (mixture.kl_separated(length_scale) - estimate).abs() < 4 * error


@pytest.mark.parametrize(("norm", "std"), [(0.0, 0.5), (0.3, 0.5), (1.0, 0.5), (2.0, 0.5), (1.0, 2.0)])
def test_exact_kl_is_that_of_monte_carlo_where_components_overlap(norm, std):
    kept = norm * torch.nn.functional.normalize(matrix(2, 3), dim=1)
    q = Bernoulli(kept, 0.7, std=std)
    estimate, error = kl_monte_carlo(q, length_scale=1.2, n_draws=200_000)
    assert (q.kl(1.2) - estimate).abs() < 4 * error + 1e-12
    assert q.kl_separated(1.2) <= q.kl(1.2)


def test_kl_is_zero_when_posterior_is_prior():
    # M = 0 and σ = 1/l: the mixture is the prior. Proposition 1 is wrong by its worst, the mask's entropy, here.
    q = Bernoulli(torch.zeros(4, 3, dtype=DTYPE), 0.7, std=0.5)
    entropy = -(0.7 * math.log(0.7) + 0.3 * math.log(0.3))
    assert q.kl(2.0).abs() < 1e-10
    torch.testing.assert_close(q.kl_separated(2.0).item(), -4 * entropy)


def test_proposition_one_errs_less_as_columns_grow_and_never_by_more_than_the_entropy():
    """Per row with μ ~ N(0, I_K): the gap is H(z|w), which falls with ‖m‖/σ ~ √K/σ."""
    entropy = -(0.9 * math.log(0.9) + 0.1 * math.log(0.1))
    gaps = {}
    for std, columns in itertools.product((0.2, 1.0), (1, 4, 16, 64)):
        q = Bernoulli(matrix(400, columns), 0.9, std=std)
        gaps[std, columns] = (q.overlap() / 400).item() / entropy
    assert all(0 <= gap <= 1 for gap in gaps.values())
    for std in (0.2, 1.0):
        errors = [gaps[std, columns] for columns in (1, 4, 16, 64)]
        assert errors == sorted(errors, reverse=True)
    # Good: 64 columns, or 16 at σ = 0.2. Bad: one column (a single output unit) at any σ, and few columns at σ = 1.
    assert gaps[0.2, 16] < 1e-4 and gaps[1.0, 64] < 1e-3
    assert gaps[0.2, 1] > 0.1 and gaps[1.0, 1] > 0.7 and gaps[1.0, 4] > 0.3


def test_proposition_one_errs_less_as_columns_grow_for_three_components_too():
    entropy, gaps = math.log(3), []
    for columns in (1, 4, 32):
        q = Mixture(
            torch.full((3,), 1 / 3, dtype=DTYPE), matrix(3, 50, columns), torch.full((1, 1, 1), 0.7, dtype=DTYPE)
        )
        estimate, error = kl_monte_carlo(q, length_scale=1.0, n_draws=2000)
        gaps.append((estimate - q.kl_separated(1.0)).item() / (50 * entropy))
        assert -4 * error.item() / (50 * entropy) < gaps[-1] < 1
    assert gaps[0] > 0.5 > gaps[1] > 0.05 > 0.01 > abs(gaps[2])


def test_displayed_kl_of_the_paper_lacks_a_half():
    # The paper prints QK(σ² - log σ² - 1) + p/2 Σ mᵀm; the derivation gives half of the first term.
    kept, std, keep = 6 * torch.nn.functional.normalize(matrix(3, 5), dim=1), 0.3, 0.7
    q = Bernoulli(kept, keep, std=std)
    estimate, error = kl_monte_carlo(q, length_scale=1.0, n_draws=20_000)
    entropy = -3 * (keep * math.log(keep) + (1 - keep) * math.log(1 - keep))
    half = 0.5 * 15 * (std**2 - math.log(std**2) - 1) + keep / 2 * kept.square().sum() - entropy
    printed = 15 * (std**2 - math.log(std**2) - 1) + keep / 2 * kept.square().sum() - entropy
    assert (half - estimate).abs() < 4 * error < (printed - estimate).abs()


def test_constant_of_proposition_one_has_no_log_two_pi():
    # The statement has -K(1 + log 2π): with it the KL of q = p (one component) would not be 0.
    one = Mixture(torch.ones(1, dtype=DTYPE), torch.zeros(1, 2, 3, dtype=DTYPE), torch.ones(1, 1, 1, dtype=DTYPE))
    assert one.kl(1.0).abs() < 1e-12


def test_concrete_kl_is_dropouts_for_a_fixed_probability():
    kept, keep = matrix(3, 2), 0.8
    logit = torch.tensor(math.log(0.2 / 0.8), dtype=DTYPE)
    torch.testing.assert_close(Concrete(kept, logit).kl(1.5), Bernoulli(kept, keep).kl(1.5))
    torch.testing.assert_close(Concrete(kept, logit).mean, Bernoulli(kept, keep).mean)


def test_concrete_learns_the_drop_probability_that_minimises_its_kl():
    # d/dp of p·a - H(p) is 0 at p = sigmoid(-a) with a = l²‖m‖²/(2Q): the exact optimum.
    kept = 0.5 * torch.ones(4, 3, dtype=DTYPE)
    drop_logit = torch.zeros((), dtype=DTYPE, requires_grad=True)
    optimizer = torch.optim.LBFGS([drop_logit], max_iter=50, tolerance_grad=1e-12)

    def closure():
        optimizer.zero_grad()
        loss = Concrete(kept, drop_logit).kl(1.0)
        loss.backward()
        return loss

    optimizer.step(closure)
    torch.testing.assert_close(drop_logit.item(), (kept.square().sum() / (2 * 4)).item(), rtol=1e-4, atol=1e-6)


def test_the_kl_of_a_mixture_lies_between_its_lower_and_its_upper_bound_and_is_estimated_without_bias():
    for gap in (0.0, 0.5, 3.0):
        locs = torch.stack([torch.zeros(2, 2, dtype=DTYPE), torch.full((2, 2), gap, dtype=DTYPE)])
        q = Mixture(
            torch.tensor([0.3, 0.7], dtype=DTYPE),
            locs,
            torch.full((1, 1, 1), 0.6, dtype=DTYPE),
            0.3 * matrix(2, 2, 2, 1),
        )
        exact, error = kl_monte_carlo(q, length_scale=1.2, n_draws=40_000)
        assert q.kl_separated(1.2) - 4 * error <= exact <= q.kl(1.2) + 4 * error
        stratified = torch.stack([q.kl_sampled(1.2, n_draws=10) for _ in range(400)])
        combined = (error**2 + stratified.var() / 400).sqrt()
        assert (stratified.mean() - exact).abs() < 4 * combined


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


def test_dropout_is_the_limit_of_small_std_but_for_a_constant():
    # KL + QK(log σ + ½) tends to what is returned for σ = 0, which therefore depends on M, p and l as the KL does.
    kept, std = matrix(3, 2), 1e-7
    for keep_prob, length_scale in ((0.7, 1.3), (0.9, 0.2)):
        limit = Bernoulli(kept, keep_prob, std).kl(length_scale) + 6 * (math.log(std) + 0.5)
        torch.testing.assert_close(Bernoulli(kept, keep_prob).kl(length_scale), limit)


def test_a_zero_weight_under_multiplicative_noise_costs_finitely():
    loc = torch.tensor([[0.0, 1.0]], dtype=DTYPE, requires_grad=True)
    q = multiplicative_gaussian(loc, 0.5)
    q.kl(1.0).backward()
    assert q.kl(1.0).isfinite() and loc.grad.isfinite().all()
    torch.testing.assert_close(q.kl(1.0), td.kl_divergence(td.Normal(q.loc, q.std), td.Normal(0.0, 1.0)).sum())


# --- gradients and numerics ----------------------------------------------------------------------------------------


def rebuilt(name, kept, second):
    """The family as a function of two differentiable tensors."""
    probs = torch.tensor([0.5, 0.5], dtype=DTYPE)
    if name == "bernoulli":
        return Bernoulli(kept * second, 0.7)
    if name == "non-diminishing bernoulli":
        return Bernoulli(kept * second, 0.7, std=0.4)
    if name == "gaussian":
        return DiagonalGaussian(kept, second.exp())
    if name == "multiplicative gaussian":
        return multiplicative_gaussian(kept * second, 0.5)
    if name == "concrete":
        return Concrete(kept, second.sum(), temperature=0.5)
    factors = None if name == "mixture" else torch.stack([kept, second])[..., None]
    return Mixture(probs, torch.stack([kept, second]), torch.stack([second, kept]).exp(), factors)


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


def test_a_tensor_for_a_keep_probability_is_refused():
    with pytest.raises(TypeError, match="`Concrete`"):
        Bernoulli(matrix(2, 2), torch.tensor(0.5))


@pytest.mark.parametrize("name", WITH_DENSITY)
def test_gradients_of_densities_are_right(name):
    kept, second, value = matrix(3, 2).requires_grad_(), matrix(3, 2).requires_grad_(), matrix(3, 2)
    assert torch.autograd.gradcheck(lambda a, b: rebuilt(name, a, b).log_density(value), (kept, second))


def test_exact_kl_differentiates():
    kept = matrix(3, 2).requires_grad_()
    assert torch.autograd.gradcheck(lambda a: Bernoulli(a, 0.7, std=0.8).kl(1.3), kept)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("drop_prob", [1e-6, 0.5, 1 - 1e-6])
@pytest.mark.parametrize("std", [0.0, 1e-300, 1e-30, 1.0])
def test_extreme_parameters_stay_finite(drop_prob, std, dtype):
    kept = torch.randn(3, 2, dtype=dtype, requires_grad=True)
    q = Bernoulli(kept, 1 - drop_prob, std=std)
    logit = torch.tensor(math.log(drop_prob) - math.log1p(-drop_prob), dtype=dtype, requires_grad=True)
    concrete = Concrete(kept, logit)
    loss = q.kl(1.0) + q.overlap() + q.sample().sum() + concrete.kl(1.0) + concrete.sample().sum()
    loss.backward()
    for value in (loss, kept.grad, logit.grad, q.variance, concrete.variance):
        assert value.isfinite().all()
    torch.testing.assert_close(concrete.keep_prob.item(), 1 - drop_prob, rtol=1e-5, atol=1e-9)


def test_products_with_a_row_of_zeros_have_finite_gradients():
    loc = matrix(3, 2).requires_grad_()
    multiplicative_gaussian(loc, 0.5).product(torch.zeros(4, 3, dtype=DTYPE)).sum().backward()
    assert loc.grad.isfinite().all()


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


def test_units_can_be_looked_up():
    units = torch.tensor([2, 0, 2])
    for q in families().values():
        torch.testing.assert_close(q.at(units).mean, q.mean[units])
        torch.testing.assert_close(q.at(units).variance, q.variance[units])
    assert families()["concrete"].at(units).temperature == 1e-3
