r"""Early stopping on the predictive log-likelihood of held-out rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dropbayes.likelihoods import Likelihood
from dropbayes.runtime.validation import check_count
from dropbayes.sampling import draws, is_stochastic
from dropbayes.training.rows import Rows, output_tensor, training_rows

__all__ = ["EarlyStopping", "held_out_score"]


@dataclass(frozen=True, eq=False)
class EarlyStopping:
    """The criterion of early stopping. The network is then restored to its best epoch.

    Args:
        held_out: `(x, y)` of the rows whose predictive log-likelihood is monitored, or a DataLoader of pairs; None for
            no early stopping.
        patience: The number of epochs without improvement after which training stops.
        n_draws: The number of draws per held-out row.

    Example:
        >>> EarlyStopping(patience=20).n_draws
        32
    """

    held_out: Any = None
    patience: int = 10
    n_draws: int = 32

    def __post_init__(self) -> None:
        check_count("patience", self.patience)
        check_count("n_draws", self.n_draws)

    def rows(self, net: nn.Module, device: torch.device) -> Rows | None:
        """The held-out rows on the device; None without early stopping."""
        if self.held_out is None:
            return None
        if not isinstance(self.held_out, (tuple, list)):
            return training_rows(self.held_out, None, net=net, device=device, batch_size=1, name="held_out")
        if len(self.held_out) != 2:
            n_parts = len(self.held_out)
            raise ValueError(f"`held_out` must be a pair (x, y) or a DataLoader of pairs; got {n_parts} parts.")
        return training_rows(*self.held_out, net=net, device=device, batch_size=1, name="held_out")


@torch.no_grad()
def held_out_score(net: nn.Module, rows: Rows, likelihood: Likelihood, n_draws: int, seed: int, epoch: int) -> float:
    r"""The mean of $\log \tfrac1T \sum_t p(\mathbf y \mid \widehat{\mathbf y}_t)$ [GG16, eq:predictive_dist]."""
    net.eval()
    total = 0.0
    for batch in rows.pass_through():
        if is_stochastic(net, batch.arguments):  # the same masks at every check, so that scores are comparable
            sampled = output_tensor(draws(net, batch.arguments, n_draws=n_draws, seed=seed, masks="row"))
        else:
            sampled = batch.output(net)[None]
        densities = likelihood.log_density(sampled, batch.y).double()
        total += float((densities.logsumexp(0) - math.log(len(densities))).sum())
    if math.isnan(total):
        raise FloatingPointError(
            f"the held-out log-likelihood is NaN in epoch {epoch + 1}: no epoch could be called the best. Look for NaN "
            "or extreme values in the inputs of `held_out`."
        )
    return total / rows.n_rows
