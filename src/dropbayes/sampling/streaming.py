r"""Streaming statistics of draws: moments, class statistics and log-likelihoods in float64.

Draws are gathered into groups of fixed size before they are added, so that a statistic has the same bits for any
chunking of the draws.
"""

import math
from abc import ABC, abstractmethod
from typing import Self

import numpy as np
import torch
from torch import Tensor

from dropbayes.sampling.kernels import kernels_on

_LARGE_ELEMENTS = 2**16  # up to this many elements per draw, groups are large: fewer, longer sums
_LARGE_GROUP, _SMALL_GROUP = 128, 16


class _Groups(ABC):
    """A statistic updated by groups of draws, whose size depends only on the size of a draw."""

    def __init__(self) -> None:
        self.count = 0
        self._waiting: list[Tensor] = []

    def add(self, draws: Tensor) -> None:
        """Adds draws `[draw, ...]`, in order."""
        group = _LARGE_GROUP if draws[0].numel() <= _LARGE_ELEMENTS else _SMALL_GROUP
        self._waiting.append(draws)
        if n_whole := sum(map(len, self._waiting)) // group:
            groups = self._join().split(group)
            for whole_group in groups[:n_whole]:
                self._count_in(whole_group)
            self._waiting = list(groups[n_whole:])

    def finish(self) -> Self:
        """The statistic with the incomplete last group added."""
        if self._waiting:
            self._count_in(self._join())
            self._waiting = []
        return self

    def _join(self) -> Tensor:
        return torch.cat(self._waiting) if len(self._waiting) > 1 else self._waiting[0]

    @abstractmethod
    def _count_in(self, draws: Tensor) -> None: ...


class Moments(_Groups):
    """The mean and variance over draws, by Chan's pairwise update (Welford's, group by group)."""

    mean: Tensor
    _squares: Tensor  # sum of squared deviations from the mean

    @property
    def variance(self) -> Tensor:
        r"""The variance, $\frac1T\sum_t \widehat y_t^2 - (\frac1T\sum_t \widehat y_t)^2$ [GG16, prop:var]."""
        return self._squares / self.count

    def _count_in(self, draws: Tensor) -> None:
        size, (mean, squares) = draws.shape[0], _moments(draws)
        if self.count == 0:
            self.count, self.mean, self._squares = size, mean, squares
            return
        total = self.count + size
        step = mean - self.mean
        self._squares = self._squares + squares + step.square() * (self.count * size / total)
        self.mean = self.mean + step * (size / total)
        self.count = total


def _moments(draws: Tensor) -> tuple[Tensor, Tensor]:
    """The mean and the sum of squared deviations from it, in float64."""
    kernels = None if draws.requires_grad else kernels_on(draws.device)
    if kernels is not None and draws.dtype in (torch.float32, torch.float16, torch.bfloat16):
        moments: tuple[Tensor, Tensor] = kernels.moments_over_draws(draws)
        return moments
    mean = mean_over_draws(draws)
    squares = draws.to(torch.float64, copy=True).sub_(mean).square_()
    return mean, _sum_over_draws(squares) if draws.dtype == torch.float64 else squares.sum(0)


def mean_over_draws(draws: Tensor) -> Tensor:
    """The mean of `[draw, ...]` over draws in float64, by `_sum_over_draws`."""
    return _sum_over_draws(draws).div_(draws.shape[0])


def _sum_over_draws(draws: Tensor) -> Tensor:
    """The sum of `[draw, ...]` over draws in float64, with the same bits for an element alone and among others.

    torch's order of summation depends on the number of elements. That shows only where the result is not rounded to
    a shorter dtype: float64 draws are summed by NumPy, in order.
    """
    if draws.dtype != torch.float64 or draws.device.type != "cpu" or draws.requires_grad:
        return draws.sum(0, dtype=torch.float64)
    flat = draws.reshape(draws.shape[0], -1).contiguous().numpy()
    if flat.shape[1] == 1:  # NumPy would sum a single column in pairs
        flat = flat.repeat(2, axis=1)
    return torch.from_numpy(np.add.reduce(flat, 0)[: draws[0].numel()]).view(draws.shape[1:])


class Mean(_Groups):
    """The mean over draws."""

    _sum: Tensor

    @property
    def value(self) -> Tensor:
        """The mean."""
        return self._sum / self.count

    def _count_in(self, draws: Tensor) -> None:
        total = _sum_over_draws(draws)
        self._sum = total if self.count == 0 else self._sum + total
        self.count += draws.shape[0]


class LogMean(_Groups):
    r"""The running $\log \frac1T \sum_t e^{\ell_t}$ of log-densities, safe from under- and overflow."""

    _log_sum: Tensor

    @property
    def value(self) -> Tensor:
        """The log of the mean density."""
        return self._log_sum - math.log(self.count)

    def _count_in(self, draws: Tensor) -> None:
        log_sum = draws.double().logsumexp(0)
        self._log_sum = log_sum if self.count == 0 else torch.logaddexp(self._log_sum, log_sum)
        self.count += draws.shape[0]


def result_dtype(output: Tensor) -> torch.dtype:
    """The dtype of statistics of such outputs."""
    return torch.float64 if output.dtype in (torch.float64, torch.complex128) else torch.float32
