"""BADGE: embeddings, diversity, repeats."""

import pytest
import torch

from dropbayes import acquisition
from tests.calibration.samples import normal


def test_distances_are_those_of_the_outer_products():
    # The first row is the longest embedding; with two rows left, the next is drawn by squared distance.
    p, h = normal(3, 4).softmax(-1), normal(3, 5, seed=1)
    residual = p - torch.nn.functional.one_hot(p.argmax(-1), 4)
    embedding = (residual[:, :, None] * h[:, None, :]).flatten(1)
    first = int(embedding.square().sum(1).argmax())
    distance = (embedding - embedding[first]).square().sum(1)
    draws = [acquisition.badge_queries(p, h, 2, seed=s) for s in range(2000)]
    assert {int(draw[0]) for draw in draws} == {first}
    share = torch.bincount(torch.stack(draws)[:, 1], minlength=3) / 2000
    torch.testing.assert_close(share.double(), distance / distance.sum(), atol=0.05, rtol=0)


def test_repeats_are_asked_for_last():
    p, h = normal(3, 4).softmax(-1), normal(3, 5, seed=1)
    doubled = acquisition.badge_queries(p.repeat(2, 1), h.repeat(2, 1), 6)
    assert len(set((doubled[:3] % 3).tolist())) == 3 and sorted(doubled.tolist()) == list(range(6))


def test_features_of_other_rows_are_refused():
    with pytest.raises(ValueError, match="`features` must have a row for each of the 2 rows"):
        acquisition.badge_queries(torch.full((2, 2), 0.5), torch.ones(3, 1), 1)
