"""A compiled kernel is used again only for arguments of the same classes."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from dropbayes.sampling.kernels import launching
from dropbayes.sampling.kernels.launching import power_of_two, tile_count


class Kernel:
    """A stand-in for a Triton function that counts its compilations and notes its launches."""

    def __init__(self):
        self.compiled, self.launched = 0, []

    def __getitem__(self, grid):
        def compile_and_launch(*arguments, num_warps):
            self.compiled += 1
            self.launched.append((grid, arguments))
            return Compiled(self)

        return compile_and_launch


class Compiled:
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *arguments: self.kernel.launched.append((grid, arguments))


def launches(*calls):
    kernel = Kernel()
    for x, inner, constants in calls:
        launching.launch(kernel, 3, (inner,), (x,), x, inner, constants=constants)
    return kernel


def test_the_same_classes_of_arguments_compile_once():
    x, y = torch.zeros(8), torch.zeros(8)
    kernel = launches((x, 4, (True,)), (y, 4, (True,)))
    assert kernel.compiled == 1
    assert [arguments[0] is one for (_, arguments), one in zip(kernel.launched, (x, y), strict=True)] == [True, True]
    assert kernel.launched[1] == ((3, 1, 1), (y, 4, True))


@pytest.mark.parametrize(
    "other",
    [
        (torch.zeros(8, dtype=torch.float64), 4, (True,)),
        (torch.zeros(9)[1:], 4, (True,)),
        (None, 4, (True,)),
        (torch.zeros(8), 16, (True,)),
        (torch.zeros(8), 4, (False,)),
    ],
    ids=["dtype", "alignment", "missing", "integer", "constant"],
)
def test_another_class_of_argument_is_compiled_anew(other):
    assert launches((torch.zeros(8), 4, (True,)), other).compiled == 2


def test_tiles_cover_the_length_and_none_is_empty():
    for length in range(1, 70):
        for tile in (1, 3, 16):
            count = tile_count(length, tile)
            assert (count - 1) * tile < length <= count * tile


def test_a_power_of_two_is_the_least_one():
    assert [power_of_two(length) for length in (1, 2, 3, 16, 17, 1000)] == [1, 2, 4, 16, 32, 1024]
