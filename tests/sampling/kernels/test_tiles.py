"""Tiles cover an axis, and no tile is empty."""

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from dropbayes.sampling.kernels.tiles import power_of_two, tile_count


def test_tiles_cover_the_length_and_none_is_empty():
    for length in range(1, 70):
        for tile in (1, 3, 16):
            count = tile_count(length, tile)
            assert (count - 1) * tile < length <= count * tile


def test_a_power_of_two_is_the_least_one():
    assert [power_of_two(length) for length in (1, 2, 3, 16, 17, 1000)] == [1, 2, 4, 16, 32, 1024]
