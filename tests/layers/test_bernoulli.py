"""Dropout as a distribution: its draws, its divergence, and where proposition 1 is good."""

import itertools
import math

import pytest
import torch

from dropbayes.layers import Bernoulli, Concrete, DiagonalGaussian, kl_from_density
from tests.layers.families import DTYPE, kl_monte_carlo, matrix


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


def test_displayed_kl_of_the_paper_lacks_a_half():
    # The paper prints QK(σ² - log σ² - 1) + p/2 Σ mᵀm; the derivation gives half of the first term.
    kept, std, keep = 6 * torch.nn.functional.normalize(matrix(3, 5), dim=1), 0.3, 0.7
    q = Bernoulli(kept, keep, std=std)
    estimate, error = kl_monte_carlo(q, length_scale=1.0, n_draws=20_000)
    entropy = -3 * (keep * math.log(keep) + (1 - keep) * math.log(1 - keep))
    half = 0.5 * 15 * (std**2 - math.log(std**2) - 1) + keep / 2 * kept.square().sum() - entropy
    printed = 15 * (std**2 - math.log(std**2) - 1) + keep / 2 * kept.square().sum() - entropy
    assert (half - estimate).abs() < 4 * error < (printed - estimate).abs()


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


def test_dropout_is_the_limit_of_small_std_but_for_a_constant():
    # KL + QK(log σ + ½) tends to what is returned for σ = 0, which therefore depends on M, p and l as the KL does.
    kept, std = matrix(3, 2), 1e-7
    for keep_prob, length_scale in ((0.7, 1.3), (0.9, 0.2)):
        limit = Bernoulli(kept, keep_prob, std).kl(length_scale) + 6 * (math.log(std) + 0.5)
        torch.testing.assert_close(Bernoulli(kept, keep_prob).kl(length_scale), limit)


def test_a_tensor_for_a_keep_probability_is_refused():
    with pytest.raises(TypeError, match="`Concrete`"):
        Bernoulli(matrix(2, 2), torch.tensor(0.5))


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


@pytest.mark.parametrize("family", ["dropout", "bernoulli", "gaussian"])
def test_the_divergence_from_a_gaussian_density_is_that_from_its_length_scale(family):
    bias = matrix(4, 1)
    q = {
        "dropout": Bernoulli(bias, 0.7),
        "bernoulli": Bernoulli(bias, 0.7, std=0.2),
        "gaussian": DiagonalGaussian(bias, torch.full((4, 1), 0.3, dtype=DTYPE)),
    }[family]
    normal = torch.distributions.Normal(torch.zeros((), dtype=DTYPE), 0.4)
    torch.testing.assert_close(kl_from_density(q, normal), q.kl(1 / 0.4))


def test_the_divergence_of_a_gaussian_from_a_laplace_density_is_torchs():
    loc, std = matrix(4, 1), torch.full((4, 1), 0.3, dtype=DTYPE)
    laplace = torch.distributions.Laplace(torch.zeros((), dtype=DTYPE), 0.5)
    expected = torch.distributions.kl_divergence(torch.distributions.Normal(loc, std), laplace).sum()
    # The rule has 64 nodes, and the density a kink.
    torch.testing.assert_close(kl_from_density(DiagonalGaussian(loc, std), laplace), expected, rtol=2e-2, atol=0)


def test_the_joint_density_has_a_mode_at_every_mask():
    # [GG16, footnote to q(W_1)]: bi-modal for each unit, so that the joint has 2^Q modes.
    kept = torch.tensor([[1.0, -2.0], [1.5, 0.5], [-1.0, 1.0]], dtype=DTYPE)
    q = Bernoulli(kept, 0.6, std=0.2)
    modes = torch.stack([torch.tensor(z, dtype=DTYPE)[:, None] * kept for z in itertools.product((0.0, 1.0), repeat=3)])
    modes.requires_grad_()
    (slope,) = torch.autograd.grad(q.log_density(modes).sum(), modes)
    assert slope.abs().max() < 1e-3
    around = modes[:, None] + 0.05 * matrix(50, 6).reshape(1, 50, 3, 2)
    assert bool((q.log_density(modes)[:, None] > q.log_density(around)).all())
