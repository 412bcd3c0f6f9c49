r"""Rows worth asking for: acquisition for active learning and for Bayesian optimisation.

Batches need draws that are functions (`masks="shared"`): only then is the joint of several rows right.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dropbayes.information import OUTCOME_LIMIT, Outcomes, mutual_information
from dropbayes.runtime.validation import Array, float_tensor

if TYPE_CHECKING:
    from botorch.models.ensemble import EnsembleModel


def bald_queries(probability_draws: Array, n_queries: int) -> Tensor:
    r"""The rows whose labels would each teach most, by mutual information $I[y; \omega]$ (BALD), best first.

    Args:
        probability_draws: Class probabilities of the pool, `[draw, row, class]`.
        n_queries: How many rows to ask for.

    Returns:
        Row numbers, `[query]`. Near-duplicates may all be asked for; `batch_bald_queries` sees them.

    Examples:
        >>> draws = torch.tensor([[[0.5, 0.5], [1.0, 0.0]], [[0.5, 0.5], [0.0, 1.0]]])
        >>> bald_queries(draws, 1)  # the draws disagree on row 1; row 0 is merely noisy
        tensor([1])
    """
    return mutual_information(probability_draws).topk(_checked_count(n_queries, probability_draws.shape[1])).indices


def batch_bald_queries(
    probability_draws: Array, n_queries: int, *, max_outcomes: int = OUTCOME_LIMIT, seed: int = 0
) -> Tensor:
    r"""The rows whose labels *together* would teach most, chosen greedily by $I[y_1, \dots, y_B; \omega]$ (BatchBALD).

    The joint information is submodular, so the greedy batch has at least $1 - 1/e$ of the best batch's (while the joint
    labels are enumerated; see `joint_mutual_information`). Needs draws with `masks="shared"`.

    Args:
        probability_draws: Class probabilities of the pool, `[draw, row, class]`, the same function along each draw.
        n_queries: How many rows to ask for.
        max_outcomes: The most joint labels to enumerate, and the sample size beyond.
        seed: The seed of the sampled labels.

    Returns:
        Row numbers, `[query]`, in the order chosen.

    Examples:
        >>> sure = torch.eye(2)[[0, 0, 1, 1]]
        >>> other = torch.eye(2)[[0, 1, 0, 1]]
        >>> batch_bald_queries(torch.stack([sure, sure, other], 1), 2)  # row 1 repeats row 0
        tensor([0, 2])
    """
    gain = mutual_information(probability_draws).double()  # which also checks that these are probabilities
    draws = float_tensor(probability_draws).double()
    generator = torch.Generator().manual_seed(seed)
    outcomes, chosen = Outcomes.of_no_rows(draws), list[int]()
    for _ in range(_checked_count(n_queries, draws.shape[1])):
        if chosen:
            outcomes = outcomes.extended(draws[:, chosen[-1]], max_outcomes=max_outcomes, generator=generator)
            gain[chosen[-1]] = -math.inf
            _refresh_leaders(gain, lambda rows, known=outcomes: known.information(draws[:, rows]))
        chosen.append(int(gain.argmax()))
    return torch.tensor(chosen)


def _refresh_leaders(gain: Tensor, value: Callable[[Tensor], Tensor], *, block: int = 32) -> None:
    """Updates `gain` where it matters: gains only fall as a batch grows, so rows whose old gain is below the best
    new one cannot lead.
    """
    best = -math.inf
    for rows in gain.argsort(descending=True).split(block):
        if gain[rows[0]] < best:
            return
        gain[rows] = torch.where(gain[rows] == -math.inf, -math.inf, value(rows))
        best = max(best, gain[rows].max().item())


def variance_queries(draws: Array, n_queries: int, *, noise_variance: float) -> Tensor:
    r"""The rows whose targets together would teach most under a Gaussian fit to the draws, chosen greedily.

    Each step takes the row of largest epistemic variance *given the rows chosen before* (the first: of largest variance
    outright), which greedily maximises $\tfrac12 \log\det(\mathbf I + \Sigma/v)$ with $\Sigma$ the draws' covariance
    between rows. Needs draws with `masks="shared"`.

    Args:
        draws: Outputs of the pool, `[draw, row]`, the same function along each draw.
        n_queries: How many rows to ask for.
        noise_variance: The observation variance $v = \tau^{-1}$; with $v \to \infty$ this is ranking by variance alone.

    Returns:
        Row numbers, `[query]`, in the order chosen.

    Examples:
        >>> draws = torch.tensor([[3.0, 3.0, 1.0], [-3.0, -3.0, 1.0], [3.0, 3.0, -1.0], [-3.0, -3.0, -1.0]])
        >>> variance_queries(draws, 2, noise_variance=0.1)  # row 1 repeats row 0
        tensor([0, 2])
    """
    values = float_tensor(draws).double()
    if values.dim() != 2 or not noise_variance > 0:
        raise ValueError(
            "`draws` must be [draw, row] and `noise_variance` positive; got "
            f"{tuple(values.shape)} and {noise_variance!r}."
        )
    centred = (values - values.mean(0)) / math.sqrt(max(len(values) - 1, 1))
    chosen: list[int] = []
    for _ in range(_checked_count(n_queries, values.shape[1])):
        variance = centred.square().sum(0)
        variance[chosen] = -math.inf
        chosen.append(int(variance.argmax()))
        column = centred[:, chosen[-1]]
        # Condition on a noisy look at row r: CᵀC becomes Σ - Σ_r Σ_rᵀ / (Σ_rr + v) when C shrinks along its column.
        total = column @ column + noise_variance
        shrink = (1 - torch.sqrt(noise_variance / total)) / (column @ column).clamp_min(1e-300)
        centred = centred - shrink * torch.outer(column, column @ centred)
    return torch.tensor(chosen)


def _checked_count(n_queries: int, n_rows: int) -> int:
    if not 1 <= n_queries <= n_rows:
        raise ValueError(f"`n_queries` must lie between 1 and the pool's {n_rows} rows; got {n_queries!r}.")
    return n_queries


def botorch_model(draws: Callable[[Tensor], Tensor], *, n_outputs: int = 1) -> EnsembleModel:
    """A BoTorch model of the draws, for any of its acquisition functions (needs the extra `optimise`).

    `posterior(X)` holds one sample path per draw: the values of all points of a batch come from the same functions, so
    batch acquisitions (`qLogExpectedImprovement`, ...) see their correlation. The draws must be the same functions at
    every call (fixed seed, `masks="shared"`); gradients reach `X` if `draws` lets them through.

    Args:
        draws: A function of rows `[row, d]` that returns `[draw, row]` or `[draw, row, n_outputs]`.
        n_outputs: The number of outputs.

    Examples:
        >>> slopes = torch.tensor([[1.0], [3.0]])
        >>> model = botorch_model(lambda x: slopes * x[:, 0])
        >>> model.posterior(torch.tensor([[[2.0]]])).mean
        tensor([[[4.]]])
    """
    from botorch.models.ensemble import EnsembleModel

    class DrawModel(EnsembleModel):
        def __init__(self) -> None:
            super().__init__()
            self._num_outputs = n_outputs

        def forward(self, X: Tensor) -> Tensor:  # BoTorch's name
            paths = draws(X.reshape(-1, X.shape[-1]))
            return paths.reshape(paths.shape[0], *X.shape[:-1], n_outputs).movedim(0, -3)

    return DrawModel()
