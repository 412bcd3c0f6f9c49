"""Repeated evaluations as CUDA graphs, for networks whose launches take longer than their work.

A graph is captured when the same evaluation has run a few times, and replayed as long as everything that it was
captured with is the same: the modules (the inspection's record, which holds the graphs, is checked before every
prediction), the addresses of the parameters, what else the code reads (`purity`), the form of the inputs, the keys of
the masks and torch's global settings. Code that depends on anything else, or on the values of tensors, is not captured.
"""

from __future__ import annotations

import operator
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from dropbayes.runtime.devices import capture_graph
from dropbayes.sampling.looks import autocast_dtype, equal_but_for_rounding
from dropbayes.sampling.purity import Reference, all_unchanged, references
from dropbayes.sampling.trees import Inputs

_EAGER_CALLS = 3  # before a capture: a call that is not repeated is not worth it
_MOST_OPERATIONS = 3e12  # a larger evaluation takes longer than its launches
_MOST_BYTES = 2**30  # a graph keeps its working memory; all of them together keep no more than this


@dataclass
class Graphs:
    """The graphs of one network, as long as its modules are unchanged.

    Args:
        read: What the network's code reads besides its modules; None if that cannot be known.
        tensors: Its parameters and buffers.
        calls: The numbers of calls so far, by the evaluation.
        captured: The graphs; None for what cannot be captured.
    """

    read: tuple[Reference, ...] | None
    tensors: tuple[Tensor, ...]
    calls: dict[Hashable, int] = field(default_factory=dict)
    captured: dict[Hashable, _Graph | None] = field(default_factory=dict)

    def are_valid(self) -> bool:
        """Whether the code reads only what can be watched, and that is unchanged; otherwise they are given up."""
        if self.read is not None and not all_unchanged(self.read):
            self.read = None
            self.captured.clear()
        return self.read is not None


@dataclass
class _Graph:
    graph: torch.cuda.CUDAGraph | None  # None once its memory was needed for others
    leaves: tuple[Tensor, ...]
    outputs: list[Tensor]
    n_bytes: int
    finished: torch.cuda.Event
    held: tuple[Tensor, ...]  # read by the graph, and kept alive for it
    lock: threading.Lock = field(default_factory=threading.Lock)

    def replay(self, leaves: tuple[Tensor, ...]) -> list[Tensor]:
        assert self.graph is not None
        stream = torch.cuda.current_stream(self.leaves[0].device)
        stream.wait_event(self.finished)  # of the last replay, perhaps on another stream
        for mine, given in zip(self.leaves, leaves, strict=True):
            mine.copy_(given)
        self.graph.replay()
        outputs = [output.clone() for output in self.outputs]
        self.finished.record(stream)
        return outputs


def graphs_of_network(net: nn.Module) -> Graphs:
    """No graphs yet, for a network of any kind."""
    tensors = (*net.parameters(), *net.buffers())
    # A value on the host could be read and become a constant of the graph.
    plain = all(type(tensor) in (Tensor, nn.Parameter) and tensor.is_cuda for tensor in tensors)
    return Graphs(references(net) if plain else None, tensors)


_of_perceptrons: weakref.WeakKeyDictionary[nn.Module, Graphs] = weakref.WeakKeyDictionary()


def graphs_of_perceptron(layers: Sequence[nn.Module]) -> Graphs:
    """The graphs of layers of torch that have no hooks, remembered with the first of them."""
    tensors = tuple(parameter for layer in layers for parameter in layer.parameters())
    graphs = _of_perceptrons.get(layers[0])
    if graphs is None or len(tensors) != len(graphs.tensors) or not all(map(operator.is_, tensors, graphs.tensors)):
        graphs = _of_perceptrons[layers[0]] = Graphs((), tensors)
    return graphs


_live: deque[weakref.ref[_Graph]] = deque()
_MAKING_ROOM = threading.Lock()


def replay(
    graphs: Graphs,
    inputs: Inputs,
    key: Hashable,
    call: Callable[[Inputs], list[Tensor]],
    *,
    held: tuple[Tensor, ...],
    operations: float,
    n_bytes: int,
) -> list[Tensor] | None:
    """The tensors of `call(inputs)` from a graph; None if it is to run as usual.

    Args:
        graphs: The graphs of the network.
        inputs: The inputs.
        key: Everything else that decides the result of `call`.
        call: The evaluation.
        held: Tensors that it reads besides the network's and the inputs.
        operations: Its floating-point operations.
        n_bytes: Its working memory.
    """
    if operations > _MOST_OPERATIONS or n_bytes > _MOST_BYTES or torch._C._len_torch_function_stack() > 0:
        return None
    if not all(isinstance(leaf, Tensor) and leaf.is_cuda for leaf in inputs.leaves) or not graphs.are_valid():
        return None
    # `p.data = ...` moves a parameter without replacing it.
    addresses = tuple(map(Tensor.data_ptr, graphs.tensors))
    key = (key, _form(inputs), addresses, _settings(inputs.device))
    graph = graphs.captured.get(key)
    if graph is None:
        if key in graphs.captured or not _is_frequent(graphs, key):
            return None
        graph = graphs.captured[key] = _capture(inputs, call, held, n_bytes)
        if graph is None:
            return None
    with graph.lock:
        if graph.graph is None:
            del graphs.captured[key]
            return None
        return graph.replay(inputs.leaves)


def _is_frequent(graphs: Graphs, key: Hashable) -> bool:
    while len(graphs.calls) > 16:
        graphs.calls.pop(next(iter(graphs.calls)))
    graphs.calls[key] = graphs.calls.get(key, 0) + 1
    return graphs.calls[key] > _EAGER_CALLS


def _form(inputs: Inputs) -> tuple[Any, ...]:
    return tuple((leaf.shape, leaf.stride(), leaf.dtype) for leaf in inputs.leaves)


def _settings(device: torch.device) -> tuple[Any, ...]:
    """The settings of torch that decide which kernels an operation launches."""
    backends = torch.backends
    return (
        autocast_dtype(device),
        torch.is_autocast_cache_enabled(),
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        backends.cudnn.enabled,
        backends.cudnn.allow_tf32,
        backends.cudnn.benchmark,
        backends.cuda.flash_sdp_enabled(),
        backends.cuda.mem_efficient_sdp_enabled(),
        backends.cuda.math_sdp_enabled(),
        backends.mha.get_fastpath_enabled(),
    )


def _capture(
    inputs: Inputs, call: Callable[[Inputs], list[Tensor]], held: tuple[Tensor, ...], n_bytes: int
) -> _Graph | None:
    """The graph of an evaluation on copies of the inputs; None if it cannot be captured."""
    _make_room(n_bytes)
    leaves = tuple(leaf.clone(memory_format=torch.preserve_format) for leaf in inputs.leaves)
    if any(mine.stride() != leaf.stride() for mine, leaf in zip(leaves, inputs.leaves, strict=True)):
        return None  # an expanded input: torch may choose other kernels for its copy
    own, dtype = replace(inputs, leaves=leaves), autocast_dtype(inputs.device)
    # Weights that autocast has rounded and remembered would be gone when its context ends.
    rounding = torch.autocast(inputs.device.type, dtype, enabled=dtype is not None, cache_enabled=False)
    try:
        with rounding, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about a graph that is empty, since its capture failed
            expected = call(own)
            graph, outputs = capture_graph(lambda: call(own), (), inputs.device)
    except Exception:  # a result read on the host, an operation that cannot be captured, ...
        return None
    captured = _Graph(graph, leaves, outputs, n_bytes, torch.cuda.Event(), held)
    # The graph is its own witness: work on another device, say, would be missing from it.
    if not all(map(equal_but_for_rounding, captured.replay(inputs.leaves), expected)):
        return None
    _live.append(weakref.ref(captured))
    return captured


def _make_room(n_bytes: int) -> None:
    """Gives up the oldest graphs until another fits into the memory for all."""
    with _MAKING_ROOM:
        live = [graph for one in _live if (graph := one()) is not None and graph.graph is not None]
        while live and sum(graph.n_bytes for graph in live) + n_bytes > _MOST_BYTES:
            oldest = live.pop(0)
            with oldest.lock:
                oldest.graph, oldest.outputs = None, []
        _live.clear()
        _live.extend(map(weakref.ref, live))
