"""Predictions without draws: the blocks of a linearised network in the form that `predict` reads, and how far off."""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dropbayes.linear.derivatives import Linearisation, linearise
from dropbayes.linear.variables import MASK_KINDS
from dropbayes.runtime.validation import check_choice, check_count
from dropbayes.sampling import (
    Block,
    Inputs,
    Inspection,
    Keys,
    Profile,
    Sampling,
    UncertaintyWarning,
    as_inputs,
    chosen_strategy,
    inspect,
    make_plan,
    mask_spec,
)
from dropbayes.tracing.views import checked_network


@dataclass(frozen=True)
class Linear:
    """The linear method, and its way with networks of many outputs.

    Args:
        max_outputs: The largest number of outputs of a row that are each differentiated.
        above: What is done with more outputs: "probes" for the variance over random values of the masks in the
            linearised network, or "largest" for the `max_outputs` largest outputs of each row, the others held fixed.
        n_probes: The number of probes, even: the standard deviation has a relative error of about 1 / sqrt(n_probes).
    """

    max_outputs: int = 128
    above: Literal["probes", "largest"] = "probes"
    n_probes: int = 256

    def __post_init__(self) -> None:
        check_choice("above", self.above, ("probes", "largest"))
        check_count("max_outputs", self.max_outputs)
        if self.n_probes < 2 or self.n_probes % 2:
            raise ValueError(f"`n_probes` must be even and at least 2; got {self.n_probes!r}.")


@dataclass(frozen=True)
class LinearPlan:
    """The plan for linearising one network on inputs of one form."""

    inspection: Inspection
    profile: Profile
    sampling: Sampling
    together: bool  # rows run as a batch
    sizes: tuple[int, ...]  # the numbers in each tensor of a row's output
    max_bytes: int
    options: Linear = Linear()
    judged: int | None = None  # the tensor that a likelihood reads; None for all
    only_moments: bool = True

    exact = True  # no draw is made

    @property
    def method(self) -> str:
        """The method in words."""
        size = max(size for index, size in enumerate(self.sizes) if self.judged in (None, index))
        if size <= self.options.max_outputs:
            return "linear"
        if self.options.above == "probes":
            return f"linear, {self.options.n_probes} probes"
        return f"linear, the largest {self.options.max_outputs} of {size} outputs"

    def only_size(self) -> int:
        """The number of outputs of a row; an error if they are several tensors, or too many."""
        if len(self.sizes) > 1 or self.sizes[0] > self.options.max_outputs:
            rule = f"return one tensor of at most {self.options.max_outputs} numbers for each row"
            remedy = "Pass a network that returns the part of interest"
            raise ValueError(f"`net` must {rule}; got {list(self.sizes)}. {remedy}.")
        return self.sizes[0]

    def linearised(
        self, inputs: Inputs, chosen: Tensor | None = None, *, twice: bool = False
    ) -> Iterator[tuple[range, list[Linearisation]]]:
        """The linearisations of the rows, block by block; of the chosen numbers of the first output `[row, choice]`."""
        n_outputs = min(max(self.sizes), self.options.max_outputs)
        size = max(1, self.max_bytes // max(1, self.profile.pass_bytes * n_outputs)) if self.together else 1
        for start in range(0, inputs.n_rows, size):  # as many rows together as memory holds
            rows = range(start, min(start + size, inputs.n_rows))
            block = inputs if len(rows) == inputs.n_rows else inputs.block(rows.start, rows.stop)
            at_once = max(1, self.max_bytes // max(1, self.profile.pass_bytes * len(rows)))
            found = linearise(self.inspection, block, self.sampling, at_once, twice)
            yield rows, found if chosen is None else [found[0].chosen(chosen[rows.start : rows.stop])]

    def run(self, inputs: Inputs, *, first_row: int = 0) -> Iterator[Block]:
        """The rows block by block: one draw, the mean, with its variance; or points of it as the draws."""
        for rows, found in self.linearised(inputs):
            outputs, variances = list[Tensor](), list[Tensor]()
            for index, linear in enumerate(found):
                mean, is_complex = linear.output.detach(), linear.tensor.is_complex()
                spread = self._spread(linear) if self.judged in (None, index) else torch.zeros_like(mean)
                shape = (-1, *(torch.view_as_real(linear.tensor) if is_complex else linear.tensor).shape)
                points = (mean if self.only_moments else mean + spread).to(mean.dtype).view(shape)
                outputs.append(torch.view_as_complex(points.contiguous()) if is_complex else points)
                variances.append(spread.view(shape)[0])
            yield Block(rows, range(1), outputs, variances if self.only_moments else None)

    def _spread(self, linear: Linearisation) -> Tensor:
        """The variance of an output, `[row, output]`; or points of it less its mean, `[point, row, output]`."""
        size, options = linear.output.shape[1], self.options
        if size <= options.max_outputs:
            return linear.variance() if self.only_moments else linear.points()
        if options.above == "probes":
            moved = linear.deviations(options.n_probes)
            return moved.double().square().mean(0) if self.only_moments else moved
        chosen = linear.output.topk(options.max_outputs).indices
        spread = self._spread(linear.chosen(chosen))
        return spread.new_zeros(*spread.shape[:-1], size).scatter(-1, chosen.expand_as(spread), spread)


def linear_plan(net: nn.Module, inputs: Inputs, sampling: Sampling) -> LinearPlan:
    """The plan for a network that was checked to be random and to have derivatives.

    Nothing is known of a function that a network takes of its own random numbers (a relaxed gate is flat at their
    means): a few draws are compared, once, and what is far off is warned of.
    """
    plan = _unchecked_plan(net, inputs, sampling)
    own, known = {site.kind for site in plan.profile.sites if site.is_random} - MASK_KINDS, plan.inspection.findings
    if own and "check" not in known:
        few = inputs if inputs.is_one_row else inputs.block(0, min(inputs.n_rows, 4))
        known["check"] = _compared(plan, net, few, n_draws=40, seed=0)
    if own and (abs(known["check"].ratio - 1) > 1 / 3 or known["check"].mean_error > 1):  # more than chance
        what = f"`net` draws its own random numbers ({', '.join(sorted(own))}), and its output is not linear in them."
        warnings.warn(f"{what} {known['check']}.", UncertaintyWarning, stacklevel=2)
    return plan


def _unchecked_plan(net: nn.Module, inputs: Inputs, sampling: Sampling) -> LinearPlan:
    inspection = inspect(checked_network(net), inputs, sampling.ignored, positions=sampling.positions is not None)
    profile = inspection.profile
    profile.check_random()
    if profile.host_random or profile.draws_branch:
        does = "draws from a generator" if profile.host_random else "branches on a value of a draw"
        what = f'"linear" needs a network that is differentiable in its masks; `net` {does}, which has no derivative'
        raise ValueError(f'`method` {what}. Use method="sampling".')
    spec = mask_spec(profile, inputs, keys=Keys(0, 2, "independent"), masks="row", sampling=sampling)
    together = chosen_strategy(inspection, inputs, spec).rows == "together" and None not in profile.outputs
    together &= not profile.moves_rows  # which lays masks by entry
    known = inspection.findings
    if "outputs" not in known:
        one = inputs if inputs.is_one_row else inputs.block(0, 1)
        known["outputs"] = _checked_sizes(linearise(inspection, one, sampling, at_once=1))
    max_bytes = sampling.max_bytes or (256 * 2**20 if inputs.device.type == "cpu" else 4 * 2**30)
    return LinearPlan(inspection, profile, sampling, together or inputs.n_rows == 1, known["outputs"], max_bytes)


def _checked_sizes(outputs: list[Linearisation]) -> tuple[int, ...]:
    """The numbers in each tensor of a row's output."""
    for dtype in (linear.tensor.dtype for linear in outputs):
        if not (dtype.is_floating_point or dtype.is_complex):
            what = f'"linear" needs outputs that are real numbers; `net` returns {dtype}, which has no derivative'
            raise ValueError(f'`method` {what}. Return scores or logits in its place, or use method="sampling".')
    if not any(linear.output.requires_grad for linear in outputs):
        remedy = 'Remove torch.no_grad, .detach() and .item() from its forward, or use method="sampling"'
        raise ValueError(f'`method` "linear" needs an output that has derivatives; that of `net` has none. {remedy}.')
    return tuple(linear.output.shape[1] for linear in outputs)


@dataclass(frozen=True)
class LinearCheck:
    """The linear method against draws, over all outputs of all rows; prints as a sentence."""

    ratio: float  #: The standard deviation by the linear method, relative to that of the draws: the median.
    low: float
    high: float  #: The 10th and the 90th percentile of that ratio; a few draws alone spread it by 1 / sqrt(2 n_draws).
    rank_correlation: float  #: Of the two standard deviations; NaN for a single output.
    mean_error: float  #: The distance between the means in standard deviations of the draws: the median.
    n_draws: int

    @property
    def agrees(self) -> bool:
        """Whether the deviations agree to 15 % in the median, and the means to half a deviation."""
        return abs(self.ratio - 1) <= 0.15 and self.mean_error <= 0.5

    def __str__(self) -> str:
        advice = 'method="linear" will do' if self.agrees else 'use method="sampling"'
        return (
            f"linear method: {self.ratio:.2f} times the standard deviation of {self.n_draws} draws "
            f"[{self.low:.2f}, {self.high:.2f}], rank correlation {self.rank_correlation:.2f},\n"
            f"means {self.mean_error:.2f} deviations apart: {advice}"
        )


def check_linear(
    net: nn.Module, x: Any, *, n_draws: int = 30, seed: int = 0, sampling: Sampling = Sampling()
) -> LinearCheck:
    """By how much the linear method is off, judged by a few draws of the same rows."""
    inputs = as_inputs(x, net, row_axis=sampling.row_axis)
    return _compared(_unchecked_plan(net, inputs, sampling), net, inputs, n_draws, seed)


def _compared(plan: LinearPlan, net: nn.Module, inputs: Inputs, n_draws: int, seed: int) -> LinearCheck:
    keys, pairs = Keys(seed, n_draws, plan.sampling.sampler), []
    sampled, _ = make_plan(net, inputs, keys=keys, masks="row", sampling=plan.sampling).collected(inputs)
    for rows, outputs in plan.linearised(inputs):
        for linear, all_rows in zip(outputs, sampled, strict=True):
            some = all_rows[:, rows.start : rows.stop]
            drawn = (torch.view_as_real(some) if some.is_complex() else some).double().flatten(1)
            mean, std = linear.output.detach().flatten(), plan._spread(linear).sqrt().flatten()
            pairs.append(torch.stack([std, drawn.std(0), (mean - drawn.mean(0)).abs()]))
    found = torch.cat(pairs, 1)
    std, moved, error = found[:, found[1] >= 1e-9 * found[1].max()]
    low, middle, high = (std / moved).quantile(std.new_tensor([0.1, 0.5, 0.9])).tolist()
    ranks = torch.stack([values.argsort().argsort().double() for values in (std, moved)])
    correlation = float(ranks.corrcoef()[0, 1]) if len(std) > 1 else float("nan")
    return LinearCheck(middle, low, high, correlation, float((error / moved).median()), n_draws)


def covariance(net: nn.Module, x: Any, *, between_rows: bool = False, sampling: Sampling = Sampling()) -> Tensor:
    """The covariance between the outputs of each row by the linear method, `[row, output, output]`.

    With `between_rows`, `[row, output, row, output]`: masks are shared by all rows. The network returns one tensor; the
    other arguments are those of `predict`.

    Example:
        >>> net = nn.Sequential(nn.Dropout(0.5), nn.Linear(1, 2))
        >>> slope = net[1].weight
        >>> torch.allclose(covariance(net, torch.ones(1, 1))[0], (slope @ slope.T).double())  # variance p / (1 - p) = 1
        True
    """
    inputs = as_inputs(x, net, row_axis=sampling.row_axis)
    plan = linear_plan(net, inputs, sampling)
    plan.only_size()
    blocks = [torch.cat([slope for _, slope in linear.slopes()], 2) for _, (linear,) in plan.linearised(inputs)]
    slopes = torch.cat(blocks, 1).double()  # [output, row, unit of any site]
    return torch.einsum("kru,lsu->rksl" if between_rows else "kru,lru->rkl", slopes, slopes)
