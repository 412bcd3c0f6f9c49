"""Thresholds: exact coverage by rank, by group, and under covariate shift."""

import math

import pytest
import torch

from dropbayes import conformal
from dropbayes.conformal import OnlineLevel
from tests.calibration.samples import generator, normal


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
    runs, n, covered = 3000, 60, torch.zeros(2)
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
    steps, level = 1500, OnlineLevel(target=0.9, rate=rate)
    noise = torch.randn(steps, generator=generator(), dtype=torch.float64).abs()
    scale = {"drift": torch.linspace(1, 20, steps), "jump": torch.where(torch.arange(steps) < 700, 1.0, 9.0)}
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
