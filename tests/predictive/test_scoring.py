"""The table of scores: each entry is the function it names."""

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from dropbayes import scores
from dropbayes.predictive.mixtures import Mixture
from dropbayes.predictive.scoring import (
    CLASS_SCORES,
    COVERAGE_LEVELS,
    REGRESSION_SCORES,
    ClassOutcomes,
    RegressionOutcomes,
    balanced_accuracy,
    class_auroc,
    core_scores,
)
from tests.scores.samples import normal


@pytest.fixture
def mixture():
    return normal(20, 300, seed=1), normal(300, seed=2)


def outcomes(draws, y, noise=0.5, sample_weight=None):
    return RegressionOutcomes(
        y, draws.mean(0), (draws.var(0, correction=0) + noise).sqrt(),
        Mixture(draws, torch.tensor(noise).sqrt()).pit(y),
        scores.gaussian_mixture_log_likelihood(draws, y, precision=1 / noise), sample_weight,
    )  # fmt: skip


def test_coverage_is_that_of_the_mixtures_central_interval(mixture):
    draws, y = mixture
    values = core_scores(outcomes(draws, y))
    for level in COVERAGE_LEVELS:
        distribution = Mixture(draws, torch.tensor(0.5).sqrt())
        low, high = (distribution.quantile(0.5 + sign * level / 2) for sign in (-1, 1))
        assert values[f"coverage_{100 * level:.0f}"] == pytest.approx(scores.coverage(low, high, y).item())


def test_weights_reach_every_score_of_the_table(mixture):
    draws, y = (part[..., :12] for part in mixture)
    weight = torch.arange(12) % 3
    rows = torch.repeat_interleave(torch.arange(12), weight)
    weighted = core_scores(outcomes(draws, y, sample_weight=weight))
    assert weighted == pytest.approx(core_scores(outcomes(draws[:, rows], y[rows])))
    p, labels = normal(12, 3).softmax(-1), torch.arange(12) % 3
    weighted = core_scores(ClassOutcomes(labels, p, weight))
    assert weighted == pytest.approx(core_scores(ClassOutcomes(labels[rows], p[rows])))


def test_sets_of_classes_are_counted_with_their_weights():
    p, labels = torch.full((3, 3), 1 / 3), torch.tensor([0, 1, 2])
    sets = torch.tensor([[1, 0, 0], [1, 0, 1], [0, 0, 0]], dtype=torch.bool)
    rows = ClassOutcomes(labels, p, torch.tensor([2, 1, 1]), sets=sets)
    assert CLASS_SCORES["set_coverage"].value(rows) == 0.5
    assert CLASS_SCORES["set_size"].value(rows) == 1.0
    assert CLASS_SCORES["set_size"].value(ClassOutcomes(labels, p)).isnan()


def test_every_score_has_a_name_a_meaning_and_a_direction():
    for table in (REGRESSION_SCORES, CLASS_SCORES):
        for name, score in table.items():
            assert name and score.label and score.meaning
            assert score.nominal is None or score.better is None


def test_better_predictions_move_every_score_in_its_direction():
    labels = torch.arange(300) % 3
    sure = torch.nn.functional.one_hot(labels).double() * 0.97 + 0.01
    vague = torch.nn.functional.one_hot((labels + (torch.arange(300) < 100)) % 3).double() * 0.97 + 0.01
    good, bad = (core_scores(ClassOutcomes(labels, p)) for p in (sure, vague))
    for name, score in CLASS_SCORES.items():
        if name not in good:
            continue
        assert good[name] > bad[name] if score.better == "higher" else good[name] < bad[name]


@pytest.mark.slow
def test_every_score_that_is_a_mean_has_the_error_of_resampled_rows(mixture):
    draws, y = mixture
    rows = outcomes(draws, y)
    rng = torch.Generator().manual_seed(0)
    chosen = [torch.randint(300, (300,), generator=rng) for _ in range(200)]
    for name in ("log_likelihood", "rmse", "mae"):
        score = REGRESSION_SCORES[name]
        resampled = [score.value(outcomes(draws[:, some], y[some])) for some in chosen]
        assert score.error(rows).item() == pytest.approx(torch.stack(resampled).std().item(), rel=0.15)


@pytest.mark.parametrize("n_classes", [2, 4])
def test_the_auroc_of_classes_is_that_of_scikit_learn(n_classes):
    rng = np.random.default_rng(0)
    p, labels = rng.dirichlet(np.ones(n_classes), size=200), np.arange(200) % n_classes
    expected = roc_auc_score(labels, p[:, 1] if n_classes == 2 else p, multi_class="ovr")
    assert class_auroc(p, labels).item() == pytest.approx(expected)
    assert class_auroc(p, np.zeros(200, dtype=np.int64)).isnan()
    halves = np.repeat([1.0, 0.0], 100)
    assert class_auroc(p, labels, sample_weight=halves).item() == pytest.approx(
        class_auroc(p[:100], labels[:100]).item()
    )


def test_balanced_accuracy_counts_every_class_alike():
    labels, probabilities = torch.tensor([0] * 9 + [1]), torch.tensor([[0.9, 0.1]] * 10)
    assert balanced_accuracy(probabilities, labels).item() == 0.5


def test_a_description_says_which_direction_is_better():
    assert REGRESSION_SCORES["coverage_95"].description.endswith("; 95 % is right")
    assert REGRESSION_SCORES["rmse"].description.endswith("; smaller is better")
    assert CLASS_SCORES["accuracy"].description.endswith("; larger is better")


def test_an_absolute_error_does_not_depend_on_the_side():
    zeros = torch.zeros(2)
    rows = RegressionOutcomes(torch.tensor([1.0, -2.0]), zeros, zeros + 1, zeros + 0.5, zeros)
    assert rows.absolute_errors().tolist() == [1, 2]


def test_rows_that_do_not_match_are_refused():
    three, two = torch.zeros(3), torch.zeros(2)
    with pytest.raises(ValueError, match="`std`"):
        RegressionOutcomes(three, three, two, three, three)
    with pytest.raises(ValueError, match="`log_likelihood`"):
        RegressionOutcomes(three, three, three, three, two)


def test_a_row_is_correct_if_its_most_probable_class_is_the_label():
    rows = ClassOutcomes(torch.tensor([0, 1]), torch.tensor([[0.6, 0.4], [0.6, 0.4]]))
    assert rows.correct().tolist() == [1, 0]
    assert rows.uncertainty()[0].item() == pytest.approx(
        -(0.6 * torch.tensor(0.6).log() + 0.4 * torch.tensor(0.4).log()).item()
    )
