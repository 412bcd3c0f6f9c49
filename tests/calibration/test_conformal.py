"""Conformal thresholds, intervals and sets: equal to MAPIE's, with the coverage they promise."""

import math

import numpy as np
import pytest
import scipy.stats
import torch
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import KFold

from dropbayes import conformal, scores
from dropbayes.calibration.conformal import OnlineLevel, conformal_distribution, cross_conformal_interval
from tests.calibration.given import GivenColumn, GivenProbabilities
from tests.calibration.samples import generator, normal

# Thresholds: exact coverage by rank, by group, and under covariate shift ----------------------------------------------


def test_conformal_coverage_is_exactly_its_rank_over_n_plus_one():
    # Exchangeable scores: P(covered) = ⌈(n+1) level⌉ / (n+1) for any law; here n = 19, level 0.85 -> 17/20.
    runs = 40_000
    values = torch.rand(runs, 20, generator=generator(), dtype=torch.float64)
    thresholds = values[:, :19].kthvalue(17).values
    torch.testing.assert_close(conformal.conformal_threshold(values[0, :19], level=0.85), thresholds[0])
    covered = (values[:, 19] <= thresholds).double().mean().item()
    assert covered == pytest.approx(0.85, abs=4 * math.sqrt(0.85 * 0.15 / runs))


def test_conformal_threshold_with_too_few_rows_is_infinite():
    assert conformal.conformal_threshold(torch.arange(8.0), level=0.9) == math.inf
    assert conformal.conformal_threshold(torch.arange(9.0), level=0.9) == 8


@pytest.mark.parametrize("n_rows", range(1, 60))
def test_the_rank_is_the_ceiling_for_every_number_of_rows(n_rows):
    scores = normal(n_rows)
    for tenth in range(1, 10):
        rank = -((-(n_rows + 1) * tenth) // 10)
        expected = scores.sort().values[rank - 1] if rank <= n_rows else math.inf
        assert conformal.conformal_threshold(scores, level=tenth / 10) == expected


def test_a_row_of_weight_two_counts_as_two():
    scores, weight = normal(30), torch.arange(30) % 4
    for level in (0.1, 0.5, 0.9):
        ours = conformal.conformal_threshold(scores, level=level, sample_weight=weight)
        assert ours == conformal.conformal_threshold(scores.repeat_interleave(weight), level=level)


def test_weights_by_the_density_ratio_restore_coverage_under_covariate_shift():
    # y = x·noise, held-out x uniform, new x of density 2x: the ratio is 2x. Without weights the intervals are too narrow.
    runs, n, covered = 1000, 60, torch.zeros(2)
    for run in range(runs):
        chance = torch.rand(n + 1, generator=generator(run), dtype=torch.float64)
        x, new_x = chance[:n], chance[n].sqrt()
        noise = normal(n + 1, seed=run + runs).abs()
        weighted = conformal.conformal_threshold(x * noise[:n], level=0.9, sample_weight=2 * x, new_weight=2 * new_x)
        plain = conformal.conformal_threshold(x * noise[:n], level=0.9)
        covered += torch.stack([new_x * noise[n] <= weighted, new_x * noise[n] <= plain])
    standard_error = math.sqrt(0.09 / runs)
    assert 0.9 - 4 * standard_error < covered[0] / runs < 0.94 + 4 * standard_error
    assert covered[1] / runs < 0.9 - 4 * standard_error


def test_every_group_is_covered_where_the_pooled_threshold_fails_one():
    groups = torch.arange(200) % 2
    pooled, separate = torch.zeros(2), torch.zeros(2)
    for run in range(400):
        values = normal(200, seed=run).abs() * (1 + 4 * groups)
        new = normal(2, seed=run + 1000).abs() * torch.tensor([1, 5])
        pooled += new <= conformal.conformal_threshold(values, level=0.8)
        separate += new <= conformal.group_thresholds(values, groups, torch.tensor([0, 1]), level=0.8)
    standard_error = math.sqrt(0.16 / 400)
    assert (separate / 400 > 0.8 - 4 * standard_error).all()
    assert pooled[1] / 400 < 0.75


@pytest.mark.parametrize("groups", [[0.5] * 9, [0] * 8, [[0]] * 9])
def test_groups_are_integers_one_per_row(groups):
    with pytest.raises(ValueError, match="`groups` must"):
        conformal.group_thresholds(torch.ones(9), torch.tensor(groups), torch.tensor([0]), level=0.5)


def test_rare_classes_are_covered_by_their_own_threshold():
    labels = torch.multinomial(torch.tensor([0.9, 0.1]), 5000, replacement=True, generator=generator())
    # The rare class gets little probability: its score 1 - p is large.
    rare = torch.where(labels == 1, 0.6, 0.1) + 0.3 * torch.rand(5000, generator=generator(1))
    threshold = conformal.class_thresholds(rare[:2500], labels[:2500], n_classes=2, level=0.9)
    pooled = conformal.conformal_threshold(rare[:2500], level=0.9)
    new, truth = rare[2500:], labels[2500:]
    for label in (0, 1):
        share = (new[truth == label] <= threshold[label]).double().mean().item()
        assert share == pytest.approx(0.9, abs=0.06)
    assert (new[truth == 1] <= pooled).double().mean() < 0.3


@pytest.mark.parametrize("rate", [pytest.param(0.01, marks=pytest.mark.slow), 0.1])
@pytest.mark.parametrize("kind", ["drift", "jump", "adversary"])
def test_the_long_run_coverage_is_within_the_bound_for_every_sequence(kind, rate):
    steps, level = 800, OnlineLevel(target=0.9, rate=rate)
    noise = torch.randn(steps, generator=generator(), dtype=torch.float64).abs()
    scale = {"drift": torch.linspace(1, 20, steps), "jump": torch.where(torch.arange(steps) < 400, 1.0, 9.0)}
    past, covered = [1.0], 0
    for step in range(steps):
        threshold = level.threshold(torch.tensor(past[-200:]))
        if kind == "adversary":  # misses whenever it can
            score = float(threshold) + 1 if threshold.isfinite() else 0.0
        else:
            score = float(noise[step] * scale[kind][step])
        covered += score <= threshold
        level = level.after(covered=score <= threshold)
        past.append(score)
    assert abs(covered / steps - 0.9) <= (0.9 + rate) / (rate * steps)


def test_a_fixed_level_fails_where_the_adaptive_one_holds():
    past = torch.randn(300, generator=generator(), dtype=torch.float64).abs()
    later = 5 * torch.randn(1000, generator=generator(1), dtype=torch.float64).abs()
    fixed = OnlineLevel(target=0.9).threshold(past)
    assert (later <= fixed).double().mean() < 0.5


def test_levels_outside_the_unit_interval_are_everything_or_nothing():
    scores = torch.ones(5)
    assert OnlineLevel(0.9, current=1.2).threshold(scores) == math.inf
    assert OnlineLevel(0.9, current=-0.1).threshold(scores) == -math.inf
    with pytest.raises(ValueError, match="`rate` must be a positive"):
        OnlineLevel(0.9, rate=0)
    with pytest.raises(ValueError, match="`current` must be finite"):
        OnlineLevel(0.9, current=math.nan)


# Intervals and distributions ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [0.8, 0.9, 0.95])
def test_conformal_interval_equals_mapie(level):
    mapie = pytest.importorskip("mapie.regression")
    mean, y, new = normal(97), normal(97, seed=1), normal(20, seed=2)
    theirs = mapie.SplitConformalRegressor(GivenColumn(), confidence_level=level, prefit=True)
    theirs.conformalize(mean[:, None].numpy(), y.numpy())
    interval = theirs.predict_interval(new[:, None].numpy())[1][:, :, 0]
    residuals = conformal.standardised_residuals(mean, 1.0, y)
    lower, upper = conformal.conformal_interval(
        new, 1.0, threshold=conformal.conformal_threshold(residuals, level=level)
    )
    np.testing.assert_allclose(np.stack([lower, upper], 1), interval, rtol=1e-12)


@pytest.mark.parametrize("level", [0.8, 0.9])
def test_conformal_quantile_interval_equals_mapie(level):
    mapie = pytest.importorskip("mapie.regression")
    y = normal(120, seed=1)
    ends = torch.stack([y - 1 + 0.3 * normal(120), y + 0.7 + 0.3 * normal(120, seed=2), y], 1)
    new = torch.stack([normal(15, seed=3) - 2, normal(15, seed=4) + 2, normal(15)], 1)
    theirs = mapie.ConformalizedQuantileRegressor(
        [GivenColumn(0), GivenColumn(1), GivenColumn(2)], confidence_level=level, prefit=True
    )
    theirs.conformalize(ends.numpy(), y.numpy())
    interval = theirs.predict_interval(new.numpy(), symmetric_correction=True)[1][:, :, 0]
    residuals = conformal.quantile_residuals(ends[:, 0], ends[:, 1], y)
    ours = conformal.conformal_quantile_interval(
        new[:, 0], new[:, 1], threshold=conformal.conformal_threshold(residuals, level=level)
    )
    np.testing.assert_allclose(torch.stack(ours, 1), interval, rtol=1e-12)


def skewed(n, seed):
    """Inputs, and targets whose noise is one-sided and grows with the input."""
    x = torch.rand(n, generator=generator(seed), dtype=torch.float64)
    noise = -torch.rand(n, generator=generator(seed + 1), dtype=torch.float64).log()
    return x, x + (0.1 + x) * noise


def test_quantile_intervals_cover_and_are_narrower_than_symmetric_ones_under_skewed_noise():
    def upper(x):  # of the right shape, a tenth too low
        return x + 0.9 * (0.1 + x) * -math.log(0.1)

    covered, widths = [], []
    for run in range(300):
        (x, y), (new_x, new_y) = skewed(99, 10 * run), skewed(20, 10 * run + 5)
        residuals = conformal.quantile_residuals(x, upper(x), y)
        ends = conformal.conformal_quantile_interval(
            new_x, upper(new_x), threshold=conformal.conformal_threshold(residuals, level=0.9)
        )
        symmetric = conformal.conformal_interval(
            new_x + 0.1 + new_x, 1.0, threshold=conformal.conformal_threshold((y - x - 0.1 - x).abs(), level=0.9)
        )
        covered.append(scores.coverage(*ends, new_y))
        widths.append(torch.stack([ends[1] - ends[0], symmetric[1] - symmetric[0]]).mean(1))
    assert torch.stack(covered).mean().item() == pytest.approx(0.9, abs=4 * math.sqrt(0.09 / 6000) + 0.01)
    ours, theirs = torch.stack(widths).mean(0)
    assert ours < theirs


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_intervals_hold_their_share_where_many_outcomes_tie_however_their_ends_are_rounded(dtype):
    source = torch.Generator().manual_seed(0)
    for _ in range(100):
        mean, std = torch.randn(3, generator=source, dtype=dtype), torch.rand(3, generator=source, dtype=dtype) + 0.1
        kind = torch.randint(3, (60,), generator=source)  # three different rows, and counts for outcomes
        mean, std = mean[kind], std[kind]
        y = (mean + std * torch.randn(60, generator=source, dtype=dtype)).round()
        threshold = conformal.conformal_threshold(conformal.standardised_residuals(mean, std, y), level=0.8)
        distances = conformal.quantile_residuals(mean, mean + std, y)
        reach = conformal.conformal_threshold(distances, level=0.8)
        law = conformal_distribution(mean, std, calibration_residuals=(y - mean) / std)
        assert scores.coverage(*conformal.conformal_interval(mean, std, threshold=threshold), y) >= 0.8
        assert scores.coverage(*conformal.conformal_quantile_interval(mean, mean + std, threshold=reach), y) >= 0.8
        assert (y <= law.quantile(0.8)).double().mean() >= 0.8
        assert scores.coverage(*law.interval(0.8), y) >= 0.8


def test_an_interval_narrowed_beyond_nothing_is_a_point():
    lower, upper = conformal.conformal_quantile_interval(torch.zeros(1), torch.ones(1), threshold=-3.0)
    assert lower == upper == 0.5
    lower, upper = conformal.conformal_interval(torch.ones(1), 2.0, threshold=-math.inf)  # a level below 0 asks for it
    assert lower == upper == 1


def test_thresholds_per_row_follow_their_rows():
    lower, upper = conformal.conformal_interval(torch.zeros(2, 1), torch.ones(2, 1), threshold=torch.tensor([1.0, 2.0]))
    torch.testing.assert_close(lower, torch.tensor([[-1.0], [-2.0]]))
    torch.testing.assert_close(upper, torch.tensor([[1.0], [2.0]]))


@pytest.mark.parametrize(
    "call",
    [
        lambda: conformal.conformal_interval(torch.zeros(3), torch.ones(3, 1), threshold=1.0),
        lambda: conformal.conformal_interval(torch.zeros(3), -torch.ones(3), threshold=1.0),
        lambda: conformal.conformal_interval(torch.zeros(3), torch.ones(3), threshold=math.nan),
        lambda: conformal.conformal_interval(torch.zeros(3), torch.ones(3), threshold=torch.ones(2)),
        lambda: conformal.standardised_residuals(torch.zeros(3, 1), torch.ones(3, 1), torch.zeros(3)),
        lambda: conformal.quantile_residuals(torch.zeros(3), torch.ones(3), torch.zeros(3, 1)),
        lambda: conformal.conformal_quantile_interval(torch.ones(3), torch.zeros(3), threshold=1.0),
    ],
)
def test_impossible_intervals_are_refused(call):
    with pytest.raises(ValueError, match=r"must"):
        call()


def fold_models(x, y, n_folds):
    """The models that each left a fold out, and the fold of each row."""
    folds, models = np.zeros(len(y), dtype=int), []
    for number, (train, test) in enumerate(KFold(n_folds).split(x)):
        models.append(LinearRegression().fit(x[train], y[train]))
        folds[test] = number
    return models, folds


def interval(x, y, new, n_folds, level):
    models, folds = fold_models(x, y, n_folds)
    own = np.stack([model.predict(x) for model in models])[folds, np.arange(len(y))]
    predictions = np.stack([model.predict(new) for model in models])
    return cross_conformal_interval(predictions, residuals=np.abs(y - own), folds=folds, level=level)


@pytest.mark.parametrize("n_folds", [5, 40])
def test_cross_conformal_interval_equals_mapie(n_folds):
    mapie = pytest.importorskip("mapie.regression")
    x, new = normal(40, 2).numpy(), normal(15, 2, seed=1).numpy()
    y = x[:, 0] + normal(40, seed=2).numpy()
    theirs = mapie.CrossConformalRegressor(LinearRegression(), confidence_level=0.9, method="plus", cv=KFold(n_folds))
    theirs.fit_conformalize(x, y)
    expected = theirs.predict_interval(new)[1][:, :, 0]
    np.testing.assert_allclose(np.stack(interval(x, y, new, n_folds, 0.9), 1), expected, rtol=1e-9)


@pytest.mark.slow
def test_coverage_is_near_the_level_with_few_rows_where_in_sample_residuals_fail():
    covered, naive, runs = 0, 0, 300
    for run in range(runs):
        x = normal(21, 10, seed=run).numpy()
        y = x[:, 0] + normal(21, seed=run + runs).numpy()
        lower, upper = interval(x[:20], y[:20], x[20:], 10, 0.8)
        covered += bool(lower <= y[20] <= upper)
        model = LinearRegression().fit(x[:20], y[:20])
        half = np.quantile(np.abs(y[:20] - model.predict(x[:20])), 0.8)
        naive += abs(y[20] - model.predict(x[20:])[0]) <= half
    standard_error = math.sqrt(0.16 / runs)
    assert covered / runs > 0.8 - 4 * standard_error  # the promise alone is 0.6
    assert naive / runs < 0.6


def test_too_few_rows_give_everything_and_wrong_folds_are_refused():
    lower, upper = cross_conformal_interval(torch.zeros(3, 2), residuals=torch.ones(3), level=0.9)
    assert (lower == -math.inf).all() and (upper == math.inf).all()
    with pytest.raises(ValueError, match="`folds` must lie between 0 and 2"):
        cross_conformal_interval(torch.zeros(3, 2), residuals=torch.ones(5), folds=[0, 1, 2, 3, 0], level=0.5)
    with pytest.raises(ValueError, match=r"`folds` must lie between 0 and 2, .* be whole"):
        cross_conformal_interval(torch.zeros(3, 2), residuals=torch.ones(3), folds=[0, 0.5, 2], level=0.5)
    with pytest.raises(ValueError, match="`residuals` must be at least 0"):
        cross_conformal_interval(torch.zeros(3, 2), residuals=-torch.ones(3), level=0.5)
    with pytest.raises(ValueError, match="`folds` must have one value per row; got 5 for 3 rows"):
        cross_conformal_interval(torch.zeros(5, 2), residuals=torch.ones(3), level=0.5)  # two models were left out


def exponential(n, seed):
    return -torch.rand(n, generator=generator(seed), dtype=torch.float64).log() - 1


@pytest.mark.slow
def test_transforms_of_new_rows_are_uniform_and_quantiles_met_under_skewed_noise():
    transforms, below, runs = [], 0, 1200
    for run in range(runs):
        residuals = exponential(100, run)
        mean, std = normal(1, seed=run), normal(1, seed=run + 1).exp()
        new = conformal_distribution(mean, std, calibration_residuals=residuals[:99])
        y = mean + std * residuals[99]
        transforms.append(float(new.distribution(y)))
        below += bool(y <= new.quantile(0.7))
    assert scipy.stats.kstest(transforms, "uniform").pvalue > 0.001
    assert below / runs == pytest.approx(0.7, abs=4 * math.sqrt(0.21 / runs))


def test_the_interval_lies_askew_where_residuals_do_and_covers():
    covered, runs = 0, 400
    for run in range(runs):
        residuals = exponential(60, run)
        new = conformal_distribution(torch.zeros(1), torch.ones(1), calibration_residuals=residuals[:59])
        lower, upper = new.interval(0.8)
        covered += bool(lower <= residuals[59] <= upper)
    assert covered / runs == pytest.approx(0.8, abs=4 * math.sqrt(0.16 / runs))
    assert upper - 0 > 0 - lower


def test_quantile_and_distribution_are_inverse():
    new = conformal_distribution(torch.zeros(1), torch.ones(1), calibration_residuals=normal(49))
    for level in (0.1, 0.5, 0.9):
        assert new.distribution(new.quantile(level)).item() == pytest.approx(level, abs=0.021)


def test_too_few_rows_give_infinite_quantiles_and_intervals():
    new = conformal_distribution(torch.zeros(1), torch.ones(1), calibration_residuals=torch.zeros(3))
    assert new.quantile(0.9) == math.inf and new.interval(0.9) == (-math.inf, math.inf)
    with pytest.raises(ValueError, match="`std` must be positive"):
        conformal_distribution(torch.zeros(1), torch.zeros(1), calibration_residuals=torch.zeros(3))


# Sets of classes ------------------------------------------------------------------------------------------------------


def classified(n, seed, classes=4):
    probabilities = (2 * normal(n, classes, seed=seed)).softmax(-1)
    return probabilities, torch.multinomial(probabilities, 1, generator=generator(seed + 100_000)).squeeze(1)


@pytest.mark.parametrize("level", [0.8, 0.9])
def test_conformal_sets_equal_mapie(level):
    mapie = pytest.importorskip("mapie.classification")
    (held_out, labels), (new, _) = classified(150, 0), classified(40, 1)
    theirs = mapie.SplitConformalClassifier(GivenProbabilities(), confidence_level=level, prefit=True)
    theirs.conformalize(held_out.numpy(), labels.numpy())
    sets = theirs.predict_set(new.numpy())[1][:, :, 0]
    label_scores = conformal.label_scores(held_out, labels)
    ours = conformal.conformal_sets(new, threshold=conformal.conformal_threshold(label_scores, level=level))
    np.testing.assert_array_equal(ours, sets)


@pytest.mark.parametrize("level", [0.8, 0.9])
def test_adaptive_conformal_sets_equal_mapie(level):
    mapie = pytest.importorskip("mapie.classification")
    (held_out, labels), (new, _) = classified(150, 0), classified(40, 1)
    theirs = mapie.SplitConformalClassifier(
        GivenProbabilities(), confidence_level=level, conformity_score="aps", prefit=True, random_state=3
    )
    theirs.conformalize(held_out.numpy(), labels.numpy())
    sets = theirs.predict_set(new.numpy(), conformity_score_params={"include_last_label": False})[1][:, :, 0]
    uniform = 1 - np.random.RandomState(3).uniform(size=150)  # it subtracts where we keep
    label_scores = conformal.adaptive_label_scores(held_out, labels, uniform=uniform)
    ours = conformal.adaptive_conformal_sets(new, threshold=conformal.conformal_threshold(label_scores, level=level))
    ours[torch.arange(40), new.argmax(1)] = True  # it never leaves a set empty
    np.testing.assert_array_equal(ours, sets)


def test_adaptive_scores_agree_with_a_loop():
    probabilities, uniform = normal(6, 5).softmax(-1), torch.rand(6, generator=generator(), dtype=torch.float64)
    ours = conformal.adaptive_scores(probabilities, penalty=0.1, free_classes=2, uniform=uniform)
    for row in range(6):
        for label in range(5):
            larger = [float(p) for p in probabilities[row] if p > probabilities[row, label]]
            expected = sum(larger) + float(uniform[row] * probabilities[row, label]) + 0.1 * max(0, len(larger) + 1 - 2)
            assert ours[row, label].item() == pytest.approx(expected)


@pytest.mark.parametrize("options", [{}, {"penalty": 0.1, "free_classes": 1}])
def test_randomised_adaptive_sets_have_the_level_exactly(options):
    covered, runs = 0, 400
    for run in range(runs):
        probabilities, labels = classified(40, run)
        uniform = torch.rand(40, generator=generator(run + 5000), dtype=torch.float64)
        label_scores = conformal.adaptive_label_scores(probabilities, labels, uniform=uniform, **options)
        covered += bool(label_scores[39] <= conformal.conformal_threshold(label_scores[:39], level=0.9))
    assert covered / runs == pytest.approx(0.9, abs=4 * math.sqrt(0.09 / runs))


def test_regularisation_keeps_sets_small_where_many_classes_have_a_little():
    # The label is the first or second class; the model spreads the rest of its belief over 98 others.
    first = 0.3 + 0.3 * torch.rand(3000, generator=generator(), dtype=torch.float64)
    tail = ((0.9 - first) / 98)[:, None].expand(3000, 98)
    probabilities = torch.cat([first[:, None], torch.full((3000, 1), 0.1), tail], 1)
    labels = (torch.rand(3000, generator=generator(1)) < 0.3).long()
    uniform = torch.rand(3000, generator=generator(2), dtype=torch.float64)

    def mean_size(**options):
        held_out = conformal.adaptive_label_scores(
            probabilities[:1500], labels[:1500], uniform=uniform[:1500], **options
        )
        sets = conformal.adaptive_conformal_sets(
            probabilities[1500:],
            threshold=conformal.conformal_threshold(held_out, level=0.9),
            uniform=uniform[1500:],
            **options,
        )
        return sets.sum(1).double().mean().item()

    assert mean_size(penalty=0.1, free_classes=1) < 3 < 0.5 * mean_size()


def test_adaptive_sets_cover_hard_rows_better_than_sets_of_one_threshold():
    # Half the rows are easy (one class nearly certain), half hard (six classes alike).
    easy = torch.tensor([0.9] + [0.02] * 5).expand(2000, 6)
    hard = torch.tensor([0.25] + [0.15] * 5).expand(2000, 6)
    probabilities = torch.cat([easy, hard])[torch.randperm(4000, generator=generator())].double()
    labels = torch.multinomial(probabilities, 1, generator=generator(1)).squeeze(1)
    uniform = torch.rand(4000, generator=generator(2), dtype=torch.float64)
    plain = conformal.conformal_sets(
        probabilities[2000:],
        threshold=conformal.conformal_threshold(conformal.label_scores(probabilities[:2000], labels[:2000]), level=0.8),
    )
    adaptive_scores = conformal.adaptive_label_scores(probabilities[:2000], labels[:2000], uniform=uniform[:2000])
    adaptive = conformal.adaptive_conformal_sets(
        probabilities[2000:],
        threshold=conformal.conformal_threshold(adaptive_scores, level=0.8),
        uniform=uniform[2000:],
    )
    difficult = probabilities[2000:].amax(1) < 0.5
    covered = [sets.gather(1, labels[2000:, None])[difficult].double().mean() for sets in (plain, adaptive)]
    assert covered[1] > 0.75
    assert abs(covered[1] - 0.8) < abs(covered[0] - 0.8)


def test_the_same_probability_in_two_precisions_is_a_tie_and_in_the_set():
    probabilities, labels = classified(200, 0)
    held_out = conformal.label_scores(probabilities, labels)
    for level in (0.5, 0.7, 0.9):
        double, single = (
            conformal.conformal_sets(p, threshold=conformal.conformal_threshold(held_out, level=level))
            for p in (probabilities, probabilities.float())
        )
        assert torch.equal(double, single)


@pytest.mark.parametrize("labels", [[0, 1], [0.0] * 6, [3] * 6])
def test_labels_that_fit_no_row_or_class_are_refused(labels):
    with pytest.raises(ValueError, match="`labels` must"):
        conformal.label_scores(torch.full((6, 3), 1 / 3), torch.tensor(labels))


def test_groups_are_told_apart_however_large_their_numbers():
    values, groups = torch.arange(20.0), torch.arange(20) % 2
    expected = conformal.group_thresholds(values, groups, groups[:2], level=0.8)
    for least in (2**53, -(2**63)):
        found = conformal.group_thresholds(values, groups + least, groups[:2] + least, level=0.8)
        assert torch.equal(found, expected)
