r"""The predictive covariance between the outputs of a row."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["output_covariance"]


def output_covariance(draws: Tensor, aleatoric: Tensor) -> Tensor:
    r"""The covariance of $\mathbf y^*$ between the outputs of each row, `[row, D, D]` [GG16, prop:var].

    $\mathbb E[\widehat{\mathbf y}^T \widehat{\mathbf y}] - \mathbb E[\widehat{\mathbf y}]^T \mathbb
    E[\widehat{\mathbf y}]$ over draws, with the variance of the noise, $\tau^{-1}$ for a Gaussian, on the diagonal. The
    events of a row are flat.

    Args:
        draws: The network's outputs $\widehat{\mathbf y}_t$, `[draw, row, *event]`.
        aleatoric: The variance of an observation given the function, `[row, *event]`.

    Example:
        >>> output_covariance(torch.tensor([[[1.0, 0.0]], [[3.0, 2.0]]]), torch.full((1, 2), 0.5))
        tensor([[[1.5000, 1.0000],
                 [1.0000, 1.5000]]])
    """
    flat = draws.reshape(*draws.shape[:2], -1)
    centred = flat - flat.mean(0)
    noise = torch.diag_embed(aleatoric.reshape(flat.shape[1:]).to(flat))
    return torch.einsum("trd,tre->rde", centred, centred) / len(draws) + noise
