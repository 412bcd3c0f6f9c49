"""Validation of arguments: one clear error that names the argument, the rule and the value."""

from __future__ import annotations

import math

__all__ = ["check_keep_prob", "check_n_data", "check_positive"]


def check_positive(name: str, value: float, *, allow_zero: bool = False) -> None:
    if not (math.isfinite(value) and (value > 0 or (allow_zero and value == 0))):
        rule = "a finite number, zero or more" if allow_zero else "a positive finite number"
        raise ValueError(f"`{name}` must be {rule}; got {value!r}.")


def check_keep_prob(value: float) -> None:
    if not 0 < value <= 1:
        raise ValueError(
            f"`keep_prob` must lie in (0, 1]; got {value!r}. It is the paper's p, the probability that a unit stays: "
            "one minus the `p` of torch.nn.Dropout."
        )


def check_n_data(value: float) -> None:
    if not (math.isfinite(value) and value >= 1):
        raise ValueError(f"`n_data` must be at least 1, the number of training rows; got {value!r}.")
