"""Tensors that are mapped over by torch.func.vmap."""

import torch
from torch.func import vmap

from dropbayes.tracing.transforms import (
    add_batch_dim,
    all_members,
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
