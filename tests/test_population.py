"""Tests of populations: against the same network trained alone, torch's optimiser, closed forms."""

import math
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

import dropbayes as db
from dropbayes.population import (
    Member,
    Task,
    candidates,
    choose,
    draws,
    evaluate,
    fit_precision,
    mixture,
    network,
    randomness,
    select,
    train,
)
from dropbayes.precision import weight_decay

F64 = {"device": "cpu", "dtype": torch.float64}


def toy(n: int = 120, *, noise: float = 0.3, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, generator=source, dtype=torch.float64)
    clean = 5 + 2 * x[:, 0].sin() + x[:, 1]
    return x, clean + noise * torch.randn(n, generator=source, dtype=torch.float64)


def test_twenty_members_equal_the_same_networks_trained_alone():
    x, y = toy(160)
    tasks = [Task(x[: 100 + 17 * k], y[: 100 + 17 * k]) for k in range(3)]  # unequal sizes: padding and last batches
    members = [
        Member(
            task=i % 3,
            drop_prob=(0.0, 0.02 * i) if i % 2 else 0.1,
            precision=0.5 + i if i % 4 == 0 else None,
            weight_decay=10.0 ** -(2 + i % 5),
            learning_rate=1e-3 * (1 + i),
            epochs=5 + i % 4,
            seed=i,
        )
        for i in range(20)
    ]
    together = train(tasks, members, hidden=(10,), batch_size=32, **F64)
    for i, member in enumerate(members):
        alone = train(tasks, [member], hidden=(10,), batch_size=32, **F64)
        for ours, theirs in zip(together.weights + together.biases, alone.weights + alone.biases, strict=True):
            torch.testing.assert_close(ours[i], theirs[0], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_a_member_without_dropout_follows_torch_adam(schedule):
    x, y = toy(50)
    member = Member(drop_prob=0.0, weight_decay=3e-3, learning_rate=0.02, epochs=4, seed=7)
    trained = train([Task(x, y)], [member], hidden=(6,), batch_size=16, schedule=schedule, **F64)

    net = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 1)).double()
    for linear, weight in zip((net[0], net[2]), randomness.initial_weights(7, (3, 6, 1), torch.float64), strict=True):
        linear.weight.data, linear.bias.data = weight.T.clone(), torch.zeros_like(linear.bias)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
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


def test_every_row_is_seen_once_in_an_epoch():
    positions, counts = randomness.batches(0, 8, [20, 13], 20)
    assert sorted(positions[:3, 0].flatten().tolist()) == [*range(20), *[20] * 4]
    assert counts[:3, 0].tolist() == [8, 8, 4]
    assert sorted(p for p in positions[:2, 1].flatten().tolist() if p < 20) == list(range(13))


def test_precision_sets_the_papers_weight_decay_in_standardised_units():
    x, y = toy(80)
    tau, scale = 3.0, float(y.std(unbiased=False))
    by_precision = Member(drop_prob=0.2, precision=tau, length_scale=0.7, epochs=3)
    decay = weight_decay(precision=tau * scale**2, keep_prob=0.8, length_scale=0.7, n_data=80)
    by_decay = Member(drop_prob=0.2, weight_decay=decay, epochs=3)
    trained = train([Task(x, y)], [by_precision, by_decay], **F64)
    torch.testing.assert_close(trained.weights[0][0], trained.weights[0][1])


def test_words_are_uniform_and_thresholds_give_the_exact_probability():
    words = randomness.words((400_000,), randomness.generator(1)).double()
    assert abs(words.mean() + 0.5) < 4 * 65536 / math.sqrt(12 * 400_000)
    for bit in range(16):  # each of the 16 bits is fair
        share = ((words.long() + 32768) >> bit & 1).double().mean()
        assert abs(share - 0.5) < 4.5 * 0.5 / math.sqrt(400_000)
    drop_prob = torch.tensor([0.005, 0.1, 1 / 3], dtype=torch.float64)
    dither = (torch.arange(100_000, dtype=torch.float64)[:, None] + 0.5) / 100_000
    exact = (randomness.thresholds(drop_prob, dither).double() + 32768).mean(0) / 65536
    torch.testing.assert_close(exact, drop_prob, rtol=0, atol=1e-9)


def linear_population(weight: torch.Tensor, drop_prob: float, n: int = 1):
    """Members of a network without hidden layers and with a given weight: everything has a closed form."""
    x, y = toy(30)
    trained = train([Task(x, y)], [Member(drop_prob=drop_prob, seed=s, epochs=1) for s in range(n)], hidden=(), **F64)
    trained.weights[0][:] = weight[:, None]
    trained.biases[0][:] = 0.25
    return trained, x


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


def test_shared_masks_make_a_draw_a_function():
    population, x = linear_population(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64), 0.4)
    twice, _ = draws(population, torch.cat([x[:3], x[:3]]), n_draws=7, masks="shared")
    assert torch.equal(twice[:, :, :3], twice[:, :, 3:])
    per_row, _ = draws(population, torch.cat([x[:3], x[:3]]), n_draws=7, masks="row")
    assert not torch.equal(per_row[:, :, :3], per_row[:, :, 3:])


def trained_population(**settings):
    x, y = toy(150)
    tasks = [Task(x[:100], y[:100], held_out=(x[100:], y[100:])), Task(x[30:], y[30:], held_out=(x[:30], y[:30]))]
    members = [Member(task=i % 2, drop_prob=0.1, epochs=30, learning_rate=0.01, seed=i) for i in range(6)]
    return train(tasks, members, hidden=(12,), batch_size=32, **F64, **settings), tasks


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


def test_a_mixture_of_members_averages_their_densities_and_moments():
    population, tasks = trained_population()
    _, y = tasks[0].held_out
    scores = evaluate(population, [task.held_out for task in tasks], n_draws=50)
    joint = mixture(scores, [m.task for m in population.members])
    mean, noise = draws(population, [task.held_out[0] for task in tasks], n_draws=50)
    pooled, spread = mean[:, ::2, : len(y), 0].flatten(0, 1), noise[:, ::2, : len(y), 0].flatten(0, 1)
    density = torch.distributions.Normal(pooled, spread.sqrt()).log_prob(y)
    torch.testing.assert_close(joint.log_likelihood[0], (density.logsumexp(0) - math.log(150)).mean())
    torch.testing.assert_close(joint.variance[0, : len(y), 0], pooled.var(0, unbiased=False) + spread.mean(0))
    with pytest.raises(ValueError, match="`groups` must join members of one task"):
        mixture(scores, [0] * len(population))


@pytest.mark.parametrize("likelihood", ["gaussian", "heteroscedastic"])
def test_fitted_precision_is_the_best_of_a_dense_grid(likelihood):
    population, tasks = trained_population(likelihood=likelihood)
    held_out = [task.held_out for task in tasks]
    fitted = fit_precision(population, held_out, n_draws=40)
    best = evaluate(fitted, held_out, n_draws=40).log_likelihood
    for factor in torch.logspace(-3, 3, 61):
        other = replace(fitted, precision=fitted.precision * factor)
        assert (evaluate(other, held_out, n_draws=40).log_likelihood <= best + 1e-6).all()


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
    assert (scores.accuracy > 0.9).all()
    torch.testing.assert_close(scores.mean.sum(-1), torch.ones(2, 200, dtype=torch.float64))
    chosen = scores.mean.gather(-1, label[None, :, None].expand(2, -1, 1))[..., 0]
    torch.testing.assert_close(scores.log_density, chosen.log())


def test_a_member_becomes_the_same_torch_network():
    population, tasks = trained_population()
    net = network(population, 3)
    x = tasks[0].x
    inputs = (x - population.x_mean[3]) / population.x_scale[3]
    expected, _ = draws(
        replace(select(population, [3]), drop_prob=torch.zeros(1, 2, dtype=torch.float64)), x, n_draws=1
    )
    output = net.eval()(inputs) * population.y_scale[3] + population.y_mean[3]
    torch.testing.assert_close(output, expected[0, 0])
    assert [m.p for m in net if isinstance(m, nn.Dropout)] == [0.1, 0.1]


def test_early_stopping_returns_each_member_to_its_best_check():
    x, y = toy(60, noise=2.0)
    tasks = [Task(x[:30], y[:30], held_out=(x[30:], y[30:]))]
    members = [Member(drop_prob=0.01, epochs=400, learning_rate=lr, seed=3) for lr in (0.03, 0.0003)]
    stopped = train(tasks, members, hidden=(50,), batch_size=30, check_every=10, patience=3, **F64)
    best = stopped.history.nan_to_num(nan=-torch.inf).max(0)
    assert stopped.epochs.tolist() == [(int(i) + 1) * 10 for i in best.indices]
    assert stopped.epochs[0] < 300  # the fast learner overfits 30 noisy rows
    again = train(tasks, [replace(members[0], epochs=int(stopped.epochs[0]))], hidden=(50,), batch_size=30, **F64)
    torch.testing.assert_close(again.weights[0][0], stopped.weights[0][0])


def test_a_diverging_member_is_marked_and_the_others_unharmed():
    x, y = toy(60)
    members = [Member(epochs=20, learning_rate=1e-3), Member(epochs=20, learning_rate=1e30)]
    population = train([Task(x, y)], members, device="cpu")
    assert population.diverged.tolist() == [False, True]
    assert all(weight.isfinite().all() for weight in population.weights)
    scores = evaluate(population, (x, y), n_draws=5)
    assert scores.log_likelihood[0].isfinite()
    assert scores.log_likelihood[1] == -torch.inf


def test_learned_drop_probability_goes_to_a_half_when_only_the_entropy_counts():
    # A huge KL weight (tiny precision) leaves nothing but the entropy, which is greatest at one half.
    x, y = toy(40)
    member = Member(drop_prob=0.1, precision=1e-6, length_scale=1e-4, epochs=200, learning_rate=0.05)
    learned = train([Task(x, y)], [member], hidden=(10,), learn_drop_prob=True, **F64)
    torch.testing.assert_close(learned.drop_prob, torch.full((1, 2), 0.5, dtype=torch.float64), rtol=0, atol=0.02)


def test_learned_drop_probability_falls_with_more_data():
    few, many = (toy(n, noise=0.05) for n in (40, 1000))
    member = Member(drop_prob=0.2, precision=100.0, learning_rate=0.01)
    small = train([Task(*few)], [replace(member, epochs=300)], batch_size=40, learn_drop_prob=True, **F64)
    large = train([Task(*many)], [replace(member, epochs=40)], batch_size=40, learn_drop_prob=True, **F64)
    assert large.drop_prob.sum() < small.drop_prob.sum()


def test_row_weights_count_rows_more_than_once():
    x, y = toy(24)
    weight = torch.tensor([1.0, 2.0]).repeat(12)
    weighted = Task(x, y, weight=weight)
    repeated = Task(torch.cat([x, x[1::2]]), torch.cat([y, y[1::2]]))
    members = [Member(task=t, drop_prob=0.0, weight_decay=1e-4, epochs=30, seed=1) for t in (0, 1)]
    population = train([weighted, repeated], members, hidden=(5,), batch_size=36, **F64)
    torch.testing.assert_close(population.weights[0][0], population.weights[0][1])


def test_search_prefers_the_candidate_that_can_learn_and_refits_it_on_all_rows():
    x, y = toy(120)
    grid = candidates(drop_prob=[0.05, 0.9], epochs=[60], learning_rate=[0.01])
    choice = choose(x, y, grid, n_folds=3, n_members=2, hidden=(12,), batch_size=32, **F64)
    assert choice.best.drop_prob == 0.05
    assert choice.log_likelihood[0] > choice.log_likelihood[1]
    assert len(choice.population) == 2
    score = evaluate(choice.population, toy(200, seed=1)).log_likelihood
    assert (score - choice.log_likelihood[0]).abs().max() < 0.35  # held-out folds foretell fresh rows


def test_a_budget_draws_distinct_candidates():
    grid = candidates(budget=5, drop_prob=[0.1, 0.2, 0.3], learning_rate=[1e-3, 1e-2, 1e-1])
    assert len(set(grid)) == 5


@pytest.mark.parametrize(
    ("members", "settings", "message"),
    [
        ([Member(task=2)], {}, "name a task below 1"),
        ([Member(drop_prob=(0.1,))], {}, "one per weight layer"),
        ([Member(drop_prob=1.0)], {}, "must lie in"),
        ([Member(epochs=0)], {}, "epochs >= 1"),
        ([Member()], {"check_every": 5}, "needs held-out rows"),
        ([Member()], {"activation": "sine"}, "`activation` must be one of"),
        ([Member()], {"likelihood": "poisson"}, "`likelihood` must be"),
        ([], {}, "must not be empty"),
    ],
)
def test_bad_settings_are_refused_with_the_remedy(members, settings, message):
    x, y = toy(20)
    with pytest.raises(ValueError, match=message):
        train([Task(x, y)], members, device="cpu", **settings)


def test_gaussian_scores_agree_with_the_likelihood_of_the_library():
    population, tasks = trained_population()
    x, y = tasks[0].held_out
    one = select(population, [0])
    mean, _ = draws(one, x, n_draws=30)
    likelihood = db.Gaussian(precision=float(one.precision[0, 0]))
    density = likelihood.log_density(mean[:, 0, :, 0], y)
    expected = (density.logsumexp(0) - math.log(30)).mean()
    torch.testing.assert_close(evaluate(one, (x, y), n_draws=30).log_likelihood[0], expected)


def test_training_goes_on_from_given_networks_with_their_standardisation():
    x, y = toy(60)
    member = Member(drop_prob=0.0, epochs=3, seed=1)
    first = train([Task(x[:30], y[:30])], [member], hidden=(5,), **F64)
    again = train([Task(x[30:], y[30:])], [member], hidden=(5,), start=first, **F64)
    torch.testing.assert_close(again.x_mean, first.x_mean)
    assert not torch.equal(again.weights[0], first.weights[0])
    still = train([Task(x[30:], y[30:])], [replace(member, learning_rate=1e-300)], hidden=(5,), start=first, **F64)
    torch.testing.assert_close(still.weights[0], first.weights[0])
    torch.testing.assert_close(still.biases[1], first.biases[1])


def test_draws_do_not_depend_on_the_other_rows_when_masks_are_shared():
    population, tasks = trained_population()
    x = torch.randn(3000, 3, dtype=torch.float64)
    many, _ = draws(population, x, n_draws=30, masks="shared")
    few, _ = draws(population, x[:2], n_draws=30, masks="shared")
    torch.testing.assert_close(many[:, :, :2], few, rtol=1e-12, atol=1e-12)
    assert tasks


FUSED = """
import torch
from dropbayes.population import Member, Task, fitting, fused, randomness
from dropbayes.population.heads import HEADS
from dropbayes.population.standardisation import stacked_table

source = torch.Generator().manual_seed(0)
for activation, schedule, n_features, width, batch_size in (
    ("relu", "constant", 13, 50, 32), ("tanh", "cosine", 3, 20, 70), ("relu", "cosine", 20, 100, 128)
):
    tasks = [Task(torch.randn(n, n_features, generator=source), torch.randn(n, 1, generator=source)) for n in (90, 71)]
    members = [
        Member(task=s % 2, epochs=3, seed=s, drop_prob=(0.05 * s, 0.1 * s), weight_decay=1e-2 * s, learning_rate=0.01)
        for s in range(4)
    ]
    table = stacked_table(tasks, HEADS["gaussian"], torch.float32)
    programs = []
    for _ in range(2):
        program = fitting._program(
            table, members, (width,), HEADS["gaussian"], activation, batch_size, schedule, False, DEVICE, torch.float32
        )
        program.load(0, randomness.chunk_of(0, batch_size, sorted(set(table.n_rows)), program.widths), 0)
        programs.append(program)
    stacked, kernel = programs
    assert fused.suits(kernel)
    for _ in range(4):
        stacked.step()
    fused.advance(kernel, 3)
    fused.advance(kernel, 1)
    assert stacked.step_in_chunk == kernel.step_in_chunk
    for name in ("vector", "first", "second"):
        torch.testing.assert_close(getattr(stacked, name), getattr(kernel, name), rtol=1e-4, atol=1e-6)
print("equal")
"""


def test_the_kernel_takes_the_same_steps_as_the_stacked_operations():
    pytest.importorskip("triton", reason="the kernel needs Triton, which comes with torch's CUDA builds")
    on_device = torch.cuda.is_available()
    # Without a CUDA device Triton's interpreter runs the kernel's own source, block by block.
    environment = os.environ | ({} if on_device else {"TRITON_INTERPRET": "1"})
    script = FUSED.replace("DEVICE", "torch.device('cuda')" if on_device else "torch.device('cpu')")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "equal", done.stderr
