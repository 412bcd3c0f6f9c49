r"""The Gaussian process of a convolutional network: covariances of its channels, position by position.

As the number of channels of every layer grows, the values at all positions become jointly Gaussian, independent between
channels [Novak et al. 2019; Garriga-Alonso et al. 2019]. A convolution of $C$ channels with prior length-scale $l$ maps
their covariance $c$ at the positions $p$ of x and $p'$ of y to

$$c'(p, p') = \frac{C}{l^2} \sum_\delta c(sp + \delta,\; sp' + \delta) + l'^{-2},$$

the sum over the offsets of the kernel; an activation acts on every pair of positions as it does in a perceptron. A
network that flattens its last layer needs the pairs of equal positions alone, one that averages over positions all.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from dropbayes.covariances import Covariance, Layer, Pairs
from dropbayes.covariances.pairs import checked_inputs

__all__ = [
    "Activation",
    "ConvolutionalCovariance",
    "Flatten",
    "Pooling",
    "Step",
    "Sum",
    "WeightedSum",
    "convolution",
    "pooling",
]

_ELEMENTS = 2**22  # in a block of covariances, each pair of rows with all its positions
_POOL: Any = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


@dataclass(frozen=True)
class Field:
    """The covariances of one layer's units at two sets of inputs.

    Args:
        of_x: Each row of x with itself, `[x row, *positions]`.
        both: Every row of x with every row of y, `[x row, y row, *positions]`; None when not needed.
        of_y: Each row of y with itself, `[y row, *positions]`.
        n_axes: The number of spatial axes.
        all_pairs: Whether all pairs of positions are held (the axes of x's position, then of y's) or equal ones alone.
        n_units: The number of units of this covariance that the next layer sums at each position.
        alike: Whether every unit has this covariance; otherwise it is their mean.
    """

    of_x: Tensor
    both: Tensor | None
    of_y: Tensor
    n_axes: int
    all_pairs: bool
    n_units: int
    alike: bool = True

    @classmethod
    def of_inputs(cls, x: Tensor, y: Tensor | None, *, all_pairs: bool) -> Self:
        """The field of inputs `[row, channel, *positions]`, summed over channels as if they were one unit."""
        rows = [x.flatten(2), (x if y is None else y).flatten(2)]
        pair = "npq" if all_pairs else "np"
        shape = x.shape[2:] * (2 if all_pairs else 1)
        of_x, of_y = (torch.einsum(f"ncp,nc{pair[-1]}->{pair}", r, r).reshape(len(r), *shape) for r in rows)
        both = None
        if y is not None:
            both = torch.einsum(f"ncp,mc{pair[-1]}->nm{pair[1:]}", *rows).reshape(len(x), len(y), *shape)
        return cls(of_x, both, of_y, x.dim() - 2, all_pairs, 1)

    @property
    def n_position_axes(self) -> int:
        return self.n_axes * (2 if self.all_pairs else 1)

    def map(self, function: Callable[[Tensor], Tensor], **changes: Any) -> Field:
        """The field with a function applied to the covariances of all pairs."""
        both = None if self.both is None else function(self.both)
        return replace(self, of_x=function(self.of_x), both=both, of_y=function(self.of_y), **changes)

    def equal_positions(self, covariance: Tensor) -> Tensor:
        """The covariances at equal positions: of a row with itself, its variances."""
        if not self.all_pairs or not self.n_axes:
            return covariance
        lead, positions = covariance.shape[: -2 * self.n_axes], covariance.shape[-self.n_axes :]
        matrix = covariance.reshape(*lead, math.prod(positions), -1)
        return matrix.diagonal(dim1=-2, dim2=-1).reshape(*lead, *positions)

    def pairs(self) -> tuple[Pairs, Pairs | None, Pairs]:
        """The inner products for an activation of these units."""
        of_x, of_y = self.equal_positions(self.of_x), self.equal_positions(self.of_y)
        both = None if self.both is None else self._pairs(of_x[:, None], self.both, of_y[None])
        return self._pairs(of_x, self.of_x, of_x), both, self._pairs(of_y, self.of_y, of_y)

    def _pairs(self, variance_x: Tensor, covariance: Tensor, variance_y: Tensor) -> Pairs:
        if self.all_pairs and self.n_axes:
            lead = variance_x.dim() - self.n_axes
            ones = (1,) * self.n_axes
            variance_x = variance_x.reshape(*variance_x.shape, *ones)
            variance_y = variance_y.reshape(*variance_y.shape[:lead], *ones, *variance_y.shape[lead:])
        elif variance_x is covariance:
            return Pairs.of_identical(covariance.clamp_min(0.0).sqrt())
        return Pairs.of_process(variance_x.expand_as(covariance), covariance, variance_y.expand_as(covariance))


@dataclass(frozen=True)
class Activation:
    """An activation of every unit at every position."""

    layer: Layer

    def __call__(self, field: Field) -> Field:
        if not field.alike:
            raise ValueError("`net` must apply activations before it flattens positions: afterwards its units differ.")
        of_x, both, of_y = (None if pairs is None else self.layer.of_pairs(pairs) for pairs in field.pairs())
        assert of_x is not None and of_y is not None
        return replace(field, of_x=of_x, both=both, of_y=of_y)


@dataclass(frozen=True)
class WeightedSum:
    """A convolution, or with no axes a linear layer, whose weights and biases have Gaussian priors.

    Args:
        length_scale: The length-scale of its weights.
        bias_scale: The standard deviation of its biases.
        n_outputs: The number of output channels.
        kernel: The extent of the kernel along each axis.
        stride: The steps between positions.
        padding: The zeros before and after, along each axis.
        dilation: The steps between the elements of the kernel.
    """

    length_scale: float | Tensor
    bias_scale: float | Tensor
    n_outputs: int
    kernel: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    padding: tuple[tuple[int, int], ...] = ()
    dilation: tuple[int, ...] = ()

    def __call__(self, field: Field) -> Field:
        if field.n_axes != len(self.kernel):
            raise ValueError(
                "`net` must flatten or average its positions before a linear layer, and not before others."
            )
        factor = field.n_units / self.length_scale**2

        def add_up(covariance: Tensor) -> Tensor:
            return factor * self._patches(covariance, field.n_position_axes) + self.bias_scale**2

        return field.map(add_up, n_units=self.n_outputs, alike=True)

    def _patches(self, covariance: Tensor, n_position_axes: int) -> Tensor:
        """The sum over the offsets of the kernel, the same offset at both positions."""
        if not self.kernel:
            return covariance
        times = n_position_axes // len(self.kernel)
        covariance = F.pad(covariance, [width for axis in reversed(self.padding * times) for width in axis])
        sizes = covariance.shape[-len(self.kernel) :]
        ends = [size - d * (k - 1) for size, k, d in zip(sizes, self.kernel, self.dilation, strict=True)]
        total: Tensor | None = None
        for offset in itertools.product(*(range(k) for k in self.kernel)):
            window = tuple(
                slice(o * d, o * d + end, step)
                for o, d, end, step in zip(offset, self.dilation, ends, self.stride, strict=True)
            )
            index: Any = (..., *window * times)
            patch = covariance[index]
            total = patch if total is None else total + patch
        assert total is not None
        return total


@dataclass(frozen=True)
class Pooling:
    """An average over windows of positions, or with None over all of them."""

    kernel: tuple[int, ...] | None
    stride: tuple[int, ...] = ()

    def __call__(self, field: Field) -> Field:
        if self.kernel is None:
            axes = tuple(range(-field.n_position_axes, 0))
            return field.map(lambda covariance: covariance.mean(axes), n_axes=0)
        return field.map(lambda covariance: self._windows(self._windows(covariance, field), field))

    def _windows(self, covariance: Tensor, field: Field) -> Tensor:
        """Averages over the last position's axes, and brings those of the other to the end."""
        assert self.kernel is not None
        n_axes = field.n_axes
        lead = covariance.shape[:-n_axes]
        pooled = _POOL[n_axes](covariance.reshape(-1, 1, *covariance.shape[-n_axes:]), self.kernel, self.stride)
        pooled = pooled.reshape(*lead, *pooled.shape[2:])
        ours = tuple(range(-2 * n_axes, -n_axes))
        return pooled.movedim(ours, tuple(range(-n_axes, 0)))


@dataclass(frozen=True)
class Flatten:
    """All positions as separate units; only the sum of their covariances is known."""

    def __call__(self, field: Field) -> Field:
        if not field.n_axes:
            return field
        axes = tuple(range(-field.n_axes, 0))
        n_positions = math.prod(field.of_x.shape[-field.n_axes :])
        return field.map(
            lambda covariance: field.equal_positions(covariance).mean(axes),
            n_axes=0,
            n_units=field.n_units * n_positions,
            alike=n_positions == 1,
        )


@dataclass(frozen=True)
class Sum:
    """The sum of two branches, one of which ends in its own weights."""

    def __call__(self, field: Field, other: Field) -> Field:
        if field.of_x.shape != other.of_x.shape or field.n_units != other.n_units:
            raise ValueError("`net` must add branches with the same channels and positions.")
        both = None if field.both is None or other.both is None else field.both + other.both
        return replace(field, of_x=field.of_x + other.of_x, both=both, of_y=field.of_y + other.of_y)


Operation = Activation | WeightedSum | Pooling | Flatten | Sum


@dataclass(frozen=True)
class Step:
    """One operation of a network: its name, the steps it reads, and its map of their covariances."""

    name: str
    sources: tuple[str, ...]
    operation: Operation


@dataclass(frozen=True)
class ConvolutionalCovariance(Covariance):
    r"""The covariance of a convolutional network's output as its number of channels grows.

    Inputs are rows of numbers, `[row, channel * position]`, or images of the `input_shape`, `[row, channel, ...]`.

    Args:
        steps: The steps in the order of the forward pass; the last is the output.
        input_shape: The shape of one input: channels, then the extent of each spatial axis.
        output_bias: The bias of the output layer where its prior is flat: the process's mean function.
    """

    steps: tuple[Step, ...]
    input_shape: tuple[int, ...]
    output_bias: float = 0.0

    def __call__(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        rows = self._images(x, "x")
        columns = rows if y is None else self._images(y, "y").to(rows)
        n_pairs = math.prod(self.input_shape[1:]) ** (2 if self._all_pairs else 1)
        side = max(1, math.isqrt(_ELEMENTS // n_pairs))
        blocks: Any = [[self._field(some, others).both for others in columns.split(side)] for some in rows.split(side)]
        return torch.cat([torch.cat(row, 1) for row in blocks])

    def diagonal(self, x: Tensor) -> Tensor:
        return self._field(self._images(x, "x"), None).of_x

    def of_pairs(self, pairs: Pairs) -> Tensor:
        """Raises: a convolution needs more of its inputs than their inner products."""
        raise TypeError("`pairs` must be images: a convolution needs more than inner products. Call it on the inputs.")

    def _images(self, x: Tensor, name: str) -> Tensor:
        flat = checked_inputs(x, name).flatten(1)
        if flat.shape[1] != math.prod(self.input_shape):
            raise ValueError(
                f"`{name}` must hold inputs of the shape {self.input_shape}, flat or not; got {tuple(x.shape[1:])}."
            )
        return flat.reshape(-1, *self.input_shape)

    @property
    def _all_pairs(self) -> bool:
        """Whether covariances between all pairs of positions are needed: an average mixes positions."""
        return any(isinstance(step.operation, Pooling) for step in self.steps)

    def _field(self, x: Tensor, y: Tensor | None) -> Field:
        fields = {"input": Field.of_inputs(x, y, all_pairs=self._all_pairs)}
        for step in self.steps:
            operation: Any = step.operation
            fields[step.name] = operation(*(fields[source] for source in step.sources))
        output = fields[self.steps[-1].name]
        if output.n_axes:
            raise ValueError("`net` must flatten or average its positions: its output has some left.")
        return output

    @property
    def scales(self) -> dict[str, float | Tensor]:
        weighted = {step.name: step.operation for step in self.steps if isinstance(step.operation, WeightedSum)}
        return {
            f"{name}_{scale}": getattr(operation, scale)
            for name, operation in weighted.items()
            for scale in ("length_scale", "bias_scale")
        }

    def with_scales(self, values: Mapping[str, float | Tensor]) -> Self:
        def with_scales(step: Step) -> Step:
            if not isinstance(step.operation, WeightedSum):
                return step
            names = {scale: f"{step.name}_{scale}" for scale in ("length_scale", "bias_scale")}
            changes: dict[str, Any] = {scale: values[name] for scale, name in names.items() if name in values}
            return replace(step, operation=replace(step.operation, **changes))

        return replace(self, steps=tuple(with_scales(step) for step in self.steps))


def convolution(module: Any, length_scale: Any, bias_scale: Any) -> WeightedSum:
    """The operation of a convolution, with the scales of its prior."""
    if module.groups != 1 or module.padding_mode != "zeros":
        raise ValueError("`net` must have convolutions of one group that are padded with zeros.")
    return WeightedSum(
        length_scale,
        bias_scale,
        module.out_channels,
        tuple(module.kernel_size),
        tuple(module.stride),
        _padding(module),
        tuple(module.dilation),
    )


def _padding(module: Any) -> tuple[tuple[int, int], ...]:
    if module.padding == "same":
        totals = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
        return tuple((total // 2, total - total // 2) for total in totals)
    widths: Sequence[int] = (0,) * len(module.kernel_size) if module.padding == "valid" else module.padding
    return tuple((width, width) for width in widths)


def pooling(module: Any, n_axes: int) -> Pooling:
    """The operation of an average pooling, over windows or over all positions."""

    def per_axis(value: Any) -> tuple[int, ...]:
        return (value,) * n_axes if isinstance(value, int) else tuple(value)

    if hasattr(module, "output_size"):
        if set(per_axis(module.output_size)) != {1}:
            raise ValueError("`net` must average adaptively to one position; other sizes have uneven windows.")
        return Pooling(None)
    if set(per_axis(module.padding)) != {0} or module.ceil_mode or getattr(module, "divisor_override", None):
        raise ValueError("`net` must average over whole windows: without padding, `ceil_mode` or another divisor.")
    return Pooling(per_axis(module.kernel_size), per_axis(module.stride))
