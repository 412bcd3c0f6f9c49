"""A framework's own procedure under draws: whoever calls the network meets one draw of it.

Frameworks surround a network with what they are good at: loaders, devices, tiles, a recursion over time, an agent's
step, post-processing. All of that stays theirs. While `one_draw` holds, the network that they call is one function.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import PyTree, tree_map_only

from dropbayes.predictive import Prediction, check_outputs
from dropbayes.predictive.statistics import DRAWS_FIRST, Request, RowStatistics
from dropbayes.runtime.progress import ProgressBar
from dropbayes.runtime.validation import check_count, to_tensor
from dropbayes.sampling import Sampling, function_draw
from dropbayes.tracing.outputs import split
from dropbayes.tracing.views import checked_network


@contextlib.contextmanager
def one_draw(
    net: nn.Module, index: int = 0, *, n_draws: int = 100, seed: int = 0, sampling: Sampling = Sampling()
) -> Iterator[None]:
    """While this holds, every call of `net` gives its draw `index`, in any mode; afterwards it is as before.

    The network is the one that the framework calls; one that is compiled or wrapped for several devices is unwrapped.
    The other arguments are those of `function_draw`. Raises ValueError if the network was never called: the result
    would be that of no draw.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 1)).eval()
        >>> with one_draw(net, 3, n_draws=10):
        ...     output = net(torch.ones(2, 2))
        >>> torch.equal(output, function_draw(net, 3, n_draws=10)(torch.ones(2, 2)))
        True
    """
    plain = checked_network(net)
    draw = function_draw(plain, index, n_draws=n_draws, seed=seed, sampling=sampling)
    state, called = plain.__dict__, False
    slots = ("forward", "_compiled_call_impl")  # of an instance: both come before those of its class
    before = {slot: state[slot] for slot in slots if slot in state}
    if before.get("forward", net) is before.get("_compiled_call_impl"):
        raise ValueError("`net` must be in one `one_draw` at a time: inside, it gives that draw. Leave the first.")

    def restore() -> None:
        for slot in slots:
            state.pop(slot, None)
        state.update(before)

    @functools.wraps(plain.forward)  # frameworks read its signature
    def drawn(*args: Any, **kwargs: Any) -> PyTree:
        nonlocal called
        called = True
        restore()  # the draw reads the network as it is
        try:
            return draw(_named(plain, args, kwargs) if args and kwargs else kwargs or args)
        finally:
            state.update(dict.fromkeys(slots, drawn))

    state.update(dict.fromkeys(slots, drawn))
    try:
        with torch.compiler.set_stance("force_eager") if plain is not net else contextlib.nullcontext():
            yield  # compiled code holds the network as it was
    finally:
        restore()
    if not called:
        got = f"this {type(plain).__name__} was never called: the result would be that of no draw"
        remedy = "Pass the module that is called, such as a part of it, and its `forward`"
        raise ValueError(f"`net` must be what the procedure calls, but {got}. {remedy}.")


def _named(net: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    signature = inspect.signature(net.forward)
    named = dict(signature.bind(*args, **kwargs).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            named |= named.pop(name, {})
    return named


def each_draw(
    net: nn.Module,
    procedure: Callable[[], Any],
    *,
    n_draws: int = 100,
    seed: int = 0,
    sampling: Sampling = Sampling(),
    progress: bool | None = None,
) -> list[Any]:
    """What a procedure gives under each draw of the network that it calls.

    It is a function without arguments that calls the network, however deep inside a framework, and runs once for each
    draw; `seed` and `sampling` are as in `draws`, and `progress` as in `dropbayes.predict`.
    """
    return list(_results(net, procedure, n_draws, seed, sampling, progress))


def _results(
    net: nn.Module, procedure: Callable[[], Any], n_draws: int, seed: int, sampling: Sampling, progress: bool | None
) -> Iterator[Any]:
    check_count("n_draws", n_draws)
    with ProgressBar("draws", n_draws, unit="draws", show=progress, delay=3.0) as bar:
        for index in bar.follow(range(n_draws)):
            with one_draw(net, index, n_draws=n_draws, seed=seed, sampling=sampling):
                result = procedure()
            yield result


def predict_through(
    net: nn.Module,
    procedure: Callable[[], Any],
    *,
    n_draws: int = 100,
    seed: int = 0,
    quantiles: Sequence[float] = (),
    keep_draws: bool = False,
    sampling: Sampling = Sampling(),
    progress: bool | None = None,
) -> Prediction:
    """The mean and the variance over draws of what a procedure gives: tensors or arrays, or trees of them.

    The network, the procedure and the draws are as in `each_draw`; `quantiles` over draws, and `keep_draws` for all
    results, `[draw, ...]`, as in `dropbayes.predict`.
    """
    request, statistics = Request(None, tuple(quantiles), keep_draws), list[RowStatistics]()
    first: object = None
    for result in _results(net, procedure, n_draws, seed, sampling, progress):
        tensors, structure = split(tree_map_only((np.ndarray, np.generic, int, float), to_tensor, result))
        shapes = [tuple(tensor.shape) for tensor in tensors]
        statistics, first = statistics or [RowStatistics(request) for _ in tensors], first or (structure, shapes)
        if first != (structure, shapes):
            rule = "must give tensors of the same shapes, in the same places, under every draw"
            raise ValueError(f"`procedure` {rule}; got {shapes} unlike before. Use `each_draw` for such results.")
        for one, tensor in zip(statistics, tensors, strict=True):
            one.add(torch.atleast_1d(tensor.detach())[None], None)  # else the graphs of all draws stay
    summaries = [one.results() for one in statistics]
    found = {n: [s[n].movedim(1, 0) if n in DRAWS_FIRST else s[n] for s in summaries] for n in summaries[0]}
    trees = {name: structure.build(values) for name, values in found.items()}
    prediction = Prediction.of(trees, n_draws=n_draws, method="through a procedure", quantile_levels=request.quantiles)
    check_outputs(prediction)
    return prediction
