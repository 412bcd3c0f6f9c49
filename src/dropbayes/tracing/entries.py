"""Which row an entry of a tensor belongs to, followed through a pass that sends parts of rows to different places."""

import weakref

import torch
from torch import Tensor

from dropbayes.tracing.operations import Arguments, NamedArguments, Operation, operands


class RowsOfEntries:
    """The row of each entry along a tensor's first axis, or along its axes but the last, since entries were taken."""

    def __init__(self, n_rows: int) -> None:
        self.n_rows = n_rows
        self._known: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}

    def of(self, tensor: Tensor) -> Tensor | None:
        """The rows of a tensor's entries; None if none were taken for it."""
        known, rows = self._known.get(id(tensor), (lambda: None, None))
        return rows if known() is tensor else None

    def follow(self, func: Operation, args: Arguments, kwargs: NamedArguments, results: list[Tensor]) -> None:
        """Notes whose entries an operation has taken, or computed line by line of those that were."""
        given = operands(args)
        if not given or len(results) != 1 or not results[0].dim():
            return
        if func in (Tensor.__getitem__, Tensor.index_select, torch.index_select) and len(given) > 1:
            entries = self._of_all(given[0])
            if entries is not None:  # taken in the same way
                taken = func(entries.expand(given[0].shape), *args[1:], **kwargs)
                self._note(results[0], taken.flatten(0, -2)[:, 0] if taken.dim() > 1 else taken)
            return
        rows = next((rows for one in given if (rows := self.of(one)) is not None), None)
        if rows is not None and len(rows) in (results[0].shape[0], results[0].shape[:-1].numel()):
            self._note(results[0], rows)

    def _note(self, tensor: Tensor, rows: Tensor) -> None:
        self._known[id(tensor)] = weakref.ref(tensor), rows

    def _of_all(self, tensor: Tensor) -> Tensor | None:
        """The rows of all entries, in a shape that expands to the tensor's; None if no axis may hold rows."""
        rows, sizes = self.of(tensor), enumerate(tensor.shape)
        axis = 0 if rows is not None else next((k for k, size in sizes if size and size % self.n_rows == 0), None)
        if axis is None or (rows is not None and len(rows) != len(tensor)):
            return None
        if rows is None:
            rows = torch.arange(self.n_rows, device=tensor.device)
            rows = rows.repeat_interleave(tensor.shape[axis] // self.n_rows)
        return rows.view(-1, *(1,) * (tensor.dim() - axis - 1))
