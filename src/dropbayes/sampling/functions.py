"""The draws of a network as tensors, and one draw as a function."""

import functools
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import PyTree

from dropbayes.runtime.validation import check_choice
from dropbayes.sampling.inputs import Inputs, as_inputs, cloned_leaves, is_cache
from dropbayes.sampling.inspection import Inspection, forget, inspect
from dropbayes.sampling.masks import Keys
from dropbayes.sampling.perceptron import as_perceptron
from dropbayes.sampling.plan import MASKS, make_plan, mask_spec, move_row_axis
from dropbayes.sampling.profile import Profile
from dropbayes.sampling.routing import SentSource
from dropbayes.sampling.settings import Sampling, check_sampling
from dropbayes.sampling.source import KeyedSource, MaskSpec, UnsupportedStrategy
from dropbayes.sampling.strategies import DRAW_BY_DRAW, ONE_BY_ONE, Strategy, Work, called, evaluate
from dropbayes.sampling.trials import check_block, chosen_strategy, rows_alone
from dropbayes.tracing import Interception, Ones
from dropbayes.tracing.generators import HostDraws, names_generators
from dropbayes.tracing.outputs import split
from dropbayes.tracing.states import NetworkState
from dropbayes.tracing.transforms import outside_transforms
from dropbayes.tracing.views import View, checked_network, eagerly


def draws(
    net: nn.Module,
    x: PyTree,
    *,
    n_draws: int = 100,
    seed: int = 0,
    masks: str = "shared",
    sampling: Sampling = Sampling(),
) -> PyTree:
    r"""The outputs of `n_draws` draws, $\widehat{\mathbf y}_t(\mathbf x)$: the network's own structure, draws first.

    Args:
        net: Any network with dropout; it is not changed.
        x: Its input: a tensor or array, a tuple of positional or a dict of named arguments.
        n_draws: The number of draws $T$.
        seed: With `n_draws` and the sampler, fixes every mask.
        masks: "shared" for one mask per draw, so that a draw is a function; "row" for a new mask per row.
        sampling: The other settings.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 1))
        >>> draws(net, torch.ones(3, 2), n_draws=10).shape
        torch.Size([10, 3, 1])
    """
    check_sampling(sampling)
    inputs = as_inputs(x, net, row_axis=sampling.row_axis)
    plan = make_plan(net, inputs, keys=sampling.keys(n_draws, seed), masks=masks, sampling=sampling)
    outputs, _ = plan.collected(inputs, first_row=sampling.row_offset)
    keep_state(net, inputs, plan.profile)
    return plan.profile.structure.build(plan.arrange(outputs, leading=1))


def is_stochastic(net: nn.Module, x: PyTree) -> bool:
    """Whether two draws of `net` on `x` can differ: whether it has dropout that is switched on."""
    inputs, plain = as_inputs(x, net), checked_network(net)
    direct = as_perceptron(plain, inputs.leaves[0]) if inputs.is_matrix else None
    return (inspect(plain, inputs) if direct is None else direct).profile.n_random > 0


def keep_state(net: nn.Module, inputs: Inputs, profile: Profile) -> None:
    """Fills what a network caches at its first call, and a second call leaves as it is; any other state stays."""
    if profile.is_stateful:
        view = View(net := checked_network(net), own_parameters=True)
        _evaluate(view, inputs)
        filled = NetworkState(view.net, versions=True)
        _evaluate(view, inputs)
        before, after = list(net.parameters()), list(view.net.parameters())  # which stay, and with them their flags
        if filled.holds(view.net) and len(before) == len(after) and all(map(torch.equal, before, after)):
            view.commit(net)


def evaluation_output(net: nn.Module, x: PyTree) -> PyTree:
    """The network's output in evaluation mode, without its masks; its flags and its state are not changed."""
    return _evaluate(View(checked_network(net), own_parameters=True), as_inputs(x, net))


@torch.no_grad()
def _evaluate(view: View, inputs: Inputs) -> PyTree:
    with HostDraws(names_generators(view.net), []), Interception(Ones()):
        return eagerly(inputs.call)(view.net, cloned_leaves(inputs.leaves))


def function_draw(
    net: nn.Module,
    index: int = 0,
    *,
    n_draws: int = 100,
    seed: int = 0,
    masks: str = "shared",
    sampling: Sampling = Sampling(),
) -> Callable[..., Any]:
    """One draw of the network as a deterministic, differentiable function with the network's call signature.

    `function_draw(net, i, n_draws=T, seed=s)(x)` equals `draws(net, x, n_draws=T, seed=s)[i]` up to rounding. Several
    positional or named arguments may also come as one tuple or dict; the output is the network's own, including
    other contents such as a key-value cache.

    Args:
        net: Any network with dropout.
        index: The index of the draw.
        n_draws: The number of draws $T$.
        seed: As in `draws`.
        masks: As in `draws`; a draw is a function of its input alone only with "shared".
        sampling: As in `draws`; with masks "tied" or "per_position", a step that reads a cache has the masks that it
            has in the whole sequence.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 1))
        >>> f = function_draw(net, 3, n_draws=10, seed=1)
        >>> torch.allclose(f(torch.ones(2, 2)), draws(net, torch.ones(2, 2), n_draws=10, seed=1)[3])
        True
    """
    check_sampling(sampling)
    keys = sampling.keys(n_draws, seed)
    if not (hasattr(index, "__index__") and torch.as_tensor(index).numel() == 1 and 0 <= int(index) < keys.n_draws):
        raise ValueError(f"`index` must be one of the {n_draws} draws, 0 to {n_draws - 1}; got {index!r}.")
    check_choice("masks", masks, MASKS)
    return functools.partial(called_draw, checked_network(net), keys, masks, sampling, range(n_draws)[index:][:1])


def called_draw(
    net: nn.Module, keys: Keys, masks: str, sampling: Sampling, draw: range, /, *args: Any, **kwargs: Any
) -> PyTree:
    """The output of one draw, at module level so that a draw can be pickled with its network."""
    if args and kwargs:
        raise TypeError("a draw takes positional or named arguments, not both. Name all of them.")
    x = kwargs or (args[0] if len(args) == 1 else args)
    inputs, by_position = as_inputs(x, net, row_axis=sampling.row_axis), sampling.positions is not None
    seen = replace(inputs, leaves=tuple(map(outside_transforms, inputs.leaves)))
    inspection = inspect(net, seen, sampling.ignored, positions=by_position, any_length=by_position)
    inspection.profile.check_random()
    spec = mask_spec(inspection.profile, inputs, keys=keys, masks=masks, sampling=sampling)
    rows = range(sampling.row_offset, sampling.row_offset + inputs.n_rows)
    work = Work(inspection.network, inputs, list(inputs.leaves), draw, rows, pairs=min(64, inputs.n_rows))
    try:
        return _one_draw(inspection, work, seen, spec)
    except UnsupportedStrategy as changed:
        forget(net)
        transformed = any(map(operator.is_not, seen.leaves, inputs.leaves))  # which hides an autograd.Function's sites
        if transformed or any(map(is_cache, inputs.leaves)):  # already written into
            remedy = "Differentiate a draw by torch.autograd" if transformed else "Call it again with a new cache"
            raise ValueError(f"`net` met other sites than when it was inspected ({changed}). {remedy}.") from None
        return _by_strategy(replace(spec, profile=replace(spec.profile, by_name=True)), work, ONE_BY_ONE)


def _one_draw(inspection: Inspection, work: Work, seen: Inputs, spec: MaskSpec) -> PyTree:
    """One draw of all rows: as a batch where that gives each row what it has alone, with the network's own output."""
    n_rows, lone = len(work.rows), len(work.rows) == 1 or any(map(is_cache, work.leaves))
    strategy = ONE_BY_ONE if lone or n_rows > inspection.most_rows else chosen_strategy(inspection, seen, spec)
    if (not lone and strategy.rows != "together") or spec.profile.host_random or spec.profile.seeds_torch:
        return _by_strategy(spec, work, strategy)
    source = (SentSource if spec.profile.moves_rows else KeyedSource)(spec, work.draws, work.rows, folded=True)
    output = eagerly(called)(source, work, work.leaves)
    source.finish(split(output)[0])
    if not lone:  # among more rows than before, or on another branch, a row may have another result than alone
        work = replace(work, inputs=seen, leaves=list(seen.leaves))
        most = inspection.findings.get("rows of a draw", 0)  # without the copies that fill a block
        with torch.no_grad():
            alone = rows_alone(strategy, spec, work, n_rows) if n_rows > most else {}
            together = evaluate(DRAW_BY_DRAW, spec, work) if alone else []
            check_block(inspection, strategy, spec, work, n_rows, together, alone)
        inspection.findings["rows of a draw"] = max(n_rows, most)
    return output


def _by_strategy(spec: MaskSpec, work: Work, strategy: Strategy) -> PyTree:
    """One draw of all rows, each alone or mapped over."""
    outputs = evaluate(strategy, spec, replace(work, leaves=cloned_leaves(work.leaves)))
    pairs = zip(outputs, spec.profile.outputs, strict=True)
    return spec.profile.structure.build([move_row_axis(out[0], layout, 0) for out, layout in pairs])
