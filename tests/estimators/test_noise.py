"""Tests of the noise model: against torch's distributions, its gradient, and what it recovers."""

import math
from dataclasses import replace

import pytest
import torch

from dropbayes.estimators import noise as noise_model
from dropbayes.estimators.noise import StudentNoise, fit_noise, noise_features
from tests.cases import slow_except

F64 = torch.float64


def noise_of(scale, shrink, nu, n_features=1, spread=0.0):
    def fill(value, *shape):
        return torch.full((1, *shape), value, dtype=F64)

    return StudentNoise(
        first=fill(0.0, n_features, 4),
        first_bias=fill(0.0, 1, 4),
        second=fill(0.0, 1, 4),
        second_bias=fill(math.log(scale), 1),
        log_shrink=fill(math.log(shrink)),
        raw_spread=fill(math.atanh(spread)),
        log_freedom=fill(math.log(nu - 3)),
        feature_mean=fill(0.0, 1, n_features),
        feature_scale=fill(1.0, 1, n_features),
    )


def test_the_density_is_the_mixture_of_students_over_shrunk_draws():
    draws = torch.randn(1, 9, 6, dtype=F64, generator=torch.Generator().manual_seed(0))
    y, features = torch.linspace(-2, 2, 6, dtype=F64)[None], torch.zeros(1, 6, 1, dtype=F64)
    centre = draws.mean(1, keepdim=True)
    students = torch.distributions.StudentT(4.0, centre + 0.3 * (draws - centre), 0.7)
    expected = students.log_prob(y[:, None]).exp().mean(1).log()
    torch.testing.assert_close(noise_model.log_density(noise_of(0.7, 0.3, 4.0), draws, features, y), expected)


@pytest.mark.slow
def test_a_narrow_core_with_wide_tails_is_told_by_scales_that_differ_from_draw_to_draw():
    """Log-normal scales: Student's t, whatever its degrees of freedom, covers too few outcomes and too many."""
    source = torch.Generator().manual_seed(6)
    sizes = torch.randn(1500, generator=source).exp()
    y, x = (sizes * torch.randn(1500, generator=source))[None], torch.zeros(1500, 1)
    noise, _ = fit_noise(torch.zeros(1, 24, 1500), x, y, weight=torch.ones(1500), n_steps=150)
    assert 0.7 < noise.spread < 1
    mixture = noise.mixture(torch.zeros(300, 1, 1, dtype=F64), x[:1], torch.zeros(1), torch.ones(1)).output(0)
    for level in (0.05, 0.25):
        reach = float(mixture.quantile(1 - level))
        assert abs(float((y.abs() <= reach).double().mean()) - (1 - 2 * level)) < 0.03


def test_the_density_of_light_tails_and_unshrunk_draws_is_the_papers():
    r"""log 1/T Σ N(y; f_t, τ⁻¹) with τ = σ⁻² [GG16, eq:predictive_dist]."""
    draws = torch.randn(1, 5, 4, dtype=F64, generator=torch.Generator().manual_seed(1))
    y, features, tau = torch.randn(1, 4, dtype=F64), torch.zeros(1, 4, 1, dtype=F64), 2.5
    exponents = -0.5 * tau * (y[:, None] - draws).square()
    paper = exponents.logsumexp(1) - math.log(5) - 0.5 * math.log(2 * math.pi) + 0.5 * math.log(tau)
    ours = noise_model.log_density(noise_of(tau**-0.5, 1.0, 1e7), draws, features, y)
    torch.testing.assert_close(ours, paper, rtol=1e-5, atol=1e-5)


def test_the_derivatives_of_the_density_are_those_of_finite_differences():
    source = torch.Generator().manual_seed(0)
    draws, y, features = (torch.randn(1, *shape, dtype=F64, generator=source) for shape in ((5, 7), (7,), (7, 1)))
    noise = noise_of(0.7, 0.3, 5.0, spread=0.4)
    learned = {name: getattr(noise, name).requires_grad_() for name in noise_model._LEARNED}

    def density(*values):
        moved = replace(noise, **dict(zip(learned, values, strict=True)))
        return noise_model.log_density(moved, draws, features, y)

    assert torch.autograd.gradcheck(density, tuple(learned.values()))


def test_the_mixture_in_the_units_of_y_has_the_fitted_density():
    source = torch.Generator().manual_seed(2)
    noise, x = noise_of(0.7, 0.4, 5.0, 4, spread=0.6), torch.randn(3, 2)
    draws = torch.randn(8, 3, 1, dtype=F64, generator=source)
    mean, scale, y = torch.tensor([10.0], dtype=F64), torch.tensor([3.0], dtype=F64), torch.randn(3, 1, dtype=F64)
    mixture = noise.mixture(draws, x, mean, scale)
    standard = noise_model.log_density(noise, draws.permute(2, 0, 1), torch.zeros(1, 3, 4, dtype=F64), y.T)
    torch.testing.assert_close(mixture.log_density(10 + 3 * y), standard[0] - math.log(3.0))
    assert mixture.freedom == pytest.approx(5.0)


@pytest.mark.slow
def test_the_fit_recovers_the_scale_and_uses_inputs_only_when_they_matter():
    source = torch.Generator().manual_seed(0)
    x = torch.rand(600, 1, generator=source) * 4 - 2
    draws = 0.01 * torch.randn(2, 6, 600, generator=source)
    log_sigma = torch.stack([torch.full((600,), math.log(0.5)), -1.0 + 0.8 * x[:, 0]])
    y = log_sigma.exp() * torch.randn(2, 600, generator=source)
    noise, scores = fit_noise(draws, x, y, weight=torch.ones(600), n_steps=150)
    fitted = noise.log_scale(noise_features(x, draws))
    assert fitted[0].std() < 0.01 and (fitted[0].mean() - math.log(0.5)).abs() < 0.1
    slope = torch.linalg.lstsq(torch.stack([torch.ones(600), x[:, 0]], 1), fitted[1]).solution[1]
    assert 0.6 < slope < 1.0
    truth = torch.distributions.Normal(torch.zeros(()), log_sigma.exp()).log_prob(y).mean(1)
    assert ((scores - truth).abs() < 0.06).all()


@pytest.mark.parametrize("n_steps", slow_except([50, 150], 50))
def test_draws_that_equal_their_outcomes_leave_the_noise_of_grades(n_steps):
    latent = torch.randn(300, generator=torch.Generator().manual_seed(0))

    def grades(seed):
        noise = torch.randn(300, generator=torch.Generator().manual_seed(seed))
        return (latent + 0.5 * noise).round().clamp(-2, 2)

    x, y, draws = latent[:, None], grades(1)[None], torch.stack([grades(2 + i) for i in range(24)])[None]
    noise, _ = fit_noise(draws, x, y, weight=torch.ones(300), n_steps=n_steps)
    assert noise.log_scale(noise_features(x, draws)).exp().median() > 0.05
    distinct = y + 0.01 * torch.arange(300)  # without ties, nothing is moved
    assert torch.equal(noise_model._without_ties(distinct[0], None), distinct[0])


@pytest.mark.slow
def test_weights_decide_which_rows_the_scale_describes():
    source = torch.Generator().manual_seed(3)
    draws, x = torch.zeros(1, 4, 400), torch.zeros(400, 1)
    y = torch.randn(1, 400, generator=source) * torch.cat([torch.full((200,), 0.1), torch.full((200,), 2.0)])
    weight = torch.cat([torch.ones(200), torch.full((200,), 1e-4)])
    heavy, light = (fit_noise(draws, x, y, weight=w, n_steps=50)[0] for w in (weight, weight.flip(0)))
    assert heavy.second_bias.exp() < 0.15 < 1.0 < light.second_bias.exp()
    rescale, _ = fit_noise(draws, x, y, weight=7 * weight, n_steps=50)
    torch.testing.assert_close(rescale.second_bias, heavy.second_bias, rtol=1e-3, atol=1e-3)


def test_a_row_has_the_same_scale_alone_and_among_others():
    source = torch.Generator().manual_seed(4)
    draws, x = torch.randn(2, 6, 50, generator=source), torch.randn(50, 3, generator=source)
    noise, _ = fit_noise(draws, x, torch.randn(2, 50, generator=source), weight=torch.ones(50), n_steps=5)
    sampled, one = draws.permute(1, 2, 0).double(), torch.ones(2, dtype=F64)
    together = noise.mixture(sampled, x, one, one)
    alone = noise.mixture(sampled[:, 17:18], x[17:18], one, one)
    assert torch.equal(alone.scale[:, 0], together.scale[:, 17])
    assert torch.equal(alone.location[:, 0], together.location[:, 17])
