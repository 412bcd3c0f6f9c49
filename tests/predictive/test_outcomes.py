"""Predictions beside what happened, row by row."""

import pytest
import torch

from dropbayes.predictive.outcomes import ClassOutcomes, RegressionOutcomes


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
