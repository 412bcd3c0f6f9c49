"""Devices: which one to use, threads, TF32 products, CUDA graphs."""

import contextlib
import functools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

_Result = TypeVar("_Result")
_Method = TypeVar("_Method", bound=Callable[..., Any])


def available_device(device: str | torch.device = "auto") -> torch.device:
    """The device of this name, after a number was stored on it and read back; "auto" is CUDA, otherwise the CPU."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        usable = torch.device(device)
        torch.zeros(1, device=usable).item()
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        reason = str(error).strip().split("\n")[0].rstrip(".")
        remedy = "Use 'auto' or 'cpu'"
        if torch.cuda.is_available():
            remedy += f", or one of the {torch.cuda.device_count()} CUDA devices, numbered from 'cuda:0'"
        raise ValueError(f"`device` must be one that works here; got {str(device)!r} ({reason}). {remedy}.") from error
    return usable


def share_cores(n_workers: int) -> None:
    """Gives this process its share of the cores for good, so that the workers of a machine do not compete for them."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // n_workers))


def end_with_parent() -> None:
    """Ends this worker process by SIGTERM when its parent is gone, which a killed parent cannot do itself."""
    if (parent := multiprocessing.parent_process()) is None:
        return

    def follow() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=follow, name="parent", daemon=True).start()


@contextlib.contextmanager
def changed_setting(change: Callable[[Any], object], value: object, before: object) -> Iterator[None]:
    """Another value of a setting within the context; one that it has already is not set, which would clear caches."""
    if value == before:
        yield
        return
    change(value)
    try:
        yield
    finally:
        change(before)


def on_cpu(method: _Method) -> _Method:
    """The method, whose tensors are on the CPU unless it says otherwise, whatever the caller's default device is."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.get_default_device().type == "cpu":  # a context costs every operation a call
            return method(*args, **kwargs)
        with torch.device("cpu"):
            return method(*args, **kwargs)

    return cast(_Method, call)


def cpu_threads(count: int | None) -> contextlib.AbstractContextManager[None]:
    """Operations on the CPU in `count` threads within the context, None for as many as before.

    Small products gain nothing by a second thread, and lose much by it when other programs use the cores.
    """
    before = torch.get_num_threads()
    return changed_setting(torch.set_num_threads, count or before, before)


def tensor_cores(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Float32 products in TF32 on a CUDA device within the context; the caller's choice is restored."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    matmul: Any = torch.backends.cuda.matmul
    name, value = ("fp32_precision", "tf32") if hasattr(matmul, "fp32_precision") else ("allow_tf32", True)  # torch 2.8
    return changed_setting(functools.partial(setattr, matmul, name), value, getattr(matmul, name))


def capture_graph(
    call: Callable[[], _Result], state: Sequence[Tensor], device: torch.device
) -> tuple[torch.cuda.CUDAGraph, _Result]:
    """A CUDA graph of `call`, and the tensors that every replay fills.

    The tensors of `state`, which `call` changes, and the device's random state are restored, also after an error.
    """
    values = [tensor.detach().clone() for tensor in state]
    generator = torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    before = generator.clone_state()

    def restore() -> None:
        with torch.no_grad():
            for tensor, value in zip(state, values, strict=True):
                tensor.copy_(value)

    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.stream(stream):
            for _ in range(3):  # PyTorch asks for a few: libraries choose kernels and allocate workspaces in them
                call()
                restore()
        torch.cuda.current_stream(device).wait_stream(stream)
        # Other threads may keep using the device: their work is not part of this graph.
        with torch.cuda.device(device), torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            result = call()
    except BaseException:
        generator.graphsafe_set_state(before)  # a broken capture leaves the generator unusable
        raise
    else:
        generator.set_state(before.get_state())
    finally:
        restore()
    return graph, result


def flush_denormals() -> contextlib.AbstractContextManager[None]:
    """Numbers below the smallest normal one are zero on this thread, where the processor can do that.

    Arithmetic with them, into which the weights of a unit that no longer learns decay, takes up to 100 times as long.
    """
    return changed_setting(torch.set_flush_denormal, True, float(torch.full((), 1e-30) * 1e-10) == 0.0)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype to which autocast rounds on a device; None if it is off."""
    try:
        return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    except RuntimeError:  # a device without autocast
        return None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def device_of(net: nn.Module) -> torch.device:
    """The device of a network: that of its first parameter or buffer."""
    tensors = (*net.parameters(), *net.buffers())
    return tensors[0].device if tensors else torch.device("cpu")
