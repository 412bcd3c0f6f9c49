r"""Acquisition: the rows to query in active learning and in Bayesian optimisation.

Batches need draws that are functions (`masks="shared"`): only then is the joint distribution of several rows right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dropbayes.runtime import validation
from dropbayes.runtime.devices import on_cpu
from dropbayes.runtime.validation import Array
from dropbayes.scores.information import OUTCOME_LIMIT, Outcomes, mutual_information

if TYPE_CHECKING:
    from botorch.models.ensemble import EnsembleModel


def bald_queries(probability_draws: Array, n_queries: int) -> Tensor:
    r"""The rows whose labels would each teach most, by mutual information $I[y; \omega]$ (BALD), best first.

    Row indices, `[query]`, of the pool. Near-duplicates may all be chosen; `batch_bald_queries` avoids them.

    Examples:
        >>> draws = torch.tensor([[[0.5, 0.5], [1.0, 0.0]], [[0.5, 0.5], [0.0, 1.0]]])
        >>> bald_queries(draws, 1)  # the draws disagree on row 1; row 0 is merely noisy
        tensor([1])
    """
    return mutual_information(_pool(probability_draws, n_queries)).topk(n_queries).indices


def _pool(probability_draws: Array, n_queries: int) -> Tensor:
    draws = validation.class_probabilities("probability_draws", probability_draws, axes="[draw, row, class]")
    validation.check_count("n_queries", n_queries, at_most=draws.shape[1])
    return draws


@on_cpu
def batch_bald_queries(
    probability_draws: Array, n_queries: int, *, max_outcomes: int = OUTCOME_LIMIT, seed: int = 0
) -> Tensor:
    r"""The rows whose labels *together* would teach most, chosen greedily by $I[y_1, \dots, y_B; \omega]$ (BatchBALD).

    The joint information is submodular, so the greedy batch has at least $1 - 1/e$ of the best batch's (while the joint
    labels are enumerated; see `joint_mutual_information` for the other arguments). Row indices, `[query]`, in order.

    Examples:
        >>> sure = torch.eye(2)[[0, 0, 1, 1]]
        >>> other = torch.eye(2)[[0, 1, 0, 1]]
        >>> batch_bald_queries(torch.stack([sure, sure, other], 1), 2)  # row 1 repeats row 0
        tensor([0, 2])
    """
    validation.check_count("max_outcomes", max_outcomes)
    draws = _pool(probability_draws, n_queries).double()
    gain = mutual_information(draws)
    generator = validation.random_generator(seed)
    outcomes, chosen = Outcomes.of_no_rows(draws), list[int]()
    for _ in range(n_queries):
        if chosen:
            outcomes = outcomes.with_row(draws[:, chosen[-1]], max_outcomes=max_outcomes, generator=generator)
            gain[chosen[-1]], best = -math.inf, -math.inf
            for rows in gain.argsort(descending=True).split(32):
                # Gains only fall as a batch grows: rows whose old gain is below the best new one cannot lead.
                if gain[rows[0]] < best:
                    break
                gain[rows] = torch.where(gain[rows] == -math.inf, -math.inf, outcomes.information(draws[:, rows]))
                best = max(best, gain[rows].max().item())
        chosen.append(int(gain.argmax()))
    return torch.tensor(chosen)


def variance_queries(draws: Array, n_queries: int, *, noise_variance: float) -> Tensor:
    r"""The rows whose targets together would teach most under a Gaussian fit to the draws, chosen greedily, `[query]`.

    Each step takes the row of largest epistemic variance *given the rows chosen before*, which greedily maximises
    $\tfrac12 \log\det(\mathbf I + \Sigma/v)$ with $\Sigma$ the covariance between rows of the draws `[draw, row]`.
    The `noise_variance` of an observation is $v = \tau^{-1}$; with $v \to \infty$ this is ranking by variance alone.

    Examples:
        >>> draws = torch.tensor([[3.0, 3.0, 1.0], [-3.0, -3.0, 1.0], [3.0, 3.0, -1.0], [-3.0, -3.0, -1.0]])
        >>> variance_queries(draws, 2, noise_variance=0.1)  # row 1 repeats row 0
        tensor([0, 2])
    """
    values = validation.finite_tensor("draws", draws, axes="[draw, row]").double()
    validation.check_positive("noise_variance", noise_variance)
    validation.check_count("n_queries", n_queries, at_most=values.shape[1])
    centred = (values - values.mean(0)) / math.sqrt(max(len(values) - 1, 1))
    chosen: list[int] = []
    for _ in range(n_queries):
        variance = centred.square().sum(0)
        variance[chosen] = -math.inf
        chosen.append(int(variance.argmax()))
        column = centred[:, chosen[-1]]
        # Condition on an observation of row r: CᵀC becomes Σ - Σ_r Σ_rᵀ / (Σ_rr + v) when C shrinks along its column.
        total = column @ column + noise_variance
        shrink = (1 - torch.sqrt(noise_variance / total)) / (column @ column).clamp_min(1e-300)
        centred = centred - shrink * torch.outer(column, column @ centred)
    return torch.tensor(chosen)


def expected_information_gain(pool_draws: Array, target_draws: Array) -> Tensor:
    r"""The information that the label of each pool row carries about the labels of the target rows (EPIG), `[row]`.

    $$\mathbb E_{x_*}\, I[y; y_*] = \mathbb E_{x_*}\, \mathrm{KL}\Big(\tfrac1T \sum_t p_t(y)\,p_t(y_*) \,\Big\|\,
    \bar p(y)\,\bar p(y_*)\Big)$$

    [Bickford Smith et al. 2023]. Unlike BALD it does not count information about outliers and irrelevant regions. Both
    are class probabilities under the same draws, `[draw, row, class]` and `[draw, target, class]`.

    Examples:
        >>> pool = torch.tensor([[[1.0, 0.0], [1.0, 0.0]], [[0.0, 1.0], [1.0, 0.0]]])
        >>> expected_information_gain(pool, pool[:, :1])  # row 0 is the target itself, row 1 teaches nothing
        tensor([0.6931, 0.0000], dtype=torch.float64)
    """
    pool = validation.class_probabilities("pool_draws", pool_draws, axes="[draw, row, class]").double()
    target = validation.class_probabilities("target_draws", target_draws, axes="[draw, target, class]").to(pool)
    if len(pool) != len(target):
        raise ValueError(f"`target_draws` must have the pool's {len(pool)} draws; got {len(target)}.")
    n_draws, n_rows, n_classes = pool.shape
    # Chunks of joint probabilities [row, target, class, class] of 32 MiB in float64.
    mean, chunk = target.mean(0), max(1, 2**22 // (target[0].numel() * n_classes))
    gains = []
    for rows in torch.arange(n_rows).split(chunk):
        joint = torch.einsum("trc,tsd->rscd", pool[:, rows], target) / n_draws
        apart = pool[:, rows].mean(0)[:, None, :, None] * mean[None, :, None, :]
        gains.append(torch.special.xlogy(joint, joint / apart.clamp_min(1e-300)).sum((-1, -2)).mean(1))
    return torch.cat(gains).clamp_min(0)


def epig_queries(pool_draws: Array, target_draws: Array, n_queries: int) -> Tensor:
    """The rows `[query]` of the largest `expected_information_gain` about the target rows, best first."""
    gain = expected_information_gain(pool_draws, target_draws)
    validation.check_count("n_queries", n_queries, at_most=len(gain))
    return gain.topk(n_queries).indices


@on_cpu
def stochastic_queries(scores: Array, n_queries: int, *, power: float = 1.0, seed: int = 0) -> Tensor:
    r"""Rows `[query]` drawn without replacement in proportion to their score to a power (PowerBALD of informations).

    The rows of largest $\beta \log s_n + \epsilon_n$ with Gumbel noise ε [Kirsch et al. 2023]: a batch as diverse as
    the scores `[row]`, 0 or more, allow. With the `power` $\beta \to \infty$ these are the rows of the largest scores.

    Examples:
        >>> stochastic_queries(torch.tensor([0.0, 1.0, 0.0, 1.0]), 2).sort().values
        tensor([1, 3])
    """
    values = validation.row_values("scores", scores).double()
    validation.check_values("scores", values)
    validation.check_positive("power", power)
    validation.check_count("n_queries", n_queries, at_most=len(values))
    uniform = torch.rand(len(values), generator=validation.random_generator(seed), dtype=torch.float64)
    gumbel = -(-uniform.clamp_min(1e-300).log()).log()
    # Rows of score 0 come last, in random order among themselves.
    keys = torch.where(values > 0, power * values.log(), -1e6 * (1 + power)).cpu() + gumbel
    return keys.topk(n_queries).indices


@on_cpu
def badge_queries(probabilities: Array, features: Array, n_queries: int, *, seed: int = 0) -> Tensor:
    r"""Rows whose gradients are large and differ, by k-means++ on gradient embeddings (BADGE), `[query]`.

    The embedding of a row is the gradient of its loss in the last layer's weights if the predicted class were true,
    $(p - e_{\hat y}) \otimes h$ [Ash et al. 2020]: long where the network is unsure, its direction the row's features.
    The first row has the longest embedding; each further one is drawn in proportion to its squared distance from
    those before. `features` are the inputs of the last layer, `[row, feature]`.

    Examples:
        >>> p = torch.tensor([[0.5, 0.5], [0.5, 0.5], [0.5, 0.5], [1.0, 0.0]])
        >>> h = torch.tensor([[2.0, 0.0], [2.0, 0.0], [0.0, 1.0], [5.0, 5.0]])
        >>> badge_queries(p, h, 2)  # row 1 repeats row 0, row 3 is certain
        tensor([0, 2])
    """
    predicted = validation.class_probabilities("probabilities", probabilities).detach().double()
    hidden = validation.finite_tensor("features", features, axes="[row, feature]").detach().to(predicted)
    if len(hidden) != len(predicted):
        raise ValueError(f"`features` must have a row for each of the {len(predicted)} rows; got {len(hidden)}.")
    validation.check_count("n_queries", n_queries, at_most=len(predicted))
    residual = predicted - torch.nn.functional.one_hot(predicted.argmax(-1), predicted.shape[1])
    squares = residual.square().sum(-1) * hidden.square().sum(-1)
    generator = validation.random_generator(seed)
    chosen = [int(squares.argmax())]
    distance = torch.full_like(squares, torch.inf)
    while len(chosen) < n_queries:
        last = chosen[-1]
        product = (residual @ residual[last]) * (hidden @ hidden[last])
        distance = torch.minimum(distance, (squares + squares[last] - 2 * product).clamp_min(0))
        weight = distance.where(distance >= 1e-12 * squares.max(), 0)  # a repeat differs by rounding alone
        if not bool((weight > 0).any()):  # only repeats are left
            weight = torch.ones_like(weight)
        weight[chosen] = 0
        chosen.append(int(torch.multinomial(weight.cpu(), 1, generator=generator)))
    return torch.tensor(chosen)


def expected_improvement(draws: Array, *, best: float) -> Tensor:
    r"""The mean improvement over the best value so far, $\tfrac1T \sum_t \max(f_t(x) - f_\text{best}, 0)$, `[row]`.

    Computed from the draws of the candidates' values, `[draw, row]`, for any distribution of them; it is 0 where no
    draw improves, so take many draws. To minimise, negate draws and best.

    Examples:
        >>> expected_improvement(torch.tensor([[0.0, 1.0], [2.0, 1.0]]), best=1.0)
        tensor([0.5000, 0.0000])
    """
    return _improvements(draws, best).clamp_min(0).mean(0)


def probability_of_improvement(draws: Array, *, best: float) -> Tensor:
    """The share of draws that improve on the best value so far, `[row]`.

    Examples:
        >>> probability_of_improvement(torch.tensor([[0.0, 1.0], [2.0, 1.0]]), best=0.5)
        tensor([0.5000, 1.0000])
    """
    improvements = _improvements(draws, best)
    return (improvements > 0).to(improvements.dtype).mean(0)


def upper_confidence_bound(draws: Array, *, exploration: float = 2.0) -> Tensor:
    r"""The mean plus `exploration` $\beta$ standard deviations of the draws, $\mu + \beta \sigma$, `[row]`; 0 exploits.

    Examples:
        >>> upper_confidence_bound(torch.tensor([[0.0, 1.0], [2.0, 1.0]]), exploration=1.0)
        tensor([2.4142, 1.0000])
    """
    validation.check_positive("exploration", exploration, allow_zero=True)
    values = validation.finite_tensor("draws", draws, axes="[draw, row]")
    if len(values) < 2:
        raise ValueError(f"`draws` must hold at least 2 draws for a standard deviation; got {len(values)}.")
    return values.mean(0) + exploration * values.std(0)


def _improvements(draws: Array, best: float) -> Tensor:
    values, value = validation.finite_tensor("draws", draws, axes="[draw, row]"), validation.finite_tensor("best", best)
    if value.dim():
        raise ValueError(f"`best` must be one number; got shape {tuple(value.shape)}.")
    return values - float(value)


def botorch_model(
    draws: Callable[[Tensor], Tensor] | Sequence[Callable[[Tensor], Tensor]], *, n_outputs: int = 1
) -> EnsembleModel:
    """A BoTorch model of the draws, for any of its acquisition functions (needs the extra `optimise`).

    `posterior(X)` holds one sample path per draw, so batch acquisitions (`qLogExpectedImprovement`, ...) see the
    correlation of points. Draws of a network that let gradients through, as `optimize_acqf` needs:
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

    validation.check_count("n_outputs", n_outputs)

    class DrawModel(EnsembleModel):
        def __init__(self) -> None:
            super().__init__()
            self._num_outputs = n_outputs

        def forward(self, X: Tensor) -> Tensor:  # BoTorch's name
            rows = X.reshape(-1, X.shape[-1])
            values = draws(rows) if callable(draws) else torch.stack([draw(rows) for draw in draws])
            if rows.requires_grad and torch.is_grad_enabled() and not values.requires_grad:
                rule = "let gradients through to optimise an acquisition; these do not"
                remedy = "Pass function draws: botorch_model([db.function_draw(net, t, n_draws=64) for t in range(64)])"
                raise ValueError(f"`draws` must {rule}. {remedy}.")
            return values.reshape(values.shape[0], *X.shape[:-1], n_outputs).movedim(0, -3)

    return DrawModel()
