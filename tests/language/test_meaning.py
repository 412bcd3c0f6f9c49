"""Semantic entropy: classes of texts, weighed by number or by probability."""

import dataclasses
import math
import types

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
    [
        ([], None, "`texts`"),
        ("abc", None, "`texts`"),
        (["a"], [0.0, 1.0], "`log_probs`"),
        (["a", "b"], [float("-inf")] * 2, "`log_probs`"),
    ],
)
def test_bad_texts_are_named(texts, log_probs, message):
    with pytest.raises(ValueError, match=message):
        db.language.semantic_entropy(texts, same_length, log_probs=log_probs)


class Judge(torch.nn.Module):
    """Judges that the premise implies the hypothesis if it begins with it; in training it is never sure."""

    def __init__(self, labels):
        super().__init__()
        self.config = types.SimpleNamespace(id2label=labels)
        self.weight, self.dropout = torch.nn.Parameter(torch.ones(1)), torch.nn.Dropout(0.999)
        self.device = torch.device("cpu")

    def forward(self, premise, hypothesis):
        size = hypothesis.shape[1]
        implied = (premise[:, :size] == hypothesis).all(-1).float() if size <= premise.shape[1] else torch.zeros(1)
        logits = torch.stack([self.dropout(implied), 0.5 * self.weight.expand(1)], -1)
        return Output(logits)


@dataclasses.dataclass
class Output:
    logits: torch.Tensor


def letters(premise, hypothesis, **_):
    return {
        name: torch.tensor([[ord(letter) for letter in text]], dtype=torch.float32)
        for name, text in (("premise", premise), ("hypothesis", hypothesis))
    }


def test_meanings_are_told_apart_by_a_model_of_inference():
    implies = db.language.entailment(Judge({0: "ENTAILMENT", 1: "neutral"}).train(), letters, question="Where?")
    assert implies("Paris, France", "Paris") and not implies("Paris", "Paris, France")
    assert db.language.semantic_entropy(["Paris", "Paris", "Rome"], implies) == pytest.approx(0.6365, abs=1e-4)


def test_a_model_without_the_label_is_refused():
    with pytest.raises(ValueError, match="must have one label called entailment; its labels are"):
        db.language.entailment(Judge({0: "good", 1: "bad"}), letters)
