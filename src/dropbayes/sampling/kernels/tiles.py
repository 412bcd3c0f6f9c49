"""The number and width of the tiles that cover an axis.

Triton's own functions are made for kernels: called on the host, they cost more than a launch should.
"""

from __future__ import annotations


def tile_count(length: int, tile: int) -> int:
    """The least number of tiles that cover the length."""
    return -(-length // tile)


def power_of_two(length: int) -> int:
    """The least power of two that is not below the length."""
    return 1 << (length - 1).bit_length()
