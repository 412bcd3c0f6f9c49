"""Tensors that are mapped over by torch.func.vmap."""

import pytest
import torch
from torch import nn
from torch.func import vmap
from torch.overrides import TorchFunctionMode

from dropbayes.tracing import Interception, Ones
from dropbayes.tracing.transforms import (
    add_batch_dim,
    all_members,
    divided,
    is_batched,
    is_mapped,
    maps_randomly,
    outside_transforms,
    transform_depth,
    unmapped,
)

X = torch.arange(12.0).view(3, 4)


def test_a_real_tensor_can_stand_for_its_members_and_be_had_back():
    seen = []

    def member(row):
        level = transform_depth()
        other = add_batch_dim(2 * X, 1, level)  # members along the second axis
        seen.append((is_batched(row), is_mapped(row, level), is_mapped(row, level + 1), is_mapped(X, level)))
        seen.append((unmapped(row, level, 1, 3), unmapped(X, level, 0, 3).shape, all_members(row)))
        return row.sum() + other.sum()

    result = vmap(member, out_dims=0)(torch.eye(4)[:, :3])
    flags, (members, alike, everything) = seen
    assert flags == (True, True, False, False) and transform_depth() is None
    assert torch.equal(members, torch.eye(4)[:, :3].T) and alike == (3, 3, 4)
    assert torch.equal(everything, torch.eye(4)[:, :3])
    torch.testing.assert_close(result, torch.eye(4)[:, :3].sum(1) + 2 * X.sum(0))


def test_the_first_member_stands_for_all_outside_of_transforms():
    seen = []
    vmap(lambda row: seen.append(outside_transforms(row)) or row)(X)
    assert torch.equal(seen[0], X[0]) and outside_transforms("text") == "text"


def test_members_differ_in_their_random_numbers_unless_they_are_the_same():
    seen = []
    for randomness in ("different", "same", "error"):
        vmap(lambda row: seen.append(maps_randomly()) or row, randomness=randomness)(X)
    torch.func.grad(lambda row: seen.append(maps_randomly()) or row.sum())(X)
    assert seen == [True, False, True, False]


def writes(row):
    """Tensors into which values of a row are written, in several ways."""
    whole, part, view, filled = torch.ones(4), torch.zeros(3, 4), torch.ones(2, 4), torch.zeros(4)
    whole.mul_(row)
    part[:, 1] = row[:3]
    view.view(-1)[3:7].copy_(row)
    filled.index_add_(0, torch.tensor([2]), row[:1])
    return whole, part, view, filled


def test_a_tensor_is_divided_where_the_values_of_members_are_written_into_it():
    class Dividing(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            try:
                return func(*args, **kwargs or {})
            except RuntimeError:
                assert divided(args[0])
                return func(*args, **kwargs or {})

    with Dividing(), torch.no_grad():
        found = vmap(writes)(X)
    for index, row in enumerate(X):
        for tensor, wanted in zip(found, writes(row), strict=True):
            assert torch.equal(tensor[index], wanted)


def test_a_tensor_of_which_views_are_held_is_not_divided():
    def member(row):
        whole = torch.zeros(2, 4)
        view = whole[0]
        assert not divided(whole) and not is_batched(whole)
        return view + row

    with torch.no_grad():
        vmap(member)(X)


def test_parameters_and_what_is_divided_already_stay():
    weight = nn.Parameter(torch.ones(4))

    def member(row):
        assert not any(map(divided, (weight, row)))
        return row

    vmap(member)(X)
    assert not is_batched(weight) and not divided(X)


class MappedOver(Ones):
    maps = True


def test_only_a_tensor_that_the_pass_has_made_is_divided():
    outer = torch.zeros(4)

    def member(row, write):
        with Interception(MappedOver()):
            return write(row)

    found = vmap(lambda row: member(row, lambda row: torch.zeros(4).add_(row)))(X)
    assert torch.equal(found, X)
    with pytest.raises(RuntimeError, match="broadcast shape"):
        vmap(lambda row: member(row, outer.add_))(X)
    assert not is_batched(outer) and torch.equal(outer, torch.zeros(4))
