"""The rows of a tensor's entries, through the operations that take some of them."""

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from dropbayes.tracing.entries import RowsOfEntries
from dropbayes.tracing.operations import operands


class Followed(TorchFunctionMode):
    def __init__(self, n_rows, *inputs):
        super().__init__()
        self.rows = RowsOfEntries(n_rows, inputs)

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
    "by an operator": lambda: torch.ops.aten.index.Tensor(X.flatten(0, 1), [PLACES]),
    "of those that were taken": lambda: X.flatten(0, 1)[torch.arange(12)][PLACES],
    "before other operations": lambda: F.linear(torch.relu(X[MASK]), torch.ones(7, 5)) + 1,
    "of numbers": lambda: X[..., 0].flatten()[PLACES] * 2,
}


@pytest.mark.parametrize("form", FORMS)
def test_the_row_of_what_is_taken_is_followed(form):
    with Followed(3, X) as mode:
        taken = FORMS[form]()
    assert mode.rows.of(taken).tolist() == [0, 2, 2, 2]


def test_parts_in_another_order_have_their_rows_in_that_order():
    with Followed(3, X) as mode:
        taken = X.flatten(0, 1)[PLACES.flip(0)]
    assert mode.rows.of(taken).tolist() == [2, 2, 2, 0]


def test_two_tensors_of_the_same_length_have_rows_of_their_own():
    with Followed(3, X) as mode:
        first, second = X.flatten(0, 1)[:, :2][PLACES], X.flatten(0, 1)[PLACES - 1]
        doubled, mixed = first * 2, first + second[:, :2]
    assert mode.rows.of(doubled).tolist() == [0, 2, 2, 2] and mode.rows.of(second).tolist() == [0, 1, 2, 2]
    assert mode.rows.of(mixed) is None and not mode.rows.are_in_order(mixed)


ORDER = torch.tensor([2, 0, 1])
V = torch.randn(3, 5)
TABLE = torch.randn(3, 5, 5)  # of weights, as long as there are rows
SORTED = {
    "by an index": lambda: V[ORDER],
    "by torch.gather": lambda: V.gather(0, ORDER[:, None].expand(-1, 5)),
    "by torch.take_along_dim": lambda: torch.take_along_dim(V, ORDER[:, None], 0),
    "in parts put together": lambda: torch.cat([one.tanh() for one in V[ORDER].split([1, 2])]),
    "with the weights of each": lambda: torch.einsum("nd,nde->ne", V[ORDER], TABLE[V[:, 0].long().abs()[ORDER] % 3]),
    "by a sort of numbers": lambda: torch.tensor([1.0, 2.0, 0.0]).add(V[:, 0] * 0).sort().values,
}
PUT_BACK = {
    "by the inverse": lambda y: y[ORDER.argsort()],
    "by assignment": lambda y: assigned(torch.zeros_like(y), y),
    "by index_add": lambda y: torch.zeros_like(y).index_add(0, ORDER, y),
    "by scatter": lambda y: torch.empty_like(y).scatter(0, ORDER[:, None].expand_as(y), y),
}


def assigned(out, y):
    out[ORDER] = y
    return out


@pytest.mark.parametrize("way", SORTED)
def test_sorted_rows_are_followed(way):
    with Followed(3, V) as mode:
        taken = SORTED[way]()
    assert mode.rows.of(taken).tolist() == [2, 0, 1] and not mode.rows.are_in_order(taken)


@pytest.mark.parametrize("way", PUT_BACK)
def test_sorted_rows_that_are_put_back_are_in_order(way):
    with Followed(3, V) as mode:
        back = PUT_BACK[way](V[ORDER].tanh())
    assert mode.rows.are_in_order(back) and torch.equal(back, V.tanh())


def test_what_is_put_into_a_buffer_with_more_axes_is_in_order_or_not():
    with Followed(3, X) as mode:
        still, moved = torch.zeros(3, 4, 5, 2), torch.zeros(3, 4, 5, 2)
        still[..., 0] = X
        moved[..., 0] = X[ORDER]
    assert mode.rows.are_in_order(still) and mode.rows.of(moved[:, 1]) is None


INTO = {
    "at their ranks": lambda: put(lambda out: out.__setitem__(ORDER.argsort(), V)),
    "into a buffer": lambda: put(lambda out: out.__setitem__(slice(None), V[ORDER])),
    "by index_copy": lambda: torch.zeros(3, 5).index_copy(0, ORDER.argsort(), V),
    "by index_put": lambda: torch.zeros(3, 5).index_put((ORDER.argsort(),), V),
    "by scatter": lambda: torch.zeros(3, 5).scatter(0, ORDER.argsort()[:, None].expand(3, 5), V),
    "in two parts": lambda: torch.cat([V[V[:, 0].abs() < 0], V[ORDER[:2]], V[ORDER[2:]]]),
}


def put(write):
    out = torch.zeros(3, 5)
    write(out)
    return out


@pytest.mark.parametrize("way", INTO)
def test_rows_that_are_put_elsewhere_are_followed(way):
    with Followed(3, V) as mode:
        y = INTO[way]()
    assert torch.equal(y, V[ORDER]) and mode.rows.of(y).tolist() == [2, 0, 1] and not mode.rows.are_in_order(y)


def test_what_moves_rows_in_an_unseen_way_is_not_taken_for_the_rows_in_order():
    with Followed(3, X, V) as mode:
        moved = [X.flip(0), X.roll(1, 0), X.sort(0).values, V[ORDER].sum(0), F.one_hot(V[:, 0].argsort()).float() @ V]
    assert [mode.rows.of(one) for one in moved] == [None] * 5
    assert not any(map(mode.rows.are_in_order, moved))


def test_a_tensor_that_no_row_reaches_has_none():
    with Followed(3, X) as mode:
        tensors = [TABLE * 2, torch.randn(3, 5), TABLE[ORDER], torch.zeros_like(X)]
    assert [mode.rows.of(tensor) for tensor in tensors] == [None] * 4


def test_the_rows_in_order_stay_so_along_any_axis():
    with Followed(3, X) as mode:
        tensors = [
            X * 2,
            X.transpose(0, 1),
            X.flatten(0, 1),
            X.sort(-1).values,
            X.topk(2)[0],
            X[..., 0],
            X + V[:, None],
        ]
    assert all(map(mode.rows.are_in_order, tensors))
    assert mode.rows.of(tensors[2]).tolist() == [0] * 4 + [1] * 4 + [2] * 4


def test_what_a_network_writes_its_results_into_is_left_as_it_is():
    numbers, out = torch.tensor([[10, 11], [20, 21], [30, 31]]), torch.empty(3, 2, dtype=torch.int64)
    with Followed(3, numbers) as mode:
        torch.index_select(numbers, 0, ORDER, out=out)
    assert torch.equal(out, numbers[ORDER]) and mode.rows.of(out).tolist() == [2, 0, 1]


def test_an_operation_that_takes_no_rows_in_the_place_of_its_tensor_leaves_them_unknown():
    with Followed(3, V) as mode:
        named = torch.index_select(input=V, dim=0, index=ORDER)
    assert torch.equal(named, V[ORDER]) and mode.rows.of(named) is None and not mode.rows.are_in_order(named)
