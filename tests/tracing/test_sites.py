"""A site is random where two draws can differ."""

import pytest

from dropbayes.tracing import PositionAxis, RowLayout, Site


@pytest.mark.parametrize(
    ("drop_prob", "expected"), [(0.5, True), (None, True), (0.0, False), (1.0, False), (1e-9, True)]
)
def test_a_site_is_random_unless_it_drops_nothing_or_everything(drop_prob, expected):
    assert Site(0, "", "dropout", drop_prob, (3,)).is_random == expected


def test_a_site_that_is_ignored_is_not_random():
    assert not Site(-1, "", "dropout", 0.5, (3,), left_out=True).is_random


def test_sites_are_values():
    layout, position = RowLayout(1, 2), PositionAxis(2, 0)
    one, two = (Site(0, "a", "rand", None, (1, 2), layout=layout, positions=(position,)) for _ in range(2))
    assert one == two and hash(one) == hash(two)
