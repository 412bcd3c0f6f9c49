"""One prediction over several processes, under `torchrun`: draws or rows divided, the same bits for any number."""

import os
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils import _pytree as pytree

from dropbayes.likelihoods import Likelihood
from dropbayes.predictive import Prediction, predict
from dropbayes.predictive.statistics import Request, RowStatistics
from dropbayes.sampling import Inputs, Plan, Sampling, as_inputs, make_plan


def predict_across_ranks(
    net: nn.Module,
    x: Any,
    *,
    n_draws: int = 100,
    seed: int = 0,
    likelihood: Likelihood | None = None,
    divide: Literal["draws", "rows"] = "draws",
    masks: str = "shared",
    sampling: Sampling = Sampling(),
    group: Any = None,
) -> Prediction:
    """The prediction of a network, its draws or rows divided among the processes of a group; each gets all of it.

    Every process calls it with the same arguments, those of `dropbayes.predict` and two more: `divide` says whether a
    process takes some of the draws or some of the rows, and `group` is a process group of `torch.distributed`, by
    default that of all processes. Under `torchrun` it is made where there is none (NCCL for CUDA, gloo otherwise);
    outside, one process does all. The network must return one tensor, and have the same weights in all processes.

    With "rows" the bits are those of `dropbayes.predict`; with "draws" they are those of `dropbayes.predict` without
    its integrated last layer, and every process holds all draws.
    """
    if divide not in ("draws", "rows"):
        raise ValueError(f"`divide` must be 'draws' or 'rows'; got {divide!r}.")
    rank, n_ranks = _rank_and_size(group)
    inputs = as_inputs(x, net, row_axis=sampling.row_axis)
    if divide == "rows":
        start, stop = (inputs.n_rows * r // n_ranks for r in (rank, rank + 1))
        mine = None
        if stop > start:
            args, kwargs = pytree.tree_unflatten(list(inputs.block(start, stop).leaves), inputs.spec)
            rows = kwargs or (args[0] if len(args) == 1 else tuple(args))
            shard = replace(sampling, row_offset=sampling.row_offset + start)
            settings: dict[str, Any] = {"n_draws": n_draws, "seed": seed, "masks": masks, "sampling": shard}
            mine = predict(net, rows, likelihood=likelihood, progress=False, **settings)
        parts: list[Prediction] = [part for part in _gather(mine, n_ranks, group) if part is not None]
        first, names = parts[0], ("mean", "epistemic", "aleatoric", *parts[0].information)
        joined = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
        return Prediction.of(joined, n_draws=first.n_draws, method=first.method, row_axis=first.row_axis)
    keys, sampling = sampling.keys(n_draws, seed), replace(sampling, batch_invariant=True)
    plan = make_plan(net, inputs, keys=keys, masks=masks, sampling=sampling)
    # A process takes eight draws at a time, whatever the number of processes.
    ranges = [range(keys.n_draws)[start : start + 8] for start in range(0, keys.n_draws, 8)]
    mine_drawn = [_draws(replace(plan, draws=some), inputs, sampling.row_offset) for some in ranges[rank::n_ranks]]
    gathered = _gather(mine_drawn, n_ranks, group)
    statistics = RowStatistics(Request(likelihood), likelihood)
    for index in range(len(ranges)):
        statistics.add(gathered[index % n_ranks][index // n_ranks], None)
    return Prediction.of(statistics.results(), n_draws=keys.n_draws, method=plan.method)


def _rank_and_size(group: Any) -> tuple[int, int]:
    """This process's rank in the group, and the number of ranks."""
    if not dist.is_available() or not (dist.is_initialized() or dist.is_torchelastic_launched()):
        return 0, 1
    if not dist.is_initialized():
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if (rank := dist.get_rank(group)) < 0:
        raise ValueError("`group` must contain the process that calls; this one is not in it.")
    return rank, dist.get_world_size(group)


def _gather(value: Any, n_ranks: int, group: Any) -> list[Any]:
    if n_ranks == 1:
        return [value]
    values: list[Any] = [None] * n_ranks
    dist.all_gather_object(values, value, group=group)
    return values


def _draws(plan: Plan, inputs: Inputs, first_row: int) -> Tensor:
    """The outputs of a plan's draws for all rows, `[draw, row, ...]`."""
    outputs, _ = plan.collected(inputs, first_row=first_row)
    if len(outputs) != 1:
        raise ValueError(f"`net` must return one tensor; it returns {len(outputs)}. Wrap it to return one.")
    return plan.arrange(outputs, leading=1)[0].cpu()
