"""Conformal sets: equal to MAPIE's, with the coverage they promise."""

import math

import numpy as np
import pytest
import torch

from dropbayes import conformal
from tests.calibration.samples import generator, normal
from tests.conformal.given import GivenProbabilities


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
    covered, runs = 0, 800
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
