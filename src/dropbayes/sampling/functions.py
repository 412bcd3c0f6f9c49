"""The draws of a network as tensors, and one draw as a function."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dropbayes.sampling.inspection import forget, inspect_cached, names_of
from dropbayes.sampling.keyed import KeyedSource, Masks
from dropbayes.sampling.looks import flags_up
from dropbayes.sampling.operations import Interception
from dropbayes.sampling.perceptron import perceptron
from dropbayes.sampling.plan import (
    MASKS,
    NetworkChanged,
    Plan,
    check_random,
    checked_keys,
    plan_draws,
    position_masks,
)
from dropbayes.sampling.positions import checked_positions
from dropbayes.sampling.trees import Inputs, RowAxis, as_inputs, cloned_leaves, is_cache, split
from dropbayes.sampling.views import View, checked_network, eagerly


def draws(
    net: nn.Module,
    x: Any,
    *,
    n_draws: int = 100,
    seed: int = 0,
    masks: str = "shared",
    positions: str | None = None,
    sampler: str = "stratified",
    row_axis: RowAxis = 0,
    exact_rows: bool | None = None,
    first_row: int = 0,
    leave_out: str | Sequence[str] = (),
    max_bytes: int | None = None,
) -> Any:
    r"""The outputs of `n_draws` draws, $\widehat{\mathbf y}_t(\mathbf x)$: the network's own structure, draws first.

    Args:
        net: Any network with dropout; it is not changed.
        x: Its input: a tensor or array, a tuple of positional or a dict of named arguments.
        n_draws: The number of draws $T$.
        seed: With `n_draws` and `sampler`, fixes every mask.
        masks: "shared" for one mask per draw, so that a draw is a function; "row" for a new mask per row.
        positions: For a network that reads sequences: "tied" for one mask for all positions of a sequence, "own" for
            one per absolute position; None treats a position like any other unit.
        sampler: "stratified" or "independent" (see `dropbayes.sampling.masks`).
        row_axis: The axis of the rows in the inputs: one for all arguments or one per argument (a dict or tuple);
            None if the whole input is one row (graphs, sets).
        exact_rows: Whether a row must have the same bits alone and in any batch; by default only on a CPU.
        first_row: The index of the first row, which keys its masks: shards of rows then have the masks of the whole.
        leave_out: Modules, by name or class name, whose randomness in training is not dropout (an augmentation).
        max_bytes: A bound on working memory, excluding the result.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 1))
        >>> draws(net, torch.ones(3, 2), n_draws=10).shape
        torch.Size([10, 3, 1])
    """
    inputs = as_inputs(x, row_axis=row_axis)
    keys = checked_keys(n_draws, seed, sampler)
    first_row = checked_first_row(first_row)

    def gather(plan: Plan) -> Any:
        results: list[Tensor] = []
        with plan.running():
            for rows, chunks in plan.blocks(inputs, first_row=first_row):
                for chunk in chunks:
                    if not results:
                        results = [
                            out.new_empty((keys.n_draws, inputs.n_rows, *out.shape[2:])) for out in chunk.outputs
                        ]
                    for result, out in zip(results, chunk.outputs, strict=True):
                        result[chunk.draws.start : chunk.draws.stop, rows.start : rows.stop] = out
        return plan.anatomy.structure.build(plan.arrange(results, leading=1))

    options = {
        "masks": masks,
        "positions": positions,
        "max_bytes": max_bytes,
        "exact_rows": exact_rows,
        "leave_out": leave_out,
    }
    result, plan = with_plan(net, inputs, gather, keys=keys, **options)
    keep_state(net, inputs, plan)
    return result


def is_stochastic(net: nn.Module, x: Any) -> bool:
    """Whether two draws of `net` on `x` can differ: whether it has dropout that is switched on."""
    inputs, plain = as_inputs(x), checked_network(net)
    direct = perceptron(plain, inputs.leaves[0]) if inputs.is_matrix else None
    anatomy = inspect_cached(plain, inputs).anatomy if direct is None else direct.anatomy
    return anatomy.n_random > 0


def checked_first_row(first_row: int) -> int:
    """`first_row` as a whole number, zero or more."""
    if isinstance(first_row, bool) or not hasattr(first_row, "__index__"):
        raise TypeError(f"`first_row` must be a whole number; got {first_row!r}.")
    if operator.index(first_row) < 0:
        raise ValueError(f"`first_row` must be zero or more; got {first_row}.")
    return operator.index(first_row)


def with_plan(net: nn.Module, inputs: Inputs, compute: Callable[[Plan], Any], **options: Any) -> tuple[Any, Plan]:
    """The result of `compute` on a plan, and the plan; planned again if the network changed since its inspection."""
    # Changed on the inputs on which it was just inspected: its sites depend on the values of a row.
    for careful in (False, False, True):
        try:
            plan = _plan_with_hints(net, inputs, careful=careful, **options)
            return compute(plan), plan
        except NetworkChanged:
            forget(checked_network(net))
    raise NotImplementedError(
        "`net` met other sites in each of several runs on the same input, so that its masks cannot be keyed. Let its "
        "forward depend on its input and its weights only."
    )


def _plan_with_hints(net: nn.Module, inputs: Inputs, **options: Any) -> Plan:
    try:
        return plan_draws(net, inputs, **options)
    except RuntimeError as error:
        for hint in _input_hints(net, inputs, str(error)):
            error.add_note(hint)
        raise


def _input_hints(net: nn.Module, inputs: Inputs, message: str) -> list[str]:
    """Hints beyond torch's message when the input does not fit the network."""
    weights = {parameter.dtype for parameter in net.parameters() if parameter.is_floating_point()}
    given = {leaf.dtype for leaf in inputs.leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()}
    if "dtype" in message and len(weights) == 1 and given - weights:
        expected = next(iter(weights))
        return [f"`x` has {next(iter(given - weights))} and the network's weights {expected}: pass x.to({expected})."]
    if "shape" in message or "size" in message:
        shapes = [tuple(leaf.shape) for leaf in inputs.leaves if isinstance(leaf, Tensor)]
        return [f"`x` must be a batch of rows that the network takes, [row, ...]; got the shape {shapes[0]}."]
    return []


def keep_state(net: nn.Module, inputs: Inputs, plan: Plan) -> None:
    """Updates the state of a stateful network as one call in evaluation mode does; others are unchanged."""
    if plan.anatomy.stateful:
        net = checked_network(net)
        view = View(net)
        with torch.no_grad():
            eagerly(inputs.call)(view.net, cloned_leaves(inputs.leaves))
        view.commit(net)


def function_draw(
    net: nn.Module,
    index: int = 0,
    *,
    n_draws: int = 100,
    seed: int = 0,
    masks: str = "shared",
    positions: str | None = None,
    sampler: str = "stratified",
    row_axis: RowAxis = 0,
    leave_out: str | Sequence[str] = (),
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
        positions: As in `draws`; with "tied" or "own", a step that reads a cache has the masks that it has in the
            whole sequence.
        sampler: As in `draws`.
        row_axis: As in `draws`.
        leave_out: As in `draws`.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 1))
        >>> f = function_draw(net, 3, n_draws=10, seed=1)
        >>> torch.allclose(f(torch.ones(2, 2)), draws(net, torch.ones(2, 2), n_draws=10, seed=1)[3])
        True
    """
    keys = checked_keys(n_draws, seed, sampler)
    if not 0 <= operator.index(index) < keys.n_draws:
        raise ValueError(f"`index` must be one of the {n_draws} draws, 0 to {n_draws - 1}; got {index}.")
    if masks not in MASKS:
        raise ValueError(f"`masks` must be one of {', '.join(map(repr, MASKS))}; got {masks!r}.")
    plain, names, positions = checked_network(net), names_of(leave_out), checked_positions(positions)

    def function(*args: Any, _again: bool = False, **kwargs: Any) -> Any:
        x = kwargs if kwargs and not args else args[0] if len(args) == 1 and not kwargs else args
        if args and kwargs:
            raise TypeError("a draw takes positional or named arguments, not both. Name all of them.")
        inputs = as_inputs(x, row_axis=row_axis)
        anatomy = inspect_cached(
            plain, inputs, names, positions=positions is not None, any_length=positions is not None
        ).anatomy
        check_random(anatomy)
        if not anatomy.rows_together or anatomy.host_random:
            options = {"masks": masks, "positions": positions, "leave_out": names}
            return _draw_by_blocks(plain, inputs, keys, operator.index(index), options)
        drawn = Masks(anatomy, keys, masks == "row", False, position_masks(positions, inputs))
        source = KeyedSource(drawn, range(index, index + 1), range(inputs.n_rows), folded=True)
        view = View(plain, flags_up(names, anatomy.lowered))
        source.follow(view.net)
        try:
            with Interception(source):
                output = eagerly(inputs.call)(view.net, inputs.leaves)
            source.finish(split(output)[0])
        except NetworkChanged as changed:
            forget(plain)
            if any(map(is_cache, inputs.leaves)):  # already written into
                raise ValueError(
                    f"`net` met other sites than when it was inspected ({changed}). Call it again with a new cache."
                ) from None
            if _again:
                raise
            return function(*args, **kwargs, _again=True)
        return output

    return function


def _draw_by_blocks(net: nn.Module, inputs: Inputs, keys: Any, index: int, options: dict[str, Any]) -> Any:
    """One draw of a network that takes one row at a time."""
    plan = plan_draws(net, inputs, keys=keys, **options)
    chunks = [plan.evaluator(inputs, rows, rows.start, range(index, index + 1)) for rows, _ in plan.blocks(inputs)]
    whole = [torch.cat([chunk.outputs[i][0] for chunk in chunks]) for i in range(len(chunks[0].outputs))]
    return plan.anatomy.structure.build(plan.arrange(whole, leading=0))
