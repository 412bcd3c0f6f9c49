r"""Batches of rows that differ from each other: BADGE."""

from __future__ import annotations

import torch
from torch import Tensor

from dropbayes.runtime.validation import Array, check_count, class_probabilities, finite_tensor, random_generator

__all__ = ["badge_queries"]


def badge_queries(probabilities: Array, features: Array, n_queries: int, *, seed: int = 0) -> Tensor:
    r"""Rows whose gradients are large and differ, by k-means++ on gradient embeddings (BADGE).

    The embedding of a row is the gradient of its loss in the last layer's weights if the predicted class were true,
    $(p - e_{\hat y}) \otimes h$ [Ash et al. 2020]: long where the network is unsure, its direction the row's features.
    The first row has the longest embedding; each further one is drawn in proportion to its squared distance from
    those before. Inner products of embeddings factorise, so the outer products are never formed.

    Args:
        probabilities: Predictive probabilities of the pool, `[row, class]`.
        features: The inputs of the last layer, `[row, feature]`.
        n_queries: The number of rows to query.
        seed: The seed of the draws.

    Returns:
        Row indices, `[query]`, in the order drawn.

    Examples:
        >>> p = torch.tensor([[0.5, 0.5], [0.5, 0.5], [0.5, 0.5], [1.0, 0.0]])
        >>> h = torch.tensor([[2.0, 0.0], [2.0, 0.0], [0.0, 1.0], [5.0, 5.0]])
        >>> badge_queries(p, h, 2)  # row 1 repeats row 0, row 3 is certain
        tensor([0, 2])
    """
    predicted = class_probabilities("probabilities", probabilities).detach().double()
    hidden = finite_tensor("features", features, axes="[row, feature]").detach().to(predicted)
    if len(hidden) != len(predicted):
        raise ValueError(f"`features` must have a row for each of the {len(predicted)} rows; got {len(hidden)}.")
    check_count("n_queries", n_queries, at_most=len(predicted))
    residual = predicted - torch.nn.functional.one_hot(predicted.argmax(-1), predicted.shape[1])
    squares = residual.square().sum(-1) * hidden.square().sum(-1)
    generator = random_generator(seed)
    chosen = [int(squares.argmax())]
    distance = torch.full_like(squares, torch.inf)
    while len(chosen) < n_queries:
        last = chosen[-1]
        product = (residual @ residual[last]) * (hidden @ hidden[last])
        distance = torch.minimum(distance, (squares + squares[last] - 2 * product).clamp_min(0))
        weight = distance.clone()
        weight[weight < 1e-12 * squares.max()] = 0  # a row equal to one chosen differs from it by rounding alone
        weight[chosen] = 0
        if not bool((weight > 0).any()):  # only repeats are left
            weight = torch.ones_like(weight)
            weight[chosen] = 0
        chosen.append(int(torch.multinomial(weight.cpu(), 1, generator=generator)))
    return torch.tensor(chosen)
