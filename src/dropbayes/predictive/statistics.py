"""The statistics of each row's draws, collected in the network's output structure."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._pytree import PyTree

from dropbayes.likelihoods import ClassLikelihood, Gaussian, Likelihood
from dropbayes.linear.control import ControlledPlan
from dropbayes.linear.passes import LinearPlan
from dropbayes.linear.perceptrons import MomentsPlan
from dropbayes.runtime.validation import check_probability, check_type
from dropbayes.sampling import Block, Inputs, Mean, Moments, Plan, Profile, move_row_axis, result_dtype

CLASS_STATISTICS = ("entropy", "expected_entropy", "variation_ratio")
"""The statistics of class probabilities; in a prediction they have the rows first, whatever its layout."""
DRAWS_FIRST = ("draws", "quantiles")  #: The statistics with an axis before that of the rows.

Observations = Likelihood | Mapping[str, Likelihood | None] | Sequence[Likelihood | None]
"""A likelihood, or one for each tensor of the network's output, in its structure."""
AnyPlan = Plan | ControlledPlan | LinearPlan | MomentsPlan
"""The plan of a prediction: how the outputs of its rows are made, by draws or without."""
Rows = list[dict[str, Tensor]]
"""The statistics of some rows by name, for each tensor of the output that is summarised."""


def by_head(argument: str, tree: PyTree, profile: Profile) -> dict[str | int, PyTree]:
    """The entries of a dict or sequence for each tensor of the network's output, by its name or place there."""
    built = profile.structure.build(range(len(profile.outputs)), numbers=False)
    outputs = {name: index for name, index in _entries(built).items() if index is not None}
    if not all(isinstance(index, int) for index in outputs.values()):
        raise ValueError(f"`{argument}` for each output needs one tensor in each; the network nests them.")
    given = _entries(tree)
    if given.keys() != outputs.keys():
        rule = f"have an entry for each output of the network, {list(outputs) or 'one tensor'}"
        got = list(given) or type(tree).__name__
        raise ValueError(f"`{argument}` must {rule}; got {got}. Give None for an output without one.")
    return {name: given[name] for name in outputs}


def _entries(tree: PyTree) -> dict[str | int, PyTree]:
    if isinstance(tree, Mapping):
        return dict(tree)
    return dict(enumerate(tree)) if isinstance(tree, (list, tuple)) else dict(getattr(tree, "__dict__", {}))


@dataclass(frozen=True)
class Request:
    """The statistics of the draws to compute."""

    likelihood: Observations | None = None
    quantiles: tuple[float, ...] = ()
    keep_draws: bool = False

    def __post_init__(self) -> None:
        for likelihood in self._likelihoods():
            rule = "be one of dropbayes' likelihoods, such as Gaussian(precision=1.0), or one for each output"
            check_type("likelihood", likelihood, (Likelihood, type(None)), rule)
        for level in self.quantiles:
            check_probability("quantiles", level)

    @property
    def is_by_head(self) -> bool:
        """Whether each tensor of the output has a likelihood of its own."""
        return isinstance(self.likelihood, (Mapping, list, tuple))

    def _likelihoods(self) -> list[object]:
        return list(_entries(self.likelihood).values()) if self.is_by_head else [self.likelihood]

    @property
    def only_moments(self) -> bool:
        """Whether only moments are requested, so that the last layer may be integrated out."""
        moments = all(one is None or isinstance(one, Gaussian) for one in self._likelihoods())
        return moments and not self.quantiles and not self.keep_draws

    def judged(self, profile: Profile) -> dict[int, PyTree]:
        """The tensors of the output that are summarised, by place: the likelihood of each, or None."""
        if self.is_by_head:
            return dict(enumerate(by_head("likelihood", self.likelihood, profile).values()))
        place = self.likelihood_tensor(profile)
        return dict.fromkeys(range(len(profile.outputs))) if place is None else {place: self.likelihood}

    def summaries(self, profile: Profile) -> dict[int, RowStatistics]:
        """The statistics of each of these tensors, to be filled."""
        return {place: RowStatistics(self, likelihood) for place, likelihood in self.judged(profile).items()}

    def likelihood_tensor(self, profile: Profile) -> int | None:
        """The tensor of the output that one likelihood reads: the only one, or `logits`; None if all are summarised."""
        if self.likelihood is None or self.is_by_head:
            return None
        n_tensors = len(profile.outputs)
        if n_tensors == 1:
            return 0
        tree = profile.structure.build(range(n_tensors), numbers=False)
        logits = tree.get("logits") if isinstance(tree, Mapping) else getattr(tree, "logits", None)
        if logits is None:
            what = f"needs an output of one tensor, or one called `logits`; the network gives {n_tensors}"
            remedy = "Give a likelihood for each, as a dict or sequence like the output, or leave it out"
            raise ValueError(f"`likelihood` {what}. {remedy}.")
        return logits


class RowStatistics:
    """The statistics of some rows' draws, for one tensor of the output."""

    def __init__(self, request: Request, likelihood: Likelihood | None = None) -> None:
        self.request = request
        self.likelihood = likelihood  # once an output was seen, for outputs of its axes
        self.moments = Moments()
        self.means = defaultdict[str, Mean](Mean)  # over draws, of all else that is averaged
        self.kept = defaultdict[str, list[Tensor]](list)  # every draw, of what is not
        self.integrated: Tensor | None = None  # the sum over draws of the variance over an integrated last layer
        self.dtype = torch.float32
        self.is_complex = self.is_begun = False

    def add(self, output: Tensor, variance: Tensor | None) -> None:
        """Adds outputs `[draw, row, ...]`, with their mean variance `[row, ...]` over an integrated last layer."""
        self.dtype = result_dtype(output)
        if output.is_complex():
            output = torch.view_as_real(output)
            self.is_complex = True
        if self.likelihood is not None and not self.is_begun:
            self.likelihood = self.likelihood.for_output(output.dim() - 1)
            self.likelihood.check(output)
        likelihood, self.is_begun = self.likelihood, True
        conditional = output if likelihood is None else likelihood.mean(output)
        if self.request.keep_draws:
            self.kept["draws"].append(output)
        if self.request.quantiles:
            self.kept["quantiles"].append(conditional)
        self.moments.add(conditional)
        if variance is not None:
            added = variance.double() * len(output)
            self.integrated = added if self.integrated is None else self.integrated + added
        elif likelihood is not None and not isinstance(likelihood, Gaussian):
            self.means["aleatoric"].add(likelihood.variance(output))
        if isinstance(likelihood, ClassLikelihood):
            probabilities = likelihood.class_probabilities(conditional)
            chosen = torch.nn.functional.one_hot(probabilities.argmax(-1), probabilities.shape[-1])
            self.means["expected_entropy"].add(torch.special.entr(probabilities).sum(-1))
            self.means["votes"].add(chosen.bool())

    def results(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """The statistics by name, `[row, ...]`."""
        moments = self.moments.finish()
        mean, epistemic, noise = moments.mean, moments.variance, torch.zeros_like(moments.mean)
        if self.integrated is not None:  # the law of total variance over the last layer's masks
            epistemic = epistemic + self.integrated / moments.count
        if isinstance(self.likelihood, Gaussian):
            noise = self.likelihood.variance(mean.double()).detach().to(mean)
        statistics = {"mean": mean, "epistemic": epistemic, "aleatoric": noise}
        statistics |= {name: one.finish().value for name, one in self.means.items()}
        if isinstance(self.likelihood, ClassLikelihood):
            statistics["entropy"] = torch.special.entr(self.likelihood.class_probabilities(mean)).sum(-1)
            statistics["variation_ratio"] = 1 - statistics.pop("votes").amax(-1)  # the draws against the majority
        dtype = dtype or self.dtype
        statistics = {name: value.to(dtype) for name, value in statistics.items()}
        if "quantiles" in self.kept:
            every = torch.cat(self.kept["quantiles"]).double()
            levels = torch.tensor(self.request.quantiles, dtype=torch.float64, device=every.device)
            statistics["quantiles"] = every.quantile(levels, dim=0).movedim(0, 1).to(dtype)
        if "draws" in self.kept:
            statistics["draws"] = torch.cat(self.kept["draws"]).movedim(0, 1)
        if not self.is_complex:
            return statistics
        # Means and draws as complex numbers; variances E|z - E z|², real and imaginary parts together.
        sums = {name: statistics[name].sum(-1) for name in ("epistemic", "aleatoric")}
        return {n: v if n in sums else torch.view_as_complex(v.contiguous()) for n, v in statistics.items()} | sums


def row_summaries(
    plans: Sequence[AnyPlan], inputs: Inputs, first_row: int, request: Request
) -> Iterator[tuple[int, Rows]]:
    """The number of rows of each block, and their statistics; over the draws of all plans, those of an ensemble."""
    for n_rows, blocks in _row_blocks(plans, inputs, first_row):
        statistics, shapes = request.summaries(plans[0].profile), set[tuple[torch.Size, ...]]()
        for block in blocks:
            shapes.add(tuple(block.outputs[place].shape[2:] for place in statistics))
            if len(shapes) > 1:
                raise ValueError(f"`net` must hold networks of one shape of output; got {shapes}.")
            for place, one in statistics.items():
                one.add(block.outputs[place], None if block.variances is None else block.variances[place])
        yield n_rows, [one.results() for one in statistics.values()]


def _row_blocks(plans: Sequence[AnyPlan], inputs: Inputs, first_row: int) -> Iterator[tuple[int, Iterator[Block]]]:
    """The number of some rows, and the blocks of all draws of theirs."""
    if len(plans) == 1:
        runs = itertools.groupby(plans[0].run(inputs, first_row=first_row), lambda block: block.rows)
        yield from ((len(rows), blocks) for rows, blocks in runs)
        return
    size = min(plan.block_rows for plan in plans if isinstance(plan, Plan))
    for start in range(0, inputs.n_rows, size):
        part = inputs.block(start, min(start + size, inputs.n_rows))
        runs_of_all = (plan.run(part, first_row=first_row + start) for plan in plans)
        yield part.n_rows, itertools.chain.from_iterable(runs_of_all)


def joined_rows(parts: Sequence[Rows], index: int = 0, *, whole: bool = False) -> dict[str, Tensor]:
    """The statistics of one tensor for all rows, by name; batches of a row each (`whole`: graphs) follow on axis 1."""
    joined = dict(parts[0][index])
    if len(parts) == 1:
        return joined
    for name in joined:
        axis = (2 if name in DRAWS_FIRST else 1) if whole else 0
        values = (part[index][name] for part in parts)
        joined[name] = torch.cat([value if value.dim() > axis else value[..., None] for value in values], axis)
    return joined


def trees(parts: Sequence[Rows], profile: Profile, request: Request) -> dict[str, PyTree]:
    """Every statistic by name, in the network's structure; of the judged tensor alone if there is one."""
    layouts = [profile.outputs[place] for place in request.judged(profile)]
    alone = len(layouts) < len(profile.outputs)
    columns = [joined_rows(parts, index, whole=layout is None) for index, layout in enumerate(layouts)]
    statistics: dict[str, PyTree] = {}
    for name in dict.fromkeys(name for one in columns for name in one):
        values = [one.get(name) for one in columns]
        for index, layout in enumerate(layouts):
            value, leading = values[index], int(name in DRAWS_FIRST)
            if value is not None and (layout is None or name not in (*CLASS_STATISTICS, "draws_used")):
                values[index] = move_row_axis(value.movedim(1, 0) if leading else value, layout, leading)
        bare = alone or name == "draws_used" or (name in CLASS_STATISTICS and not request.is_by_head)
        statistics[name] = values[0] if bare else profile.structure.build(values, numbers=name == "mean")
    return statistics | {"row_axis": None if layouts[0] is None else layouts[0].axis}
