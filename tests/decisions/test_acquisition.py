"""Tests of `acquisition`."""

import itertools
import math

import numpy as np
import pytest
import torch

import dropbayes as db
from dropbayes import acquisition, information, scores
from tests import small_networks
from tests.calibration.samples import normal


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def random_draws(*shape, seed=0, sharpness=3.0):
    return (sharpness * torch.randn(*shape, generator=generator(seed), dtype=torch.float64)).softmax(-1)


def test_bald_queries_are_the_rows_of_largest_mutual_information_best_first():
    draws = random_draws(20, 12, 4)
    expected = information.mutual_information(draws).argsort(descending=True)[:5]
    assert acquisition.bald_queries(draws, 5).tolist() == expected.tolist()


def test_batch_bald_takes_the_best_row_at_each_step_of_the_joint_information():
    # The oracle evaluates the joint information of every extension; the greedy one skips rows that cannot lead.
    draws = random_draws(15, 60, 3)
    expected: list[int] = []
    for _ in range(4):
        joint = [
            -math.inf if row in expected else information.joint_mutual_information(draws[:, [*expected, row]]).item()
            for row in range(60)
        ]
        expected.append(int(np.argmax(joint)))
    assert acquisition.batch_bald_queries(draws, 4).tolist() == expected


def test_batch_bald_has_the_submodular_share_of_the_best_batch():
    draws = random_draws(8, 9, 3)
    best = max(
        information.joint_mutual_information(draws[:, list(batch)]).item()
        for batch in itertools.combinations(range(9), 3)
    )
    greedy = information.joint_mutual_information(draws[:, acquisition.batch_bald_queries(draws, 3)]).item()
    assert (1 - 1 / math.e) * best <= greedy <= best + 1e-12


def test_batch_bald_with_sampled_outcomes_is_nearly_as_informative_as_enumerated():
    draws = random_draws(30, 40, 3)
    exact = acquisition.batch_bald_queries(draws, 6)
    sampled = acquisition.batch_bald_queries(draws, 6, max_outcomes=50)
    values = [information.joint_mutual_information(draws[:, rows]).item() for rows in (exact, sampled)]
    assert values[1] > 0.97 * values[0]


def test_every_row_is_asked_for_once_when_all_are():
    draws = random_draws(5, 7, 3)
    for rows in (
        acquisition.bald_queries(draws, 7),
        acquisition.batch_bald_queries(draws, 7),
        acquisition.variance_queries(draws[..., 0], 7, noise_variance=0.1),
    ):
        assert sorted(rows.tolist()) == list(range(7))


def test_more_queries_than_rows_are_refused():
    with pytest.raises(ValueError, match="`n_queries` must be a whole number, between 1 and 3; got 4"):
        acquisition.bald_queries(random_draws(2, 3, 2), 4)


def test_variance_queries_follow_gaussian_conditioning():
    draws = torch.randn(40, 15, generator=generator(), dtype=torch.float64)
    draws = draws @ torch.randn(15, 15, generator=generator(1), dtype=torch.float64)
    covariance, noise, expected = np.cov(draws.numpy().T), 0.7, []
    for _ in range(6):
        variance = np.diag(covariance).copy()
        if expected:
            given = covariance[np.ix_(expected, expected)] + noise * np.eye(len(expected))
            cross = covariance[expected]
            variance -= np.einsum("ir,ij,jr->r", cross, np.linalg.inv(given), cross)
        variance[expected] = -np.inf
        expected.append(int(variance.argmax()))
    assert acquisition.variance_queries(draws, 6, noise_variance=noise).tolist() == expected


def test_variance_queries_under_infinite_noise_rank_by_variance():
    draws = torch.randn(30, 10, generator=generator(), dtype=torch.float64)
    expected = draws.var(0).argsort(descending=True).tolist()
    assert acquisition.variance_queries(draws, 10, noise_variance=1e12).tolist() == expected


# ------------------------------------------------------------------------------ active learning, end to end


@pytest.fixture(scope="module")
def digits():
    return small_networks.standardised("digits")


def learned(x, y, labelled, *, seed, steps):
    net = small_networks.network(x.shape[1], 128, 128, 10, drop_prob=0.5, seed=seed)
    return small_networks.trained(net, x[labelled], y[labelled], steps=steps, batch=64)


@pytest.mark.slow
def test_batch_bald_on_digits_beats_random_queries_by_two_points(digits):
    x, y = digits
    accuracy = {"random": [], "batch": []}
    for seed in range(2):
        order = torch.randperm(len(x), generator=generator(seed))
        test, pool = order[:600], order[600:1000]
        for name in accuracy:
            labelled = list(range(20))
            for _ in range(3):
                net = learned(x, y, pool[labelled], seed=seed, steps=150)
                rest = torch.tensor([row for row in range(len(pool)) if row not in labelled])
                if name == "random":
                    chosen = torch.randperm(len(rest), generator=generator(len(labelled)))[:20]
                else:
                    draws = db.draws(net, x[pool[rest]], n_draws=40).softmax(-1)
                    chosen = acquisition.batch_bald_queries(draws, 20, max_outcomes=200)
                labelled += rest[chosen].tolist()
            net = learned(x, y, pool[labelled], seed=seed, steps=150)
            predicted = db.predict(net, x[test], n_draws=40, likelihood=db.Categorical()).mean
            accuracy[name].append(scores.accuracy(predicted, y[test]).item())
    assert np.mean(accuracy["batch"]) > np.mean(accuracy["random"]) + 0.02


def test_batch_bald_sees_duplicates_on_digits_where_bald_does_not(digits):
    # Every image five times in the pool: ranking row by row asks for the same few images again and again.
    x, y = digits
    net = learned(x, y, slice(0, 40), seed=0, steps=150)
    image = torch.arange(40, 140).repeat(5)
    draws = db.draws(net, x[image], n_draws=50).softmax(-1)
    ranked = acquisition.bald_queries(draws, 10)
    joint = acquisition.batch_bald_queries(draws, 10, max_outcomes=500)
    assert len(image[ranked].unique()) <= 3
    assert len(image[joint].unique()) >= 8
    values = [information.joint_mutual_information(draws[:, rows[:4]]) for rows in (ranked, joint)]  # exact: 10⁴ labels
    assert values[1] > 1.3 * values[0]


@pytest.mark.slow
def test_variance_queries_on_diabetes_beat_random_queries():
    # Error with 40 labels, 20 of them asked for. Measured: 0.774 against 0.826, better in every split.
    x, y = small_networks.standardised("diabetes")
    error = {"random": [], "variance": []}
    for seed in range(4):
        order = torch.randperm(len(x), generator=generator(seed))
        test, pool = order[:142], order[142:]
        for name in error:
            labelled = list(range(20))
            for step in range(3):
                net = small_networks.network(10, 50, 50, 1, drop_prob=0.2, seed=seed)
                small_networks.trained(net, x[pool[labelled]], y[pool[labelled]], steps=200, lr=1e-3, batch=64)
                rest = torch.tensor([row for row in range(len(pool)) if row not in labelled])
                if name == "random":
                    chosen = torch.randperm(len(rest), generator=generator(100 * seed + step))[:10]
                else:
                    draws = db.draws(net, x[pool[rest]], n_draws=50).squeeze(-1)
                    chosen = acquisition.variance_queries(draws, 10, noise_variance=0.5)
                labelled += rest[chosen].tolist()
            error[name].append(scores.rmse(db.predict(net, x[test], n_draws=50).mean.squeeze(-1), y[test]).item())
    assert np.mean(error["variance"]) < 0.98 * np.mean(error["random"])


def test_expected_information_gain_agrees_with_the_joint_information_of_pairs():
    # I[y; y*] = I[y; ω] + I[y*; ω] - I[y, y*; ω] where y and y* are independent given ω.
    draws = torch.randn(6, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).softmax(-1)
    pool, target = draws[:, :3], draws[:, 3:]
    alone = information.mutual_information(draws)
    for row in range(3):
        pairs = [
            alone[row] + alone[3 + other] - information.joint_mutual_information(draws[:, [row, 3 + other]])
            for other in range(2)
        ]
        expected = torch.stack(pairs).mean()
        torch.testing.assert_close(acquisition.expected_information_gain(pool, target)[row], expected)


def test_epig_leaves_out_what_bald_asks_for_but_nobody_will():
    # Row 0: the draws disagree about a question of its own; row 1 disagrees a little, with the target.
    coin = torch.tensor([0.01, 0.99, 0.01, 0.99], dtype=torch.float64)
    topic = torch.tensor([0.2, 0.2, 0.8, 0.8], dtype=torch.float64)
    pool = torch.stack([torch.stack([1 - coin, coin], -1), torch.stack([1 - topic, topic], -1)], 1)
    assert acquisition.bald_queries(pool, 1).tolist() == [0]
    assert acquisition.epig_queries(pool, pool[:, 1:], 1).tolist() == [1]


def test_stochastic_queries_are_drawn_in_proportion_to_the_power_of_the_score():
    scores_ = torch.tensor([1.0, 2.0, 4.0])
    for power in (1.0, 2.0):
        first = torch.stack([acquisition.stochastic_queries(scores_, 1, power=power, seed=s) for s in range(1500)])
        share = torch.bincount(first.flatten(), minlength=3) / 1500
        torch.testing.assert_close(share, scores_**power / (scores_**power).sum(), atol=0.04, rtol=0)


def test_a_row_of_score_zero_comes_after_all_others_whatever_the_power():
    values = torch.tensor([0.0, 1e-300, 0.0, 1.0, 0.5], dtype=torch.float64)
    for power in (1e-3, 0.1, 1.0, 50.0):
        for seed in range(20):
            order = acquisition.stochastic_queries(values, 5, power=power, seed=seed).tolist()
            assert set(order[3:]) == {0, 2}


def test_stochastic_queries_are_distinct_and_end_with_the_hopeless():
    chosen = acquisition.stochastic_queries(torch.tensor([0.0, 1.0, 2.0, 0.0]), 4)
    assert sorted(chosen.tolist()) == [0, 1, 2, 3] and set(chosen[:2].tolist()) == {1, 2}


@pytest.mark.parametrize(
    "call",
    [
        lambda: acquisition.variance_queries(torch.tensor([[math.nan, 1.0]]), 1, noise_variance=1.0),
        lambda: acquisition.variance_queries(torch.ones(2, 3), 1, noise_variance=0.0),
        lambda: acquisition.batch_bald_queries(torch.full((2, 2, 2), 0.5), 1, max_outcomes=0),
        lambda: acquisition.bald_queries(torch.randn(2, 2, 2), 1),
        lambda: acquisition.epig_queries(torch.full((2, 2, 2), 0.5), torch.full((3, 2, 2), 0.5), 1),
        lambda: acquisition.stochastic_queries(torch.tensor([-1.0]), 1),
    ],
)
def test_wrong_input_is_refused_by_name(call):
    with pytest.raises(ValueError, match=r"^`\w+` must"):
        call()


def test_distances_are_those_of_the_outer_products():
    # The first row is the longest embedding; with two rows left, the next is drawn by squared distance.
    p, h = normal(3, 4).softmax(-1), normal(3, 5, seed=1)
    residual = p - torch.nn.functional.one_hot(p.argmax(-1), 4)
    embedding = (residual[:, :, None] * h[:, None, :]).flatten(1)
    first = int(embedding.square().sum(1).argmax())
    distance = (embedding - embedding[first]).square().sum(1)
    draws = [acquisition.badge_queries(p, h, 2, seed=s) for s in range(1000)]
    assert {int(draw[0]) for draw in draws} == {first}
    share = torch.bincount(torch.stack(draws)[:, 1], minlength=3) / 1000
    torch.testing.assert_close(share.double(), distance / distance.sum(), atol=0.05, rtol=0)


def test_repeats_are_asked_for_last():
    p, h = normal(3, 4).softmax(-1), normal(3, 5, seed=1)
    doubled = acquisition.badge_queries(p.repeat(2, 1), h.repeat(2, 1), 6)
    assert len(set((doubled[:3] % 3).tolist())) == 3 and sorted(doubled.tolist()) == list(range(6))


def test_features_of_other_rows_are_refused():
    with pytest.raises(ValueError, match="`features` must have a row for each of the 2 rows"):
        acquisition.badge_queries(torch.full((2, 2), 0.5), torch.ones(3, 1), 1)


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


def test_probabilities_of_a_half_precision_softmax_are_ranked_as_those_of_single_precision():
    draws = random_draws(20, 12, 4).float()
    for half in (draws.bfloat16(), draws.half(), draws.half().numpy()):
        assert set(acquisition.bald_queries(half, 3).tolist()) == set(acquisition.bald_queries(draws, 3).tolist())
