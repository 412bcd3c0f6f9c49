"""The bound against the exact evidence, and objectives beyond the bound."""

import copy
import itertools
import math

import pytest
import scipy.stats
import torch
from torch import nn

from dropbayes.layers import (
    BernoulliNoise,
    ConcreteNoise,
    GaussianNoise,
    Linear,
    MixtureNoise,
    Prior,
    kl_constant,
    parameter_groups,
)
from dropbayes.likelihoods import Categorical, Gaussian, predictive_log_density
from dropbayes.processes import exact_process, process_of
from dropbayes.training import Optimization, fit
from dropbayes.training.objective import kl_divergence, negative_elbo, row_misfit
from tests.training.small_networks import DTYPE, PRIOR, net_and_data


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def bayesian_linear_regression():
    """One weight, 8 rows: the prior N(0, l⁻²), the exact posterior and the log evidence, in closed form."""
    x, length_scale, tau = torch.randn(8, 1, dtype=DTYPE), 0.8, 2.0
    y = 1.5 * x + torch.randn(8, 1, dtype=DTYPE) / math.sqrt(tau)
    covariance = x @ x.T / length_scale**2 + torch.eye(8, dtype=DTYPE) / tau
    zero = torch.zeros(8, dtype=DTYPE)
    evidence = torch.distributions.MultivariateNormal(zero, covariance).log_prob(y[:, 0])
    precision = (length_scale**2 + tau * x.square().sum()).item()
    mean = (tau * (x * y).sum()).item() / precision
    return x, y, length_scale, tau, evidence.item(), mean, precision**-0.5


@pytest.mark.parametrize(("shift", "widen"), [(0.0, 1.0), (0.5, 1.0), (0.0, 3.0)])
def test_the_regression_bound_meets_the_evidence_at_the_posterior_and_lies_below_elsewhere(shift, widen):
    # [GG16, eq:L:VI, eq:L:GP-VI]: log p(Y|X) - L = KL(q ‖ posterior), here between two Gaussians.
    x, y, length_scale, tau, evidence, mean, std = bayesian_linear_regression()
    q_mean, q_std = mean + shift, widen * std
    net = Linear(1, 1, bias=False, noise=GaussianNoise(q_std / abs(q_mean))).to(DTYPE)
    nn.init.constant_(net.weight, q_mean)
    prior = Prior(length_scale=length_scale)
    outputs = net(x.expand(20_000, 8, 1).reshape(-1, 1)).reshape(20_000, 8, 1)  # [draw, row, 1], distinct masks
    bound = -8 * negative_elbo(net, outputs, y, likelihood=Gaussian(tau), prior=prior, n_data=8)
    per_draw = Gaussian(tau).log_density(outputs, y).sum(1)
    standard_error = per_draw.std().item() / math.sqrt(20_000)
    normal = torch.distributions.Normal
    gap = torch.distributions.kl_divergence(normal(q_mean, q_std), normal(mean, std)).item()
    assert abs(bound.item() - (evidence - gap)) < 4 * standard_error
    assert gap > 0 or (shift, widen) == (0.0, 1.0)


NOISES = {
    "bernoulli": BernoulliNoise(0.2, std=0.1),
    "nearly no dropout": BernoulliNoise(1e-9, std=0.1),
    "gaussian": GaussianNoise(0.3),
    "two components": MixtureNoise(2, std=0.1),
    "twenty overlapping components": MixtureNoise(20, std=0.1),
    "low rank": MixtureNoise(5, rank=1, std=0.1),
}


@pytest.mark.parametrize("name", NOISES)
@pytest.mark.parametrize("bias_length_scale", [None, 1.0, 10.0])
@pytest.mark.parametrize("at_the_posterior", [True, False])
def test_the_bound_of_every_family_lies_below_the_evidence(name, bias_length_scale, at_the_posterior):
    # Linear regression with the default prior, Q = 20, N = 30; None is a layer without a bias. The expected misfit is
    # exact: E(y - xw - b)² = (y - x E[w] - E[b])² + x² Var[w] + Var[b].
    x, tau = torch.randn(30, 20, dtype=DTYPE), 2.0
    y = x @ torch.randn(20, 1, dtype=DTYPE) + torch.randn(30, 1, dtype=DTYPE) / math.sqrt(tau)
    has_bias = bias_length_scale is not None
    scales = torch.tensor([1.0] * 20 + [bias_length_scale] * has_bias, dtype=DTYPE)
    columns = torch.cat([x, torch.ones(30, 1, dtype=DTYPE)], 1)[:, : len(scales)]
    covariance = columns / scales**2 @ columns.T + torch.eye(30, dtype=DTYPE) / tau
    evidence = torch.distributions.MultivariateNormal(torch.zeros(30, dtype=DTYPE), covariance).log_prob(y[:, 0])
    layer = Linear(20, 1, bias=has_bias, noise=NOISES[name]).to(DTYPE)
    if at_the_posterior:
        posterior = torch.linalg.solve(torch.diag(scales**2) + tau * columns.T @ columns, tau * columns.T @ y)
        layer.weight.data.copy_(posterior[:20].T)
        if has_bias:
            layer.bias.data.copy_(posterior[20])
    mean, variance = layer.moments(x)
    expected = (0.5 * math.log(tau / (2 * math.pi)) - 0.5 * tau * ((y - mean).square() + variance)).sum()
    assert expected - kl_divergence(layer, prior=Prior(bias_length_scale=bias_length_scale)) < evidence


@pytest.mark.parametrize("noise", [GaussianNoise(0.4), BernoulliNoise(0.2, std=0.3, drop_bias=True)])
def test_the_bound_under_a_laplace_prior_of_the_bias_lies_below_the_evidence(noise):
    # y = b + noise, the input being 0: the evidence is an integral over b.
    tau, y = 2.0, torch.tensor([[0.9], [1.4], [1.1]], dtype=DTYPE)
    laplace = torch.distributions.Laplace(torch.zeros((), dtype=DTYPE), 0.7)
    b = torch.linspace(-12, 12, 20_001, dtype=DTYPE)
    joint = Gaussian(tau).log_density(b[:, None, None].expand(-1, 3, 1), y).sum(1) + laplace.log_prob(b)
    evidence = joint.logsumexp(0) + math.log(24 / 20_000)
    layer = Linear(1, 1, noise=noise).to(DTYPE)
    gap = []
    for bias in (0.3, 0.8, 1.1):
        nn.init.constant_(layer.bias, bias)
        mean, variance = layer.moments(torch.zeros(3, 1, dtype=DTYPE))
        misfit = (0.5 * math.log(tau / (2 * math.pi)) - 0.5 * tau * ((y - mean).square() + variance)).sum()
        without = kl_divergence(layer, prior=Prior(per_layer={"bias": 0.0}))
        gap.append(evidence - misfit + kl_divergence(layer, prior=Prior(bias_distribution=laplace)) - without)
    assert all(value > 0 for value in gap) and min(gap) < 1.0


def test_a_gaussian_density_of_biases_is_their_length_scale_and_no_other_is_a_decay():
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Dropout(0.2), nn.Linear(4, 1)).to(DTYPE)
    normal = torch.distributions.Normal(torch.zeros((), dtype=DTYPE), 0.25)
    by_density = kl_divergence(net, prior=Prior(bias_distribution=normal))
    torch.testing.assert_close(by_density, kl_divergence(net, prior=Prior(bias_length_scale=4.0)))
    prior = Prior(bias_distribution=torch.distributions.Laplace(0.0, 0.5))
    (gradient,) = torch.autograd.grad(kl_divergence(net, prior=prior), net[0].bias)
    torch.testing.assert_close(gradient, net[0].bias.detach().sign() / 0.5)
    with pytest.raises(ValueError, match="bias_distribution"):
        parameter_groups(net, precision=1.0, prior=prior, n_data=10)
    with pytest.raises(ValueError, match="RandomBias"):
        process_of(net, prior)
    with pytest.raises(ValueError, match="whole line"):
        Prior(bias_distribution=torch.distributions.Uniform(0.0, 1.0))


@pytest.mark.parametrize("applies_to", ["active", "stored"])
@pytest.mark.parametrize("keep_prob", [0.9, 0.5])
def test_the_best_bound_of_one_weight_lies_below_the_evidence_of_the_process_of_its_prior(applies_to, keep_prob):
    # y = 8 at x = 1 with τ = 1: log N(8; 0, 1 + l⁻²) with l = 1 is -17.27, which a KL of another prior would exceed.
    x, y, prior = torch.ones(1, 1, dtype=DTYPE), torch.full((1, 1), 8.0, dtype=DTYPE), Prior(applies_to=applies_to)
    net = nn.Sequential(Linear(1, 1, bias=False, noise=BernoulliNoise(1 - keep_prob, std=0.3))).to(DTYPE)
    evidence = exact_process(process_of(net, prior), x, y, precision=1.0).log_marginal_likelihood
    if applies_to == "active":
        assert evidence == pytest.approx(scipy.stats.norm.logpdf(8.0, scale=math.sqrt(2)))
    bounds = []
    for std, weight in itertools.product((0.1, 0.3, 0.7, 1.0), torch.linspace(0.0, 8.0, 17)):
        net[0].noise.fixed_std = std
        net[0].weight.data.fill_(weight.item())
        mean, variance = net[0].moments(x)
        misfit = 0.5 * (math.log(2 * math.pi) + (y - mean).square() + variance).sum()
        bounds.append(-misfit.item() - kl_divergence(net, prior=prior).item())
    assert evidence - 20 < max(bounds) < evidence


def mixture_of(layer, grid):
    """The density of a layer's one weight on a grid: the paper's two Gaussians."""
    kept, p, std = (layer.weight / layer.noise.keep_prob).item(), layer.noise.keep_prob, layer.noise.std
    normal = torch.distributions.Normal
    return p * normal(kept, std).log_prob(grid).exp() + (1 - p) * normal(0.0, std).log_prob(grid).exp()


@pytest.mark.parametrize("weights", [(0.1, 0.1), (1.2, 1.1), (2.0, -1.0)])
def test_the_bound_of_the_papers_own_q_lies_below_the_evidence_of_a_small_network(weights):
    # y = w₂ relu(w₁x), two weights: evidence and expected log-likelihood by integration over a grid.
    x = torch.linspace(-1, 2, 6, dtype=DTYPE)[:, None]
    y = 1.3 * torch.relu(x)
    net = nn.Sequential(*(Linear(1, 1, bias=False, noise=BernoulliNoise(0.2, std=0.15)) for _ in range(2))).to(DTYPE)
    net[0].weight.data.fill_(weights[0])
    net[1].weight.data.fill_(weights[1])
    grid = torch.linspace(-6, 6, 801, dtype=DTYPE)
    step = (grid[1] - grid[0]).item()
    hidden = torch.relu(x[None, :, 0] * grid[:, None])
    outputs = grid[None, :, None] * hidden[:, None, :]  # [w₁, w₂, row]
    log_likelihood = (0.5 * math.log(4.0 / (2 * math.pi)) - 2.0 * (y[:, 0] - outputs).square()).sum(-1)
    log_prior = torch.distributions.Normal(0.0, 1.0).log_prob(grid)
    evidence = (log_likelihood + log_prior[:, None] + log_prior).flatten().logsumexp(0) + 2 * math.log(step)
    q = mixture_of(net[0], grid)[:, None] * mixture_of(net[1], grid)
    assert (q.sum() * step**2).item() == pytest.approx(1.0, abs=1e-6)
    bound = (q * log_likelihood).sum() * step**2 - kl_divergence(net, prior=Prior())
    assert bound < evidence
    draws = torch.stack([torch.stack([layer.posterior().sample(20_000)[:, 0, 0] for layer in net])])[0]
    sampled = (draws[1, :, None] * torch.relu(draws[0, :, None] * x[:, 0]))[..., None]
    estimate = -6 * negative_elbo(net, sampled, y, likelihood=Gaussian(4.0), prior=Prior(), n_data=6)
    error = Gaussian(4.0).log_density(sampled, y).sum(1).std() / math.sqrt(20_000)
    assert (estimate - bound).abs() < 4 * error


def test_precision_and_length_scale_are_learned_by_the_gradient_of_the_bound():
    net, x, y = net_and_data(outputs=2)
    output = net(x).detach()

    def loss(tau, length_scale):
        prior = Prior(length_scale=length_scale, bias_length_scale=0.2)
        return negative_elbo(net, output, y, likelihood=Gaussian(tau), prior=prior, n_data=40)

    values = [torch.tensor(v, dtype=DTYPE, requires_grad=True) for v in (3.0, 0.7)]
    assert torch.autograd.gradcheck(loss, values)


def test_without_dropout_the_objective_is_that_of_map():
    # p = 1: q is a point, and the loss is the negative log joint density but for constants free of weights.
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).to(DTYPE)
    x, y, prior = torch.randn(6, 3, dtype=DTYPE), torch.randn(6, 1, dtype=DTYPE), Prior(length_scale=1.7)
    loss = 6 * negative_elbo(net, net(x), y, likelihood=Gaussian(2.0), prior=prior, n_data=6)
    normal, zero = torch.distributions.Normal, torch.zeros((), dtype=DTYPE)
    log_joint = normal(net(x), math.sqrt(0.5)).log_prob(y).sum()
    log_joint = log_joint + sum(normal(zero, zero + 1 / 1.7).log_prob(p).sum() for p in net.parameters())
    n_weights = sum(p.numel() for p in net.parameters())
    torch.testing.assert_close(loss, -log_joint - 0.5 * n_weights * math.log(2 * math.pi))


def test_dropout_on_some_layers_is_map_on_the_others():
    # The gradient in an undropped layer's weights is that of the log joint density averaged over the others' masks.
    net = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Dropout(0.5), nn.Linear(2, 1)).to(DTYPE)
    x, y, prior = torch.randn(5, 2, dtype=DTYPE), torch.randn(5, 1, dtype=DTYPE), Prior()
    hidden = torch.tanh(net[0](x))
    masks = torch.tensor(list(itertools.product([0.0, 2.0], repeat=2)), dtype=DTYPE)
    outputs = torch.stack([net[3](hidden * mask) for mask in masks])
    expected_density = Gaussian(2.0).log_density(outputs, y).sum(1).mean()
    log_prior = torch.distributions.Normal(0.0, 1.0).log_prob(net[0].weight).sum()
    expected = torch.autograd.grad(-(expected_density + log_prior), net[0].weight, retain_graph=True)[0]
    loss = 5 * negative_elbo(net, outputs, y, likelihood=Gaussian(2.0), prior=prior, n_data=5)
    torch.testing.assert_close(torch.autograd.grad(loss, net[0].weight)[0], expected)


def test_the_alpha_divergence_goes_from_the_bound_to_the_predictive_density():
    net, x, y = net_and_data(outputs=2)
    outputs = torch.stack([net(x) for _ in range(5)])
    setting = {"likelihood": Gaussian(2.0), "prior": PRIOR, "n_data": 12}
    bound = negative_elbo(net, outputs, y, **setting)
    torch.testing.assert_close(negative_elbo(net, outputs, y, alpha=1e-7, **setting), bound, rtol=1e-5, atol=1e-5)
    predictive = -predictive_log_density(Gaussian(2.0), outputs, y).mean() + kl_divergence(net, prior=PRIOR) / 12
    torch.testing.assert_close(negative_elbo(net, outputs, y, alpha=1.0, **setting), predictive)
    assert bound >= negative_elbo(net, outputs, y, alpha=0.5, **setting) >= predictive  # power means are ordered
    with pytest.raises(ValueError, match=r"must be \[draw, row, ...\]"):
        negative_elbo(net, outputs[0], y, alpha=0.5, **setting)
    with pytest.raises(ValueError, match=r"`alpha` must lie in \[0, 1\]"):
        negative_elbo(net, outputs, y, alpha=2.0, **setting)


def test_the_alpha_divergence_of_one_weight_is_the_integral_of_li_and_gal():
    # -1/α log E_z p(y|z)^α over the two masks of one unit, by hand.
    outcomes, y = torch.tensor([[[0.0]], [[2.0]]], dtype=DTYPE), torch.tensor([[0.7]], dtype=DTYPE)
    densities = torch.distributions.Normal(outcomes[:, 0, 0], math.sqrt(0.5)).log_prob(y[0, 0]).exp()
    expected = -((densities**0.3).mean()).log() / 0.3
    got = row_misfit(Gaussian(2.0), outcomes, y, alpha=0.3)
    torch.testing.assert_close(got, expected[None])


@pytest.mark.parametrize(
    "noise",
    [ConcreteNoise(0.3), MixtureNoise(2, std=0.4), BernoulliNoise(0.3, std=0.2, drop_bias=True), GaussianNoise(0.4)],
)
def test_the_moments_of_every_family_give_the_expected_misfit_and_its_gradient_in_all_parameters(noise):
    layer = Linear(3, 2, noise=noise).to(DTYPE)
    x, y = torch.randn(4, 3, dtype=DTYPE), torch.randn(4, 2, dtype=DTYPE)
    with torch.no_grad():
        draws = torch.stack([x[row] @ layer.posterior().sample(40_000) for row in range(4)], 1)
        if (q := layer.noise.bias_posterior(layer.bias[:, None])) is not None:
            draws = draws + q.sample(40_000, 4)[..., 0]
        else:
            draws = draws + layer.bias
        sampled = -Gaussian(2.0).log_density(draws, y)

    def expected(mean, variance):  # -E log N(y; ŷ, 1/τ) = -log N(y; E ŷ, 1/τ) + τ/2 Var ŷ
        return row_misfit(Gaussian(2.0), mean, y) + variance.sum(-1)

    assert ((expected(*layer.moments(x)) - sampled.mean(0)).abs() < 4.5 * sampled.std(0) / 200).all()
    names, values = zip(*layer.named_parameters(), strict=True)

    def misfit(*parameters):
        moments = torch.func.functional_call(
            _Moments(layer), {f"layer.{n}": p for n, p in zip(names, parameters, strict=True)}, (x,)
        )
        return expected(*moments)

    assert torch.autograd.gradcheck(misfit, tuple(v.detach().clone().double().requires_grad_() for v in values))


class _Moments(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer.moments(x)


@pytest.mark.parametrize("nonlinearity", [torch.relu, torch.tanh, torch.sin])
def test_a_mask_passes_through_a_nonlinearity_that_is_zero_at_zero(nonlinearity):
    # [GG16, section "Insights"]: σ(z∘(xW + b)) = z∘σ(xW + b), so dropping a unit draws its weights and its bias at once.
    x, weight, bias = torch.randn(5, 3, dtype=DTYPE), torch.randn(3, 4, dtype=DTYPE), torch.randn(4, dtype=DTYPE)
    z = torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=DTYPE)
    torch.testing.assert_close(nonlinearity(x @ (weight * z) + bias * z), z * nonlinearity(x @ weight + bias))
    assert not torch.allclose(torch.sigmoid(x @ (weight * z) + bias * z), z * torch.sigmoid(x @ weight + bias))


def test_the_classification_bound_lies_below_the_evidence_and_near_it():
    # [GG16, prop:lower_bound_class], two weights: the evidence by integrating over a grid.
    x, labels = torch.tensor([[1.0], [2.0], [-1.0]], dtype=DTYPE), torch.tensor([0, 0, 1])
    grid = torch.linspace(-8, 8, 401, dtype=DTYPE)
    weights = torch.cartesian_prod(grid, grid)
    outputs = torch.einsum("ni,go->gno", x, weights)
    log_prior = torch.distributions.Normal(torch.zeros((), dtype=DTYPE), 1.0).log_prob(weights).sum(1)
    joint = Categorical().log_density(outputs, labels).sum(1) + log_prior
    evidence = (joint.logsumexp(0) + 2 * math.log(grid[1] - grid[0])).item()
    posterior = joint.softmax(0)
    mean = posterior @ weights
    std = (posterior @ (weights - mean).square()).sqrt().mean()
    net = Linear(1, 2, bias=False, noise=GaussianNoise((std / mean.abs().mean()).item())).to(DTYPE)
    with torch.no_grad():
        net.weight.copy_(mean[:, None])
    draws = net(x.repeat(20_000, 1)).reshape(20_000, 3, 2)
    bound = -3 * negative_elbo(net, draws, labels, likelihood=Categorical(), prior=Prior(length_scale=1.0), n_data=3)
    assert evidence - 0.5 < bound.item() < evidence


def test_auxiliary_weights_integrate_to_the_finite_rank_process():
    # [GG16, eq:cond-prob-with-aux], by p(y) = p(y|w) p(w) / p(w|y) at any w.
    features, tau = torch.relu(torch.randn(5, 3, dtype=DTYPE)) / math.sqrt(3), 2.0
    y, w = torch.randn(5, dtype=DTYPE), torch.randn(3, dtype=DTYPE)
    eye = torch.eye(5, dtype=DTYPE)
    normal = torch.distributions.MultivariateNormal
    precision = torch.eye(3, dtype=DTYPE) + tau * features.T @ features
    posterior = normal(tau * torch.linalg.solve(precision, features.T @ y), precision_matrix=precision)
    likelihood = Gaussian(tau).log_density((features @ w)[:, None], y[:, None]).sum()
    prior = normal(torch.zeros(3, dtype=DTYPE), torch.eye(3, dtype=DTYPE)).log_prob(w)
    marginal = normal(torch.zeros(5, dtype=DTYPE), features @ features.T + eye / tau).log_prob(y)
    torch.testing.assert_close(likelihood + prior - posterior.log_prob(w), marginal)


def test_scaling_by_the_root_of_k_is_the_same_as_the_prior_of_following_layers():
    # [GG16, eq:L:GP-MC-reg-lengthscale]: √(1/K) σ(·) W with W ~ N(0, I) is σ(·) W' with W' ~ N(0, K⁻¹ I), l² = K.
    net, x, y = net_and_data(outputs=2)
    scaled = copy.deepcopy(net)
    with torch.no_grad():
        scaled[4].weight *= math.sqrt(8)
    losses = []
    for each, factor, following in ((net, 1.0, "fan_in"), (scaled, math.sqrt(1 / 8), 1.0)):
        torch.manual_seed(3)
        prior = Prior(length_scale=0.7, hidden_length_scale=following)
        loss = negative_elbo(each, factor * each(x), y, likelihood=Gaussian(2.0), prior=prior, n_data=40)
        losses.append(loss - kl_constant(each, prior=prior) / 40)  # the change of variables itself has a constant
    torch.testing.assert_close(*losses)


def test_length_scale_and_precision_trade_off_in_the_weight_decay():
    # [GG16, section "Prior Length-scale"]: only l²/τ matters for the weights; τ alone is the noise.
    net, x, y = net_and_data(1)
    gradients = []
    for factor in (1.0, 3.0):
        torch.manual_seed(0)
        loss = negative_elbo(
            net, net(x), y, likelihood=Gaussian(2.0 * factor**2), prior=Prior(length_scale=0.5 * factor), n_data=len(y)
        )
        gradients.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(net.parameters()))]))
    torch.testing.assert_close(gradients[1], 9 * gradients[0])


@pytest.mark.slow
def test_a_short_length_scale_fits_high_frequencies_that_a_long_one_leaves_out():
    x = torch.linspace(-1, 1, 60)[:, None]
    y = torch.sin(12 * x)
    explained = []
    for length_scale in (0.02, 2.0):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(1, 60), nn.Tanh(), nn.Dropout(0.02), nn.Linear(60, 1))
        prior = Prior(length_scale=length_scale, hidden_length_scale=0.1)
        fit(
            net,
            x,
            y,
            likelihood=Gaussian(100.0),
            prior=prior,
            epochs=1500,
            batch_size=60,
            device="cpu",
            optimization=Optimization(learning_rate=0.02),
        )
        explained.append(1 - ((net.eval()(x) - y).square().mean() / y.square().mean()).item())
    assert explained[0] > 0.8 and explained[1] < 0.4


def test_targets_of_numpy_and_lists_are_those_of_a_tensor():
    net, x = nn.Sequential(nn.Dropout(0.1), nn.Linear(3, 1)).eval(), torch.ones(4, 3)
    y = torch.arange(4.0)[:, None]
    losses = [
        negative_elbo(net, net(x), one, likelihood=Gaussian(1.0), prior=Prior(), n_data=10).item()
        for one in (y, y.numpy(), y.tolist())
    ]
    assert losses == pytest.approx([losses[0]] * 3)
    with pytest.raises(TypeError, match="`y` must be a tensor or an array of numbers"):
        negative_elbo(net, net(x), "abc", likelihood=Gaussian(1.0), prior=Prior(), n_data=10)
