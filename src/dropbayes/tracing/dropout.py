"""Dropout of activations, features and weights, with masks from a `Source`."""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from dropbayes.tracing.operations import Operation
from dropbayes.tracing.sources import Handlers, RandomMode, scaled_product


def _dropout(
    mode: RandomMode, func: Operation, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, *,
    train: bool | None = None, unbatched_dim: int | None = None,
) -> Tensor:  # fmt: skip
    """Dropout of elements or, given the number of axes of an input without rows, of whole channels."""
    p, training = float(p), training if train is None else train  # a NumPy number would round the scale
    if not 0 < p <= 1 or mode.source.is_off(training):
        return func(input, p, False)
    if unbatched_dim is not None:
        return mode.source.dropout("feature_dropout", input, p, _features(input, unbatched_dim), inplace)
    integrated = mode.source.integrate(input, p, inplace)
    return mode.source.dropout("dropout", input, p, _shape(input), inplace) if integrated is None else integrated


def _alpha_dropout(
    mode: RandomMode, func: Operation, input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False, *,
    train: bool | None = None, features: bool = False,
) -> Tensor:  # fmt: skip
    p, training = float(p), training if train is None else train
    if not 0 < p < 1 or mode.source.is_off(training):
        return func(input, p, p == 1 and training)
    kind, shape = ("feature_alpha_dropout", _features(input, 0)) if features else ("alpha_dropout", _shape(input))
    if (keep := mode.source.keep(kind, p, shape, input)) is None:
        return input.mul_(1) if inplace else input.clone()
    # SELU's limit for large negative inputs, -λα, and the affine map that restores mean 0 and variance 1
    # (Klambauer et al. 2017, "Self-normalizing neural networks").
    saturation = -1.7580993408473766
    scale = ((1 - p) * (1 + p * saturation**2)) ** -0.5
    result = (input * keep + saturation * (1 - keep)) * scale - scale * p * saturation
    return input.copy_(result) if inplace else result


def _shape(input: Tensor) -> tuple[int, ...]:
    if input.is_nested:
        remedy = "Pad it before the dropout, as with torch.nested.to_padded_tensor"
        raise NotImplementedError(f"`net` drops a nested tensor, whose rows have no common shape. {remedy}.")
    return tuple(input.shape)


def _features(input: Tensor, unbatched_dim: int) -> tuple[int, ...]:
    """The mask's shape for whole channels: `[row, channel, 1, ...]`, or `[channel, 1, ...]` without a row axis."""
    leading = 1 if input.dim() == unbatched_dim else 2
    return _shape(input)[:leading] + (1,) * (input.dim() - leading)


def _native_dropout(
    mode: RandomMode, func: Operation, input: Tensor, p: float, train: bool | None
) -> tuple[Tensor, Tensor]:
    if not 0 < p <= 1 or mode.source.is_off(bool(train)):
        return func(input, p, False)
    if (keep := mode.source.keep("dropout", p, _shape(input), input)) is None:
        return input.clone(), torch.ones_like(input, dtype=torch.bool)
    return scaled_product(input, keep, p), keep.expand(input.shape).bool()


def _operators(name: str) -> tuple[Operation, ...]:
    """An operator of torch as a function, as an operator of ATen and as its one overload."""
    packet = getattr(torch.ops.aten, name)
    return getattr(torch, name), packet, packet.default


HANDLERS: Handlers = {
    F.dropout: _dropout,
    F.dropout1d: functools.partial(_dropout, unbatched_dim=2),
    F.dropout2d: functools.partial(_dropout, unbatched_dim=0),
    F.dropout3d: functools.partial(_dropout, unbatched_dim=4),
    F.alpha_dropout: _alpha_dropout,
    F.feature_alpha_dropout: functools.partial(_alpha_dropout, features=True),
}
for _name, _handler in {  # the operators under these: a network may call them by name, as an exported one does
    "dropout": HANDLERS[F.dropout],
    "feature_dropout": HANDLERS[F.dropout2d],
    "alpha_dropout": HANDLERS[F.alpha_dropout],
    "feature_alpha_dropout": HANDLERS[F.feature_alpha_dropout],
}.items():
    HANDLERS |= dict.fromkeys(_operators(_name), _handler)
    HANDLERS |= dict.fromkeys(_operators(f"{_name}_"), functools.partial(_handler, inplace=True))
HANDLERS |= dict.fromkeys(_operators("native_dropout"), _native_dropout)
