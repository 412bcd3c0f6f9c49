"""Tests of the folds of a search."""

import pytest
import torch

from dropbayes.population.ensembles import forward_folds, random_folds


def test_forward_folds_learn_all_that_came_before_and_nothing_after():
    times = torch.tensor([3, 0, 5, 1, 4, 2, 5, 0, 3, 1])
    splits = forward_folds(times, 5)
    assert [times[held].unique().tolist() for _, held in splits] == [[1], [2], [3], [4], [5]]
    for learned, held in splits:
        assert learned.tolist() == [row for row in range(10) if times[row] < times[held].min()]


def test_a_single_forward_split_holds_out_the_last_fifth():
    times = torch.arange(10).flip(0)
    [(learned, held)] = forward_folds(times, 1)
    assert sorted(times[held].tolist()) == [8, 9]
    assert sorted(times[learned].tolist()) == list(range(8))


def test_more_forward_folds_than_times_are_as_many_as_there_are():
    assert len(forward_folds(torch.tensor([0, 1, 2, 2]), 5)) == 2


@pytest.mark.parametrize("stratified", [False, True])
@pytest.mark.parametrize("n_folds", [1, 2, 5, 9])
def test_a_group_is_never_on_both_sides_and_every_row_is_held_out_once(n_folds, stratified):
    groups = torch.arange(90) % 13 + 100
    made = random_folds(groups, n_folds, strata=torch.arange(90) % 3 if stratified else None, seed=2)
    assert len(made) == n_folds
    for learned, held in made:
        assert not set(groups[learned].tolist()) & set(groups[held].tolist())
        assert sorted([*learned.tolist(), *held.tolist()]) == list(range(90))
    if n_folds > 1:
        assert sorted(row for _, held in made for row in held.tolist()) == list(range(90))


@pytest.mark.parametrize("n_folds", [1, 3, 5])
def test_every_fold_of_a_classification_has_its_share_of_every_class(n_folds):
    labels = torch.tensor([0] * 83 + [1] * 12 + [2] * 5)
    for _, rows in random_folds(torch.arange(100), n_folds, strata=labels):
        held = torch.bincount(labels[rows], minlength=3)
        expected = torch.tensor([83, 12, 5]) / (n_folds if n_folds > 1 else 5)
        assert ((held - expected).abs() < 1).all() and (held > 0).all()


def test_classes_are_shared_out_by_groups_where_rows_belong_together():
    labels, groups = torch.arange(60) % 2, torch.arange(60) // 6
    labels[:12] = 2  # two groups of a rare class
    made = random_folds(groups, 2, strata=labels)
    assert [int((labels[held] == 2).sum()) for _, held in made] == [6, 6]
