r"""Actions: explore by Thompson sampling, weigh costs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dropbayes.runtime.validation import Array, class_probabilities, finite_tensor


def thompson_action(function_draw: Callable[[Tensor], Tensor], state: Tensor) -> Tensor:
    r"""Thompson's action $\arg\max_a Q_\omega(s, a)$ for one function $\omega \sim q(\omega)$, a draw of any Q-network.

    Use one draw for a step or an episode, then take another: an action is then
    chosen with the probability that it is the best (`action_probabilities`).

    Args:
        function_draw: A deterministic function of states with values of all actions on the last axis (`function_draw`).
        state: States, `[row, ...]`.

    Returns:
        The actions, `[row]`.

    Examples:
        >>> thompson_action(lambda s: torch.stack([s, 1 - s], -1), torch.tensor([0.2, 0.9]))
        tensor([1, 0])
    """
    return finite_tensor("function_draw", function_draw(state), axes="[row, action]").argmax(-1)


def action_probabilities(value_draws: Array) -> Tensor:
    r"""The probability that each action is the best, $P_\omega(a = \arg\max_{a'} Q_\omega(s, a'))$: Thompson's policy.

    Args:
        value_draws: Action values of every draw, `[draw, row, action]`.

    Returns:
        The probabilities, `[row, action]`.

    Examples:
        >>> action_probabilities(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]], [[3.0, 2.0]], [[5.0, 1.0]]]))
        tensor([[0.7500, 0.2500]])
    """
    values = finite_tensor("value_draws", value_draws, axes="[draw, row, action]")
    best = torch.nn.functional.one_hot(values.argmax(-1), values.shape[-1])
    return best.to(values.dtype).mean(0)


def expected_cost(probabilities: Array, cost: Array) -> Tensor:
    r"""The expected cost of each action, $\sum_c p_c\, \text{cost}_{c a}$.

    Args:
        probabilities: Predictive probabilities, `[row, class]`.
        cost: The cost of each action where each class is true, `[class, action]`. Add a column for "ask a person".

    Returns:
        The expected costs, `[row, action]`.

    Examples:
        >>> expected_cost(torch.tensor([[0.9, 0.1]]), torch.tensor([[0.0, 1.0], [20.0, 0.0]]))
        tensor([[2.0000, 0.9000]])
    """
    predicted = class_probabilities("probabilities", probabilities)
    costs = finite_tensor("cost", cost, axes="[class, action]")
    if predicted.shape[1] != costs.shape[0]:
        raise ValueError(
            f"`cost` must have a row for each of the {predicted.shape[1]} classes; got shape {tuple(costs.shape)}."
        )
    return predicted @ costs.to(predicted)


def least_cost_action(probabilities: Array, cost: Array) -> Tensor:
    r"""The action of least expected cost, $\arg\min_a \sum_c p_c\, \text{cost}_{c a}$, `[row]`.

    Optimal for the given costs when the probabilities are calibrated; recalibrate first (`calibration.temperature`).

    Examples:
        >>> least_cost_action(torch.tensor([[0.9, 0.1]]), torch.tensor([[0.0, 1.0], [20.0, 0.0]]))
        tensor([1])
    """
    return expected_cost(probabilities, cost).argmin(-1)
