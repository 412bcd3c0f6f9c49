"""The rows of a tensor's entries, through the operations that take some of them."""

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from dropbayes.tracing.entries import RowsOfEntries
from dropbayes.tracing.operations import operands


class Followed(TorchFunctionMode):
    def __init__(self, n_rows):
        super().__init__()
        self.rows = RowsOfEntries(n_rows)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.rows.follow(func, args, kwargs or {}, operands((result,)))
        return result


X = torch.randn(3, 4, 5)  # of three rows with four parts each
MASK = torch.zeros(3, 4, dtype=torch.bool)
MASK[[0, 2, 2, 2], [1, 0, 1, 3]] = True
PLACES = MASK.flatten().nonzero()[:, 0]
FORMS = {
    "by a mask of rows and parts": lambda: X[MASK],
    "by a mask of flattened parts": lambda: X.flatten(0, 1)[MASK.flatten()],
    "by places": lambda: X.flatten(0, 1)[PLACES],
    "by places behind a new axis": lambda: X.flatten(0, 1)[None, PLACES].reshape(-1, 5),
    "by rows and parts": lambda: X[MASK.nonzero(as_tuple=True)],
    "by torch.index_select": lambda: torch.index_select(X.flatten(0, 1), 0, PLACES),
    "by a method": lambda: X.flatten(0, 1).index_select(0, PLACES),
    "of those that were taken": lambda: X.flatten(0, 1)[torch.arange(12)][PLACES],
    "before other operations": lambda: F.linear(torch.relu(X[MASK]), torch.ones(7, 5)) + 1,
    "of numbers": lambda: X[..., 0].flatten()[PLACES] * 2,
}


@pytest.mark.parametrize("form", FORMS)
def test_the_row_of_what_is_taken_is_followed(form):
    with Followed(3) as mode:
        taken = FORMS[form]()
    assert mode.rows.of(taken).tolist() == [0, 2, 2, 2]


def test_parts_in_another_order_have_their_rows_in_that_order():
    with Followed(3) as mode:
        taken = X.flatten(0, 1)[PLACES.flip(0)]
    assert mode.rows.of(taken).tolist() == [2, 2, 2, 0]


def test_two_tensors_of_the_same_length_have_rows_of_their_own():
    with Followed(3) as mode:
        first, second = X.flatten(0, 1)[:, :2][PLACES], X.flatten(0, 1)[PLACES - 1]
        doubled = first * 2
    assert mode.rows.of(doubled).tolist() == [0, 2, 2, 2] and mode.rows.of(second).tolist() == [0, 1, 2, 2]


def test_nothing_is_known_of_what_was_not_taken():
    with Followed(3) as mode:
        tensors = [X * 2, X[MASK].sum(0), X[:2], torch.randn(4, 5), torch.randn(5)[torch.tensor([1, 2])]]
    assert [mode.rows.of(tensor) for tensor in tensors] == [None] * 5
