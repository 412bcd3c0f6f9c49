r"""The linear part as a control variate: its value under each draw's masks is known, and so are its exact moments.

With $\ell_t = \sum_i (z_{ti} - 1) \, \partial f / \partial z_i$, of mean 0 and known variance, and $\beta$ the
regression of $f$ on $\ell$ over the draws, the mean is estimated by $\overline f - \beta \overline \ell$ and the
variance by $s_f^2 + \beta^2 (\mathrm{Var}\,\ell - s_\ell^2)$. Masks are keyed: those of the draws are made once more,
however the draws were run.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dropbayes.linear.passes import LinearPlan, linear_plan
from dropbayes.linear.variables import MASK_KINDS, linear_part
from dropbayes.sampling import Block, Inputs, Keys, Plan, Profile, Sampling, make_plan


@dataclass(frozen=True)
class ControlledPlan:
    """The plan for draws of one network whose moments are corrected by its linear part."""

    drawn: Plan
    linear: LinearPlan
    profile: Profile
    method: str

    exact = False  # draws are made

    def run(self, inputs: Inputs, *, first_row: int = 0) -> Iterator[Block]:
        """The rows block by block: one draw, the mean, with its variance."""
        for rows, (linear,) in self.linear.linearised(inputs):
            keyed = range(first_row + rows.start, first_row + rows.stop)
            (outputs,), integrated = self.drawn.collected(inputs.block(rows.start, rows.stop), first_row=keyed.start)
            drawn, spec = outputs.reshape(*outputs.shape[:2], -1).double(), self.drawn.spec
            parts, variance = torch.zeros_like(drawn), torch.zeros_like(drawn[0])
            for site, slope in linear.slopes():
                if not (spec.integrate and site.index == len(self.profile.sites) - 1):
                    parts += linear_part(site, slope, spec.keys, self.drawn.draws, keyed if spec.per_row else None)
                    variance += slope.square().sum(2, dtype=torch.float64).T
            mean, variance = _corrected(drawn, parts, variance)
            shape = outputs.shape[1:]
            yield Block(rows, range(1), [mean.view(1, *shape).to(outputs)], [sum(integrated, variance.view(shape))])


def controlled_plan(
    net: nn.Module, inputs: Inputs, *, keys: Keys, masks: str, sampling: Sampling
) -> Plan | ControlledPlan:
    """The plan for a network that returns one tensor and multiplies by its masks; plain draws if none is needed."""
    drawn = make_plan(net, inputs, keys=keys, masks=masks, sampling=sampling, moments_only=True)
    if drawn.exact:
        return drawn
    linear = linear_plan(net, inputs, sampling)
    linear.only_size()
    other = {site.kind for site in linear.profile.sites if site.is_random} - MASK_KINDS
    if not linear.together or other or sampling.positions is not None:
        got = "rows that run alone" if not linear.together else sorted(other) or "masks of positions"
        rule = '"controlled" needs a network that takes its rows as a batch and multiplies by its masks'
        why = "so that its linear part is known under each draw"
        raise ValueError(f'`method` {rule}, {why}; got {got}. Use method="sampling".')
    return ControlledPlan(drawn, linear, drawn.profile, f"controlled, {drawn.method}")


def _corrected(drawn: Tensor, linear: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """The mean and variance of draws `[draw, ...]` whose linear parts have mean 0 and a known variance."""
    moved, controlled = drawn - drawn.mean(0), linear - linear.mean(0)
    sampled = controlled.square().mean(0)
    slope = (moved * controlled).mean(0) / sampled.clamp(min=1e-300)
    corrected = moved.square().mean(0) + slope.square() * (variance - sampled)
    return drawn.mean(0) - slope * linear.mean(0), corrected.clamp(min=0)
