"""Semantic entropy: classes of texts, weighed by number or by probability."""

import math

import pytest
import torch

import dropbayes as db


def same_length(a, b):
    return len(a) == len(b)


def test_texts_that_all_mean_the_same_have_no_entropy():
    assert db.language.semantic_entropy(["ab", "cd", "ef"], same_length) == 0


def test_texts_that_all_differ_have_the_entropy_of_their_number():
    assert db.language.semantic_entropy(["a", "bb", "ccc", "dddd"], same_length) == pytest.approx(math.log(4))


def test_classes_weigh_by_the_sum_of_their_probabilities():
    probabilities = torch.tensor([0.1, 0.2, 0.3])
    entropy = db.language.semantic_entropy(["a", "bb", "c"], same_length, log_probs=probabilities.log())
    shares = torch.tensor([0.4, 0.2]) / 0.6
    assert entropy == pytest.approx(float(-(shares * shares.log()).sum()))


def test_a_text_that_is_implied_in_one_direction_only_is_another_meaning():
    assert db.language.semantic_entropy(["a", "bb"], lambda a, b: len(a) <= len(b)) == pytest.approx(math.log(2))


@pytest.mark.parametrize(
    ("texts", "log_probs", "message"),
    [([], None, "`texts`"), ("abc", None, "`texts`"), (["a"], [0.0, 1.0], "`log_probs`")],
)
def test_bad_texts_are_named(texts, log_probs, message):
    with pytest.raises(ValueError, match=message):
        db.language.semantic_entropy(texts, same_length, log_probs=log_probs)
