r"""Bayesian optimisation over draws: improvement, confidence bounds, and a BoTorch model with gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dropbayes.runtime.validation import Array, check_count, check_positive, finite_tensor

if TYPE_CHECKING:
    from botorch.models.ensemble import EnsembleModel


def expected_improvement(draws: Array, *, best: float) -> Tensor:
    r"""The mean improvement over the best value so far, $\tfrac1T \sum_t \max(f_t(x) - f_\text{best}, 0)$.

    Computed from the draws, for any distribution of them; it is 0 where no draw improves, so take many draws. To
    minimise, negate draws and best.

    Args:
        draws: Function values of the candidates, `[draw, row]`.
        best: The best value found so far.

    Returns:
        The expected improvement, `[row]`.

    Examples:
        >>> expected_improvement(torch.tensor([[0.0, 1.0], [2.0, 1.0]]), best=1.0)
        tensor([0.5000, 0.0000])
    """
    return (_values(draws) - _best(best)).clamp_min(0).mean(0)


def probability_of_improvement(draws: Array, *, best: float) -> Tensor:
    """The share of draws that improve on the best value so far, `[row]`.

    Examples:
        >>> probability_of_improvement(torch.tensor([[0.0, 1.0], [2.0, 1.0]]), best=0.5)
        tensor([0.5000, 1.0000])
    """
    values = _values(draws)
    return (values > _best(best)).to(values.dtype).mean(0)


def upper_confidence_bound(draws: Array, *, exploration: float = 2.0) -> Tensor:
    r"""The mean plus β standard deviations of the draws, $\mu + \beta \sigma$, `[row]`.

    Args:
        draws: Function values of the candidates, at least 2 draws, `[draw, row]`.
        exploration: The factor β; 0 exploits only.

    Examples:
        >>> upper_confidence_bound(torch.tensor([[0.0, 1.0], [2.0, 1.0]]), exploration=1.0)
        tensor([2.4142, 1.0000])
    """
    check_positive("exploration", exploration, allow_zero=True)
    values = _values(draws)
    if len(values) < 2:
        raise ValueError(f"`draws` must hold at least 2 draws for a standard deviation; got {len(values)}.")
    return values.mean(0) + exploration * values.std(0)


def _values(draws: Array) -> Tensor:
    return finite_tensor("draws", draws, axes="[draw, row]")


def _best(best: float) -> float:
    value = finite_tensor("best", best)
    if value.dim():
        raise ValueError(f"`best` must be one number; got shape {tuple(value.shape)}.")
    return float(value)


def botorch_model(
    draws: Callable[[Tensor], Tensor] | Sequence[Callable[[Tensor], Tensor]], *, n_outputs: int = 1
) -> EnsembleModel:
    """A BoTorch model of the draws, for any of its acquisition functions (needs the extra `optimise`).

    `posterior(X)` holds one sample path per draw: the values of all points of a batch come from the same functions, so
    batch acquisitions (`qLogExpectedImprovement`, ...) see their correlation. Draws of a network that let gradients
    through, as `optimize_acqf` needs:
    `botorch_model([db.function_draw(net, t, n_draws=64) for t in range(64)])`.

    Args:
        draws: The functions, one per draw, each from rows `[row, d]` to values `[row]` or `[row, n_outputs]`; or one
            function to `[draw, row]` or `[draw, row, n_outputs]` that takes the same draws at every call.
        n_outputs: The number of outputs.

    Examples:
        >>> model = botorch_model([lambda x: x[:, 0], lambda x: 3 * x[:, 0]])
        >>> model.posterior(torch.tensor([[[2.0]]])).mean
        tensor([[[4.]]])
    """
    from botorch.models.ensemble import EnsembleModel

    check_count("n_outputs", n_outputs)

    def paths(rows: Tensor) -> Tensor:
        values = draws(rows) if callable(draws) else torch.stack([draw(rows) for draw in draws])
        if rows.requires_grad and torch.is_grad_enabled() and not values.requires_grad:
            raise ValueError(
                "`draws` must let gradients through to optimise an acquisition; these do not. Pass function draws: "
                "botorch_model([db.function_draw(net, t, n_draws=64) for t in range(64)])."
            )
        return values

    class DrawModel(EnsembleModel):
        def __init__(self) -> None:
            super().__init__()
            self._num_outputs = n_outputs

        def forward(self, X: Tensor) -> Tensor:  # BoTorch's name
            values = paths(X.reshape(-1, X.shape[-1]))
            return values.reshape(values.shape[0], *X.shape[:-1], n_outputs).movedim(0, -3)

    return DrawModel()
