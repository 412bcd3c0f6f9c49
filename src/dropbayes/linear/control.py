r"""The linear part as a control variate: its value under each draw's masks is known, and so are its exact moments.

With $\ell_t = \sum_i (z_{ti} - 1) \, \partial f / \partial z_i$, of mean 0 and known variance, and $\beta$ the
regression of $f$ on $\ell$ over the draws, the mean is estimated by $\overline f - \beta \overline \ell$ and the
variance by $s_f^2 + \beta^2 (\mathrm{Var}\,\ell - s_\ell^2)$.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dropbayes.linear.derivatives import Linearisation, one_each, rows_first, rows_second
from dropbayes.linear.passes import Linear, linear_plan
from dropbayes.sampling import KeyedSource, Sampling, as_inputs, eagerly, mask_spec, split
from dropbayes.tracing import Interception

__all__ = ["controlled_moments"]


class _KeptMasks(KeyedSource):
    """Keyed masks that are remembered: each site's deviation from 1, in units of its standard deviation."""

    deviations: list[Tensor]

    def dropout(self, kind: str, x: Tensor, drop_prob: float, shape: tuple[int, ...], inplace: bool) -> Tensor:
        factors = self.keep(kind, drop_prob, shape, x) / (1 - drop_prob)
        self.deviations.append((factors - 1) * ((1 - drop_prob) / drop_prob) ** 0.5)
        return x.mul_(factors) if inplace and not isinstance(x, nn.Parameter) else x * factors

    def attention(self, *args: Any, **kwargs: Any) -> None:
        """No fused kernel: its masks could not be remembered."""


def controlled_moments(
    net: nn.Module, x: Any, *, n_draws: int = 30, seed: int = 0, sampling: Sampling = Sampling()
) -> tuple[Tensor, Tensor]:
    """The mean and the variance over draws, `[row, output]`, each corrected by the linear part.

    The masks are those of `predict` with the same seed and number of draws; `net` returns one tensor, takes its rows as
    a batch and multiplies by its masks.
    """
    inputs, keys = as_inputs(x, row_axis=sampling.row_axis), sampling.keys(n_draws, seed)
    plan = linear_plan(net, inputs, Linear(), sampling)
    kinds = {site.kind for site in plan.profile.sites} - {"dropout", "feature_dropout", "attention", "recurrent"}
    if not plan.together or kinds:
        raise ValueError(
            "`net` must take its rows as a batch and multiply by its masks, so that the linear part is known under "
            f"each draw; got {sorted(kinds) or 'rows that run alone'}. Use dropbayes.predict."
        )
    spec = mask_spec(plan.inspection, inputs, keys=keys, masks="shared", sampling=sampling)
    moments = []
    for rows, linear in plan.linearised(inputs):
        slopes = linear.gradients(linear.flat(0), one_each(linear.flat(0), range(plan.only_size())))
        drawn, parts = linear.flat(0).new_empty(2, n_draws, len(rows), plan.only_size(), dtype=torch.float64)
        for draw in range(n_draws):
            source, module = _KeptMasks(spec, range(draw, draw + 1), rows, folded=True), plan.inspection.network()
            source.deviations = []
            source.follow(module)
            with torch.no_grad(), Interception(source):
                output = split(eagerly(inputs.call)(module, inputs.padded_rows(rows.start, rows.stop, 0)))[0][0]
            drawn[draw] = rows_first(output, plan.profile.outputs[0], len(rows)).reshape(len(rows), -1)
            parts[draw] = _linear_part(linear, slopes, source.deviations)
        moments.append(_corrected(drawn, parts, torch.stack([slope.square().sum(2).T for slope in slopes]).sum(0)))
    mean, variance = (torch.cat(blocks) for blocks in zip(*moments, strict=True))
    return mean, variance


def _linear_part(linear: Linearisation, slopes: list[Tensor], deviations: list[Tensor]) -> Tensor:
    """The linear part of the output under masks with these deviations, `[row, output]`."""
    total = torch.zeros_like(linear.flat(0))
    for variable, slope, deviation in zip(linear.variables, slopes, deviations, strict=True):
        units = rows_second(deviation.expand(variable.value.shape)[None], variable, linear.n_rows)[0].flatten(1)
        total = total + torch.einsum("kru,ru->rk", slope, units)
    return total


def _corrected(drawn: Tensor, linear: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """The mean and variance of draws `[draw, ...]` whose linear parts have mean 0 and a known variance."""
    moved, controlled = drawn - drawn.mean(0), linear - linear.mean(0)
    sampled = controlled.square().mean(0)
    slope = (moved * controlled).mean(0) / sampled.clamp(min=1e-300)
    corrected = moved.square().mean(0) + slope.square() * (variance - sampled)
    return drawn.mean(0) - slope * linear.mean(0), corrected.clamp(min=0)
