"""Training rows in batches: tensors, nested inputs and NumPy arrays, or a DataLoader of labelled batches."""

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler, TensorDataset

from dropbayes.likelihoods import output_tensor
from dropbayes.runtime.batches import labelled_batch
from dropbayes.runtime.validation import outcomes, row_weights, to_tensor
from dropbayes.sampling import Inputs, as_inputs

_RESIDENT_BYTES = 2**31  # larger data stay on the host and are copied batch by batch


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """A batch of rows on the training device."""

    inputs: Inputs
    y: Tensor
    weight: Tensor | None = None  # with mean 1 over all rows; None if all weigh the same

    def output(self, net: nn.Module) -> Tensor:
        return output_tensor(self.inputs.call(net, self.inputs.leaves))

    @property
    def arguments(self) -> Any:
        """The inputs in the form that `draws` takes: a tensor, a tuple or a mapping."""
        args, kwargs = self.inputs.call(lambda *args, **kwargs: (args, kwargs), self.inputs.leaves)
        return kwargs or (args[0] if len(args) == 1 and isinstance(args[0], Tensor) else args)

    def first(self, n_rows: int) -> Self:
        return type(self)(self.inputs.block(0, min(n_rows, len(self.y))), self.y[:n_rows])

    @property
    def tensors(self) -> list[Tensor]:
        """Everything that differs between batches, in a fixed order."""
        return [*self.inputs.tensors, self.y, *([] if self.weight is None else [self.weight])]

    def clone(self) -> Self:
        weight = None if self.weight is None else self.weight.clone()
        return type(self)(self.inputs.with_tensors(Tensor.clone), self.y.clone(), weight)


class TensorRows:
    """Rows held in memory, on the device when they fit there; N is the sum of their weights."""

    def __init__(self, inputs: Inputs, y: Tensor, weight: Tensor | None, device: torch.device, batch_size: int) -> None:
        self.n_rows, self.device, self.batch_size = len(y), device, batch_size
        self.n_data = float(len(y)) if weight is None else float(weight.sum())
        self.n_batches = math.ceil(self.n_rows / batch_size)
        self.identity: Any = (inputs.leaves, y, weight)
        resident = sum(tensor.nbytes for tensor in (*inputs.tensors, y)) <= _RESIDENT_BYTES
        self.inputs, self.y = (inputs.to(device), y.to(device)) if resident else (inputs, y)
        self.weight = None if weight is None else (weight / weight.mean()).to(device, torch.float32)

    def epoch(self) -> Iterator[Batch]:
        """The batches of one epoch, shuffled by torch's random state."""
        # Copied once: every copy from the host waits for the device.
        for index in torch.randperm(self.n_rows, device="cpu").to(self.y.device).split(self.batch_size):
            weight = None if self.weight is None else self.weight[index.to(self.device)]
            rows = dataclasses.replace(self.inputs, leaves=tuple(self.inputs.rows(index)), n_rows=len(index))
            yield Batch(rows.to(self.device), self.y[index].to(self.device), weight)

    def pass_through(self) -> Iterator[Batch]:
        yield Batch(self.inputs.to(self.device), self.y.to(self.device), self.weight)


class LoadedRows:
    """Rows that a DataLoader of pairs (input, target), or of dicts with labels, reads, for data beyond memory."""

    def __init__(self, loader: DataLoader[Any], net: nn.Module, name: str, device: torch.device) -> None:
        if isinstance(loader.dataset, IterableDataset):
            rule = "be a DataLoader of a dataset with a length, the N of the objective; got an iterable dataset"
            raise ValueError(f"`{name}` must {rule}. Give the dataset __len__ and __getitem__.")
        if loader.batch_sampler is None and not hasattr(loader.sampler, "batch_size"):
            rule = "must gather rows into batches, so that N is the length of its dataset"
            raise ValueError(f"`{name}` {rule}; got batch_size=None. Give the DataLoader a batch size.")
        self.loader, self.net, self.name, self.device = loader, net, name, device
        self.sampler: Any = getattr(loader.batch_sampler, "sampler", loader.sampler)
        self.n_rows = len(self.sampler if isinstance(self.sampler, SubsetRandomSampler) else loader.dataset)  # type: ignore[arg-type]
        self.n_data, self.n_batches = float(self.n_rows), len(loader)
        if not self.n_batches:
            raise ValueError(f"`{name}` must give at least one batch; got none of {self.n_rows} rows.")

    def pass_through(self) -> Iterator[Batch]:
        """All rows once, in an order that follows torch's random state."""
        with _reseed(self.loader.generator, getattr(self.sampler, "generator", None)):
            for batch in self.loader:
                inputs, targets = _validate(self.net, *labelled_batch(self.net, batch, self.name), self.name)
                yield Batch(inputs.to(self.device), targets.to(self.device))

    epoch = pass_through

    @property
    def identity(self) -> Any:
        """What tells these rows from others: every value if they are in memory."""
        dataset = self.loader.dataset
        values = dataset.tensors if isinstance(dataset, TensorDataset) else type(dataset).__qualname__
        kind, chosen = type(self.sampler).__name__, getattr(self.sampler, "indices", None)
        return values, self.n_rows, self.loader.batch_size, self.loader.drop_last, kind, chosen


Rows = TensorRows | LoadedRows


@contextlib.contextmanager
def _reseed(*generators: torch.Generator | None) -> Iterator[None]:
    """Makes the order of the rows follow torch's random state, even if the loader has its own generator."""
    states = [(source, source.get_state()) for source in dict.fromkeys(generators) if source]
    seed = int(torch.randint(2**62, ()))
    for source, _ in states:
        source.manual_seed(seed)
    try:
        yield
    finally:
        for source, state in states:
            source.set_state(state)


def training_rows(
    x: Any, y: Any, *, net: nn.Module, device: torch.device, batch_size: int, sample_weight: Any = None, name: str = "x"
) -> Rows:
    """The validated rows of `x` and `y` in the dtype of `net`, or of a DataLoader of pairs; `name` is that of `x`."""
    if isinstance(x, DataLoader):
        if y is not None or sample_weight is not None:
            remedy = "leave `y` and `sample_weight` out. Repeat or weight rows with the loader's sampler."
            raise TypeError(f"`{name}` is a DataLoader, whose batches hold the targets: {remedy}")
        return LoadedRows(x, net, name, device)
    if y is None:
        raise TypeError(f"`y` must hold the targets unless `{name}` is a DataLoader of pairs; got None.")
    inputs, targets = _validate(net, x, y, name)
    weight = None if sample_weight is None else row_weights(sample_weight, len(targets), like=targets.cpu())
    return TensorRows(inputs, targets, weight, device, batch_size)


def _validate(net: nn.Module, x: Any, y: Any, name: str) -> tuple[Inputs, Tensor]:
    dtype = next((p.dtype for p in net.parameters() if p.is_floating_point()), torch.float32)
    inputs, targets = as_inputs(_as_tensors(x, name, dtype), net), _as_tensors(y, "y", dtype)
    shape = tuple(targets.shape) if isinstance(targets, Tensor) else type(targets).__name__
    if shape[:1] != (inputs.n_rows,):
        raise ValueError(f"`y` must have one entry per row of `{name}`; got shape {shape} for {inputs.n_rows} rows.")
    return inputs, outcomes(targets)


def _as_tensors(x: Any, name: str, dtype: torch.dtype) -> Any:
    """The same structure with arrays as tensors: floating ones in the network's dtype."""
    if isinstance(x, Mapping):
        return {key: _as_tensors(value, name, dtype) for key, value in x.items()}
    are_arguments = isinstance(x, list) and any(isinstance(value, (Tensor, np.ndarray)) for value in x)  # not numbers
    if isinstance(x, tuple) or are_arguments:
        return tuple(_as_tensors(value, name, dtype) for value in x)
    if isinstance(x, Tensor) or not (type(x) is list or hasattr(x, "__array__")):
        return x  # a flag or a number among the arguments
    tensor = to_tensor(x, name=name)
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
