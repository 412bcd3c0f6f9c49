"""Validation of arguments: one clear error that names the argument, the rule and the value."""

from __future__ import annotations

import math
from typing import Any

__all__ = ["check_keep_prob", "check_n_data", "check_number", "check_positive"]


def _scalar(name: str, value: Any) -> float:
    """The value of a number or of a scalar tensor (a parameter that is being learned)."""
    if not hasattr(value, "detach"):
        return value
    if value.numel() != 1:
        raise ValueError(f"`{name}` must be a number or a scalar tensor; got a tensor of shape {tuple(value.shape)}.")
    return float(value.detach())


def check_positive(name: str, value: Any, *, allow_zero: bool = False) -> None:
    """Accepts a positive number, or a scalar tensor of one."""
    number = _scalar(name, value)
    if not (math.isfinite(number) and (number > 0 or (allow_zero and number == 0))):
        rule = "a finite number, zero or more" if allow_zero else "a positive finite number"
        raise ValueError(f"`{name}` must be {rule}; got {value!r}.")


def check_number(name: str, value: Any) -> None:
    """Refuses a tensor where a value is used once and could get no gradient."""
    if hasattr(value, "detach"):
        raise TypeError(f"`{name}` must be a number, not a tensor: nothing here can be learned. Pass {name}.item().")


def check_keep_prob(value: float) -> None:
    if not 0 < value <= 1:
        raise ValueError(
            f"`keep_prob` must lie in (0, 1]; got {value!r}. It is the paper's p, the probability that a unit stays: "
            "one minus the `p` of torch.nn.Dropout."
        )


def check_n_data(value: float) -> None:
    if not (math.isfinite(value) and value >= 1):
        raise ValueError(f"`n_data` must be at least 1, the number of training rows; got {value!r}.")
