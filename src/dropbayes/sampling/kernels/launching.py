"""Launches of compiled kernels.

At every launch Triton binds and classifies all arguments anew, which takes longer than a small kernel runs. A compiled
kernel is used again here for arguments of the same classes.
"""

from typing import Any

from torch import Tensor

ALIGNMENT = 16  # bytes: Triton compiles a kernel for aligned addresses
_compiled: dict[tuple[Any, ...], Any] = {}


def launch(
    kernel: Any,
    n_programs: int | tuple[int, int],
    specialised: tuple[int, ...],
    tensors: tuple[Tensor | None, ...],
    *arguments: Any,
    constants: tuple[Any, ...],
    num_warps: int = 4,
    **options: Any,
) -> None:
    """Launches a `triton.jit` function as `n_programs` programs, along one or two axes.

    `specialised` are the integers among its arguments for whose values Triton may compile a kernel of its own and
    `tensors` those that may be of any dtype, lie anywhere or be missing; `arguments` are all but the `constants`.
    """
    classes = [t if t is None else (t.dtype, t.device.index, t.data_ptr() % ALIGNMENT == 0) for t in tensors]
    key = (id(kernel), *specialised, *constants, *classes, num_warps, *options.items())
    grid = (n_programs, 1, 1) if isinstance(n_programs, int) else (*n_programs, 1)
    compiled = _compiled.get(key)
    if compiled is not None:
        compiled[grid](*arguments, *constants)
        return
    result = kernel[grid](*arguments, *constants, num_warps=num_warps, **options)
    if hasattr(result, "__getitem__"):  # the interpreter compiles nothing
        _compiled[key] = result


# Triton's own functions for tiles are made for kernels: called on the host, they cost more than a launch should.


def tile_count(length: int, tile: int) -> int:
    """The least number of tiles that cover the length."""
    return -(-length // tile)


def power_of_two(length: int) -> int:
    """The least power of two that is not below the length."""
    return 1 << (length - 1).bit_length()
