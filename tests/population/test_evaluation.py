"""Tests of draws, scores and the fitted precision: closed forms and dense grids."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import dropbayes as db
from dropbayes.population import (
    Member,
    Task,
    draws,
    evaluate,
    fit_precision,
    randomness,
    select,
    train,
)
from dropbayes.population.evaluation import fit_and_score
from tests.population.samples import F64, toy, trained_population


def linear_population(weight: torch.Tensor, drop_prob: float, n: int = 1):
    """Members of a network without hidden layers and with a given weight: everything has a closed form."""
    x, y = toy(30)
    trained = train([Task(x, y)], [Member(drop_prob=drop_prob, seed=s, epochs=1) for s in range(n)], hidden=(), **F64)
    trained.weights[0][:] = weight[:, None]
    trained.biases[0][:] = 0.25
    return trained, x


@pytest.mark.parametrize(("schedule", "betas"), [("constant", (0.9, 0.999)), ("cosine", (0.8, 0.99))])
def test_a_member_without_dropout_follows_torch_adam(schedule, betas):
    x, y = toy(50)
    member = Member(drop_prob=0.0, weight_decay=3e-3, learning_rate=0.02, epochs=4, seed=7)
    trained = train([Task(x, y)], [member], hidden=(6,), batch_size=16, schedule=schedule, betas=betas, **F64)

    net = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 1)).double()
    for linear, weight in zip((net[0], net[2]), randomness.initial_weights(7, (3, 6, 1), torch.float64), strict=True):
        linear.weight.data, linear.bias.data = weight.T.clone(), torch.zeros_like(linear.bias)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02, betas=betas)
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=16) if schedule == "cosine" else None
    inputs, targets = (x - x.mean(0)) / x.std(0, unbiased=False), (y - y.mean()) / y.std(unbiased=False)
    order = randomness.member_order(7, 50)
    positions, counts = randomness.batches(0, 16, [50], 50)
    for step in range(16):
        rows = order[positions[step, 0, : int(counts[step, 0])]]
        optimizer.zero_grad()
        loss = 0.5 * (net(inputs[rows])[:, 0] - targets[rows]).square().mean()
        (loss + 3e-3 * (net[0].weight.square().sum() + net[2].weight.square().sum())).backward()
        optimizer.step()
        if rate is not None:
            rate.step()
    torch.testing.assert_close(trained.weights[0][0], net[0].weight.T.detach(), rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(trained.biases[1][0, 0], net[2].bias.detach(), rtol=1e-8, atol=1e-10)


def test_draws_have_the_closed_form_moments_of_a_linear_network():
    weight, n_draws = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64), 20_000
    population, x = linear_population(weight, 0.2)
    inputs = (x[:4] - population.x_mean[0]) / population.x_scale[0]
    scale, shift = population.y_scale[0], population.y_mean[0]
    mean, noise = draws(population, x[:4], n_draws=n_draws)
    expected = (inputs @ weight + 0.25) * scale + shift
    variance = (inputs.square() @ weight.square()) * (0.2 / 0.8) * scale**2  # p/(1-p) with p the drop probability
    error = (variance / n_draws).sqrt()
    assert ((mean[:, 0, :, 0].mean(0) - expected).abs() < 5 * error).all()
    torch.testing.assert_close(mean[:, 0, :, 0].var(0), variance, rtol=0.05, atol=0)
    torch.testing.assert_close(noise[0, 0, 0], 1 / population.precision[0])


def test_masks_of_two_members_are_independent_over_seeds():
    population, x = linear_population(torch.ones(3, dtype=torch.float64), 0.3, n=60)
    mean, _ = draws(population, x[:40], n_draws=50)
    centred = mean[..., 0] - mean[..., 0].mean((0, 2), keepdim=True)
    within = (mean[..., 0] - mean[..., 0].mean(0)).transpose(0, 1).flatten(1)
    correlation = torch.corrcoef(within)
    off_diagonal = correlation[~torch.eye(60, dtype=torch.bool)]
    assert abs(off_diagonal.mean()) < 0.02
    assert centred.isfinite().all()


@pytest.mark.parametrize("likelihood", ["gaussian", "heteroscedastic"])
def test_evaluation_is_the_logsumexp_estimator_of_the_draws(likelihood):
    population, tasks = trained_population(likelihood=likelihood)
    held_out = [task.held_out for task in tasks]
    scores = evaluate(population, held_out, n_draws=64)
    mean, noise = draws(population, [x for x, _ in held_out], n_draws=64, seed=0)
    for b, member in enumerate(population.members):
        y = held_out[member.task][1]
        density = torch.distributions.Normal(mean[:, b, : len(y), 0], noise[:, b, : len(y), 0].sqrt()).log_prob(y)
        expected = (density.logsumexp(0) - math.log(64)).mean()
        torch.testing.assert_close(scores.log_likelihood[b], expected)
        rmse = (y - mean[:, b, : len(y), 0].mean(0)).square().mean().sqrt()
        torch.testing.assert_close(scores.rmse[b], rmse)
        total = mean[:, b, : len(y), 0].var(0, unbiased=False) + noise[:, b, : len(y), 0].mean(0)
        torch.testing.assert_close(scores.variance[b, : len(y), 0], total)


@pytest.mark.parametrize("likelihood", ["gaussian", "heteroscedastic"])
def test_fitted_precision_is_the_best_of_a_dense_grid(likelihood):
    population, tasks = trained_population(likelihood=likelihood)
    held_out = [task.held_out for task in tasks]
    fitted = fit_precision(population, held_out, n_draws=40)
    best = evaluate(fitted, held_out, n_draws=40).log_likelihood
    for factor in torch.logspace(-3, 3, 61):
        other = replace(fitted, precision=fitted.precision * factor)
        assert (evaluate(other, held_out, n_draws=40).log_likelihood <= best + 1e-6).all()


@pytest.mark.parametrize("likelihood", ["gaussian", "heteroscedastic"])
def test_densities_scored_with_the_fit_are_those_of_an_evaluation(likelihood):
    population, tasks = trained_population(likelihood=likelihood)
    held_out = [task.held_out for task in tasks]
    fitted, density, error = fit_and_score(population, held_out, n_draws=40)
    expected = evaluate(fitted, held_out, n_draws=40)
    real = expected.weight > 0
    torch.testing.assert_close(density[real], expected.log_density[real], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(error, expected.y - expected.mean)


def test_without_dropout_the_fitted_precision_is_one_over_the_mean_squared_error():
    population, tasks = trained_population()
    population = replace(population, drop_prob=torch.zeros_like(population.drop_prob))
    held_out = [task.held_out for task in tasks]
    fitted = fit_precision(population, held_out, n_draws=2)
    rmse = evaluate(fitted, held_out, n_draws=1).rmse
    torch.testing.assert_close(fitted.precision[:, 0], rmse**-2, rtol=1e-3, atol=0)
    shared = fit_precision(population, held_out, n_draws=2, groups=[0] * 6)
    in_standardised_units = (shared.precision * shared.y_scale.square())[:, 0]
    torch.testing.assert_close(in_standardised_units, in_standardised_units[:1].expand(6))


def test_classes_are_learned_and_scored_by_the_mean_probability():
    x, y = toy(200)
    label = (y > y.median()).long() + (x[:, 2] > 1).long()
    population = train(
        [Task(x, label)],
        [Member(drop_prob=0.05, epochs=60, learning_rate=0.01, seed=s) for s in range(2)],
        likelihood="categorical",
        batch_size=32,
        **F64,
    )
    scores = evaluate(population, (x, label), n_draws=50)
    assert ((scores.mean.argmax(-1) == label).double().mean(1) > 0.9).all()
    torch.testing.assert_close(scores.mean.sum(-1), torch.ones(2, 200, dtype=torch.float64))
    chosen = scores.mean.gather(-1, label[None, :, None].expand(2, -1, 1))[..., 0]
    torch.testing.assert_close(scores.log_density, chosen.log())


def test_gaussian_scores_agree_with_the_likelihood_of_the_library():
    population, tasks = trained_population()
    x, y = tasks[0].held_out
    one = select(population, [0])
    mean, _ = draws(one, x, n_draws=30)
    likelihood = db.Gaussian(precision=float(one.precision[0, 0]))
    density = likelihood.log_density(mean[:, 0, :, 0], y)
    expected = (density.logsumexp(0) - math.log(30)).mean()
    torch.testing.assert_close(evaluate(one, (x, y), n_draws=30).log_likelihood[0], expected)


def test_no_draws_at_all_are_refused():
    population, x = linear_population(torch.ones(3), 0.5)
    with pytest.raises(ValueError, match="`n_draws` must be a whole number"):
        evaluate(population, (x, x[:, 0]), n_draws=0)
