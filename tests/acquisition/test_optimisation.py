"""Bayesian optimisation over draws, and BoTorch."""

import pytest
import torch

import dropbayes as db
from dropbayes import acquisition
from tests import small_networks


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def random_draws(*shape, seed=0, sharpness=3.0):
    return (sharpness * torch.randn(*shape, generator=generator(seed), dtype=torch.float64)).softmax(-1)


def test_botorch_posterior_holds_the_draws_as_joint_sample_paths():
    pytest.importorskip("botorch")
    net = small_networks.network(3, 16, 16, 1, drop_prob=0.3)
    model = acquisition.botorch_model(lambda x: db.draws(net, x, n_draws=20))
    x = torch.randn(2, 5, 3, generator=generator())  # two batches of five points
    draws = db.draws(net, x.reshape(10, 3), n_draws=20).reshape(20, 2, 5, 1)
    posterior = model.posterior(x)
    torch.testing.assert_close(posterior.mean, draws.mean(0))
    torch.testing.assert_close(posterior.variance, draws.var(0))
    # A sample of five points is one function at five points: some draw reproduces all of them at once.
    sample = posterior.rsample(torch.Size([8]))
    gaps = (sample[:, None] - draws).abs().amax((-1, -2))
    assert gaps.amin(1).max() == 0


def test_botorch_acquisition_of_a_batch_sees_the_correlation_of_its_points_and_has_a_gradient():
    # E max(s/2, -s) over slopes s: the two points are never both bad, which independent marginals would not know.
    pytest.importorskip("botorch")
    from botorch.acquisition import qSimpleRegret
    from botorch.sampling.index_sampler import IndexSampler

    slopes = torch.randn(50, 1, 1, generator=generator(), dtype=torch.float64)
    model = acquisition.botorch_model(lambda x: slopes * x)
    x = torch.tensor([[[0.5], [-1.0]]], dtype=torch.float64, requires_grad=True)
    value = qSimpleRegret(model, sampler=IndexSampler(torch.Size([40_000]), seed=0))(x)
    best = (slopes[:, 0] * x[0, :, 0]).amax(-1)
    assert abs(value.item() - best.mean().item()) < 4 * best.std().item() / 200
    value.sum().backward()
    assert x.grad.abs().max() > 0


@pytest.mark.slow
def test_expected_improvement_finds_the_largest_tumour_of_569_in_twenty_questions():
    # Maximise the worst area over real patients, from texture, smoothness, ...: 20 known at random, then batches of 5.
    # A random search would hold the largest with probability 40/569 = 7 %.
    pytest.importorskip("botorch")
    from botorch.acquisition.logei import qLogExpectedImprovement
    from botorch.optim import optimize_acqf_discrete

    features, _ = small_networks.standardised("breast_cancer")
    x, y = features[:, [1, 4, 5, 6, 7, 8, 9]], features[:, 23]
    known = torch.randperm(len(x), generator=generator())[:20].tolist()
    assert y.argmax() not in known
    for _ in range(4):
        net = small_networks.network(7, 50, 50, 1, drop_prob=0.2)
        small_networks.trained(net, x[known], y[known], steps=200, lr=2e-3)
        model = acquisition.botorch_model(lambda rows, net=net: db.draws(net, rows, n_draws=32))
        pool = torch.tensor([row for row in range(len(x)) if row not in known])
        improvement = qLogExpectedImprovement(model, best_f=y[known].max())
        chosen, _ = optimize_acqf_discrete(improvement, q=5, choices=x[pool])
        known += [int(pool[(x[pool] - point).abs().sum(1).argmin()]) for point in chosen]
    assert y.argmax() in known


def test_improvement_of_gaussian_draws_follows_the_closed_form():
    draws = torch.randn(400_000, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    normal = torch.distributions.Normal(0.0, 1.0)
    z = torch.tensor(0.5)
    closed = float(normal.log_prob(z).exp() - z * (1 - normal.cdf(z)))
    assert acquisition.expected_improvement(draws, best=0.5).item() == pytest.approx(closed, rel=0.01)
    chance = acquisition.probability_of_improvement(draws, best=0.5).item()
    assert chance == pytest.approx(float(1 - normal.cdf(z)), abs=0.003)
    assert acquisition.upper_confidence_bound(draws, exploration=2.0).item() == pytest.approx(2.0, abs=0.01)


def test_gradients_reach_the_points_through_function_draws_and_their_absence_is_explained():
    pytest.importorskip("botorch")
    from botorch.acquisition import qUpperConfidenceBound
    from botorch.optim import optimize_acqf

    net = torch.nn.Sequential(torch.nn.Linear(1, 16), torch.nn.Tanh(), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1))
    model = acquisition.botorch_model([db.function_draw(net, t, n_draws=8) for t in range(8)])
    options = {"bounds": torch.tensor([[-2.0], [2.0]]), "q": 1, "num_restarts": 2, "raw_samples": 8}
    best, value = optimize_acqf(qUpperConfidenceBound(model, beta=1.0), **options)
    grid = torch.linspace(-2, 2, 200)[:, None, None]
    assert value >= qUpperConfidenceBound(model, beta=1.0)(grid).max() - 0.05 and -2 <= best.item() <= 2
    cut = acquisition.botorch_model(lambda x: db.draws(net, x, n_draws=8))
    with pytest.raises(ValueError, match="`draws` must let gradients through"):
        optimize_acqf(qUpperConfidenceBound(cut, beta=1.0), **options)


def test_one_draw_has_no_confidence_bound():
    with pytest.raises(ValueError, match="`draws` must hold at least 2 draws"):
        acquisition.upper_confidence_bound(torch.ones(1, 3))
