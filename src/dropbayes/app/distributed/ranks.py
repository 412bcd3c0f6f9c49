r"""One prediction over several processes, under `torchrun`: draws or rows divided, the same bits for any number.

Draws are counted in groups of fixed size, each with its number, mean and sum of squared deviations in float64. Which
process counted a group does not matter: the groups are merged on a binary tree that follows from their number alone, by
$\delta = \mu_b - \mu_a$, $\mu = \mu_a + \delta\, n_b / n$ and $S = S_a + S_b + \delta^2 n_a n_b / n$
(Chan, Golub and LeVeque).
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils import _pytree as pytree

from dropbayes import information
from dropbayes.likelihoods import Categorical, Likelihood
from dropbayes.predictive import Prediction, predict
from dropbayes.sampling import Inputs, Plan, Sampling, as_inputs, make_plan

__all__ = ["Group", "merge", "predict_across_ranks"]

_GROUP_DRAWS = 8


@dataclass(frozen=True)
class Group:
    """A summary of some draws: their number, mean and sum of squared deviations, and the mean of further averages."""

    count: int
    mean: Tensor
    squares: Tensor
    averages: tuple[Tensor, ...] = ()

    @classmethod
    def of(cls, draws: Tensor, *averages: Tensor) -> Group:
        """The draws `[draw, row, ...]` counted; `averages` have a value per draw, too."""
        mean = draws.double().mean(0)
        squares = (draws.double() - mean).square().sum(0)
        return cls(len(draws), mean, squares, tuple(a.double().mean(0) for a in averages))

    def __add__(self, other: Group) -> Group:
        total = self.count + other.count
        share, step = other.count / total, other.mean - self.mean
        squares = self.squares + other.squares + step.square() * (self.count * other.count / total)
        averages = zip(self.averages, other.averages, strict=True)
        return Group(total, self.mean + step * share, squares, tuple(a + (b - a) * share for a, b in averages))


def merge(groups: Sequence[Group]) -> Group:
    """All groups as one, merged in pairs of neighbours, then in pairs of these."""
    groups = list(groups)
    while len(groups) > 1:
        pairs = [groups[i] + groups[i + 1] for i in range(0, len(groups) - 1, 2)]
        groups = pairs + groups[len(groups) - len(groups) % 2 :]
    return groups[0]


def predict_across_ranks(
    net: nn.Module,
    x: Any,
    *,
    n_draws: int = 100,
    seed: int = 0,
    likelihood: Likelihood | None = None,
    divide: Literal["draws", "rows"] = "draws",
    masks: str = "shared",
    sampler: str = "stratified",
    group: Any = None,
) -> Prediction:
    """The prediction of a network, its draws or rows divided among the processes of a group; each gets all of it.

    Every process calls it with the same arguments. Under `torchrun` a process group is made where there is none (NCCL
    for CUDA, gloo otherwise); outside, one process does all. With "rows" the bits are those of `dropbayes.predict`;
    with "draws" they are those of one process calling this function.

    Args:
        net: The network; its weights must be the same in all processes. It must return one tensor.
        x: Its input, the same in all processes.
        n_draws: The number of draws T.
        seed: With `n_draws`, fixes every mask.
        likelihood: How the output is read; None for the bare output.
        divide: Whether a process takes some of the draws or some of the rows.
        masks: "shared" or "row".
        sampler: "stratified" or "independent".
        group: A process group of `torch.distributed`; the default one if None.
    """
    if divide not in ("draws", "rows"):
        raise ValueError(f"`divide` must be 'draws' or 'rows'; got {divide!r}.")
    rank, n_ranks = _rank_and_size(group)
    settings = {"n_draws": n_draws, "seed": seed, "masks": masks}
    if divide == "rows":
        return _by_rows(net, as_inputs(x), likelihood, rank, n_ranks, group, settings, sampler)
    return _by_draws(net, as_inputs(x), likelihood, rank, n_ranks, group, settings, sampler)


def _rank_and_size(group: Any) -> tuple[int, int]:
    """This process's rank in the group, and the number of ranks."""
    if not dist.is_available():
        return 0, 1
    if not dist.is_initialized():
        if not dist.is_torchelastic_launched():
            return 0, 1
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("`group` must contain the process that calls; this one is not in it.")
    return rank, dist.get_world_size(group)


def _gather(value: Any, n_ranks: int, group: Any) -> list[Any]:
    """The value of each process, in rank order."""
    if n_ranks == 1:
        return [value]
    values: list[Any] = [None] * n_ranks
    dist.all_gather_object(values, value, group=group)
    return values


def _by_rows(
    net: nn.Module,
    inputs: Inputs,
    likelihood: Any,
    rank: int,
    n_ranks: int,
    group: Any,
    settings: dict[str, Any],
    sampler: str,
) -> Prediction:
    start, stop = (inputs.n_rows * r // n_ranks for r in (rank, rank + 1))
    mine = None
    if stop > start:
        args, kwargs = pytree.tree_unflatten(list(inputs.block(start, stop).leaves), inputs.spec)
        rows = kwargs or (args[0] if len(args) == 1 else tuple(args))
        mine = predict(
            net,
            rows,
            likelihood=likelihood,
            sampling=Sampling(sampler=sampler, row_offset=start),
            progress=False,
            **settings,
        )
    parts = [part for part in _gather(mine, n_ranks, group) if part is not None]
    joined: dict[str, Any] = {}
    for name in ("mean", "epistemic", "aleatoric", "entropy", "expected_entropy", "variation_ratio"):
        values = [getattr(part, name) for part in parts]
        joined[name] = None if values[0] is None else torch.cat(values)
    return replace(parts[0], **joined)


def _by_draws(
    net: nn.Module,
    inputs: Inputs,
    likelihood: Any,
    rank: int,
    n_ranks: int,
    group: Any,
    settings: dict[str, Any],
    sampler: str,
) -> Prediction:
    keys = Sampling(sampler=sampler).keys(settings["n_draws"], settings["seed"])
    ranges = [range(i, min(i + _GROUP_DRAWS, keys.n_draws)) for i in range(0, keys.n_draws, _GROUP_DRAWS)]
    plan = make_plan(net, inputs, keys=keys, masks=settings["masks"], sampling=Sampling(batch_invariant=True))
    shares = range(rank, len(ranges), n_ranks)
    mine = {i: _draw_group(replace(plan, draws=ranges[i]), inputs, likelihood) for i in shares}
    counted: dict[int, tuple[Group, torch.dtype]] = {}
    for part in _gather(mine, n_ranks, group):
        counted |= part
    total = merge([counted[i][0] for i in range(len(ranges))])
    dtype = counted[0][1]
    statistics: dict[str, Any] = {
        "mean": total.mean.to(dtype),
        "epistemic": (total.squares / total.count).to(dtype),
        "aleatoric": (total.averages[0] if total.averages else torch.zeros_like(total.mean)).to(dtype),
    }
    if isinstance(likelihood, Categorical):
        classes = {"class_axis": likelihood.for_output(total.mean.dim()).axis}
        statistics["entropy"] = information.entropy(total.mean, **classes).to(dtype)
        statistics["expected_entropy"] = total.averages[1].to(dtype)
    return Prediction(n_draws=keys.n_draws, method=plan.method, **statistics)


def _draw_group(plan: Plan, inputs: Inputs, likelihood: Any) -> tuple[Group, torch.dtype]:
    """The draws of a plan for all rows, counted."""
    by_rows = itertools.groupby(plan.run(inputs), lambda block: block.rows)
    blocks = [torch.cat([_single_output(block.outputs) for block in blocks]) for _, blocks in by_rows]
    (draws,) = plan.arrange([torch.cat(blocks, 1)], leading=1)
    draws = draws.cpu()
    if likelihood is None:
        return Group.of(draws), draws.dtype
    likelihood = likelihood.for_output(draws.dim() - 1)
    averages = [likelihood.variance(draws)]
    if isinstance(likelihood, Categorical):
        averages.append(information.entropy(likelihood.mean(draws), class_axis=likelihood.axis))
    return Group.of(likelihood.mean(draws), *averages), draws.dtype


def _single_output(outputs: list[Tensor]) -> Tensor:
    if len(outputs) != 1:
        raise ValueError(f"`net` must return one tensor; it returns {len(outputs)}. Wrap it to return the one wanted.")
    return outputs[0]
