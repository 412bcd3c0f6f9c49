"""Which row an entry of a tensor belongs to, followed through a pass that sends rows, or parts of them, to places."""

import itertools
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dropbayes.tracing.operations import Arguments, NamedArguments, Operation, operands

Call = tuple[Operation, Arguments, NamedArguments]


@dataclass(frozen=True, eq=False)
class Entries:
    """What is known of the entries of a tensor that depends on the rows."""

    rows: Tensor | None  # of each entry along the first axis, or along all axes but the last, if it has been moved


IN_ORDER, UNKNOWN = Entries(None), Entries(None)


class RowsOfEntries:
    """The rows of the entries of all tensors that are computed of `inputs`, which hold the rows in order."""

    def __init__(self, n_rows: int, inputs: Iterable[Tensor]) -> None:
        self.n_rows = n_rows
        self._known: dict[int, tuple[weakref.ref[Tensor], Entries]] = {}
        for tensor in inputs:
            self._note(tensor, IN_ORDER)

    def are_in_order(self, tensor: Tensor) -> bool:
        """Whether a tensor has the rows as the inputs have them, along whichever axis."""
        return self._entries(tensor) is IN_ORDER

    def of(self, tensor: Tensor) -> Tensor | None:
        """The rows of a tensor's entries along its first axis; None if they are not known."""
        entries = self._entries(tensor)
        if entries is IN_ORDER:
            return self._in_order(tensor, 0) if tensor.dim() else None
        rows = None if entries is None else entries.rows
        if rows is None or not tensor.dim() or (len(rows) != len(tensor) and len(rows) % max(1, len(tensor))):
            return None
        lines = rows.view(len(tensor), -1) if len(rows) else rows[:, None]
        return lines[:, 0] if bool((lines == lines[:, :1]).all()) else None

    def follow(self, func: Operation, args: Arguments, kwargs: NamedArguments, results: list[Tensor]) -> None:
        """Notes whose entries an operation has taken or put, or computed line by line."""
        given = operands((*args, *kwargs.values()))
        name = getattr(func, "__name__", "").partition(".")[0].strip("_")  # of an operator, without its overload
        if not any(self._entries(tensor) for tensor in given) or name.startswith("new_") or name.endswith("_like"):
            return
        if name in ("nonzero", "argwhere") or (name == "where" and len(given) == 1):  # places are no entries
            return
        if name == "getitem" and self._entries(given[0]) is None and given[-1].dtype == torch.bool:
            return  # of a tensor without rows
        try:
            found = self._found(name, (func, args, kwargs), given, results)
        except (RuntimeError, TypeError, IndexError):  # rows cannot stand in the place of its tensor
            found = [UNKNOWN] * len(results)
            self._note(given[0], UNKNOWN)
        for result, entries in zip(results, found, strict=True):
            self._note(result, entries)

    def _found(self, name: str, call: Call, given: list[Tensor], results: list[Tensor]) -> list[Entries]:
        """The entries of the results of an operation on given tensors."""
        (func, args, kwargs), first = call, self._entries(given[0])
        rows = None if first is None else first.rows
        match name:
            case "setitem" | "index_put" | "index_add" | "index_copy" | "scatter" | "scatter_add" | "masked_scatter":
                target = self._put(name, args, kwargs)
                self._note(given[0], target)
                return [target] * len(results)
            case "getitem" | "index" | "index_select" | "gather" | "take_along_dim" if first is not None:
                in_place = len(given) == 1 and first is IN_ORDER  # a slice of all rows
                return [IN_ORDER if in_place else self._taken(func, args, kwargs)]
            case "split" | "split_with_sizes" | "chunk" if rows is not None and len(rows) == sum(map(len, results)):
                ends = itertools.accumulate(map(len, results))
                return [Entries(rows[end - len(part) : end]) for part, end in zip(results, ends, strict=True)]
            case "cat" | "concat":
                parts = [part for tensor in given if (part := self.of(tensor)) is not None]
                if len(parts) == len(given) and sum(map(len, parts)) == len(results[0]):
                    return [self._moved(torch.cat(parts), results[0])]
            case "sort" | "argsort" | "flip" | "topk" | "roll" if _is_first_axis(name, args, kwargs):
                taken, known_by = self.of(given[0]), name in ("sort", "topk") and given[0].dim() == 1
                values = Entries(taken[results[1]]) if taken is not None and known_by else UNKNOWN
                return [values, *[UNKNOWN] * (len(results) - 1)]
            case "mm" | "matmul" | "einsum" if all(tensor.dim() == 2 for tensor in given):
                if sum(self._entries(tensor) is not None for tensor in given) > 1:
                    return [UNKNOWN]  # rows may be moved by a matrix
            case "unique" | "masked_select":
                return [UNKNOWN] * len(results)
        return [self._line_by_line(given, result) for result in results]

    def _entries(self, tensor: Tensor) -> Entries | None:
        reference, entries = self._known.get(id(tensor), (lambda: None, None))
        return entries if reference() is tensor else None

    def _note(self, tensor: Tensor, entries: Entries) -> None:
        self._known[id(tensor)] = weakref.ref(tensor), entries

    def _in_order(self, tensor: Tensor, axis: int) -> Tensor | None:
        """The rows along an axis that holds all of them in order; None if it cannot."""
        per_row, rest = divmod(tensor.shape[axis], self.n_rows)
        if rest or not (per_row or axis == 0):  # of no entries, as those of an expert without any
            return None
        return torch.arange(self.n_rows, device=tensor.device).repeat_interleave(per_row)

    def _moved(self, rows: Tensor, tensor: Tensor) -> Entries:
        """Entries of these rows, which may have come to be in order."""
        in_order = self._in_order(rows, 0) if len(tensor) % self.n_rows == 0 else None
        return IN_ORDER if in_order is not None and torch.equal(rows, in_order) else Entries(rows)

    def _of_elements(self, tensor: Tensor) -> Tensor | None:
        """The row of each element of a tensor, in order if nothing else is known; None if they are unknown."""
        known = self._entries(tensor) or IN_ORDER
        if known.rows is not None:
            leading = 1 if len(known.rows) == len(tensor) else tensor.dim() - 1
            return known.rows.view(*tensor.shape[:leading], *(1,) * (tensor.dim() - leading)).expand(tensor.shape)
        axis = next((k for k, size in enumerate(tensor.shape) if size and size % self.n_rows == 0), None)
        if known is UNKNOWN or axis is None or (rows := self._in_order(tensor, axis)) is None:
            return None
        return rows.view(-1, *(1,) * (tensor.dim() - axis - 1)).expand(tensor.shape)

    def _read_off(self, elements: Tensor) -> Entries:
        """The entries of a tensor whose elements are of these rows."""
        n_lines = elements.shape[: max(1, elements.dim() - 1)].numel()
        lines = elements.reshape(n_lines, -1) if elements.numel() else elements.flatten()[:, None]
        same = elements.dim() > 0 and bool((lines == lines[:, :1]).all())
        return self._moved(lines[:, 0], elements) if same else UNKNOWN

    def _taken(self, func: Operation, args: Arguments, kwargs: NamedArguments) -> Entries:
        """The entries that an operation takes of its tensor: those that it takes of their rows."""
        rows = self._of_elements(args[0])
        kwargs = {name: value for name, value in kwargs.items() if name != "out"}  # which is the network's
        return UNKNOWN if rows is None else self._read_off(func(rows, *args[1:], **kwargs))

    def _put(self, name: str, args: Arguments, kwargs: NamedArguments) -> Entries:
        """The entries of a tensor into which others are put: their rows are put likewise."""
        place = 2 if name in ("setitem", "index_put", "masked_scatter") else 3
        values = args[place] if len(args) > place else next(iter(kwargs.values()), None)
        rows, known = self._of_elements(args[0]), self._entries(args[0])
        if not torch.is_tensor(values) or not values.dim() or self._entries(values) is None:
            return known or (UNKNOWN if rows is None else IN_ORDER)
        if rows is None or (new := self._of_elements(values)) is None:
            return UNKNOWN
        put = {"index_add": "index_copy", "scatter_add": "scatter", "setitem": "__setitem__"}.get(name, name)
        rows = rows.clone()
        result = getattr(rows, put)(*args[1:place], new)
        return self._read_off(rows if result is None else result)

    def _line_by_line(self, given: list[Tensor], result: Tensor) -> Entries:
        """The entries of a result that is computed of these line by line; unknown where they have different rows."""
        known = [(tensor, entries) for tensor in given if (entries := self._entries(tensor)) is not None]
        moved = [entries.rows for _, entries in known if entries.rows is not None]
        still = [(tensor, entries) for tensor, entries in known if entries.rows is None]
        beside = [(tensor, e) for tensor, e in still if tensor.dim() and _has_lines(len(tensor), result)]
        if fitting := [rows for rows in moved if _has_lines(len(rows), result)]:
            others = [*fitting, *(self.of(tensor) for tensor, _ in beside)]
            same = all(rows is not None and torch.equal(rows, fitting[0]) for rows in others)
            return Entries(fitting[0]) if same else UNKNOWN
        return UNKNOWN if moved or UNKNOWN in [entries for _, entries in beside or still] else IN_ORDER


def place_among_own(rows: Tensor, n_rows: int) -> tuple[Tensor, int]:
    """The place of each entry among those of its row, and the most entries of a row."""
    counts = rows.bincount(minlength=n_rows)
    return rows.argsort(stable=True).argsort() - (counts.cumsum(0) - counts)[rows], int(counts.max())


def _has_lines(count: int, result: Tensor) -> bool:
    """Whether a result has so many lines: along its first axis, or along all axes but the last."""
    return result.dim() > 0 and count in (len(result), result.shape[:-1].numel())


def _is_first_axis(name: str, args: Arguments, kwargs: NamedArguments) -> bool:
    """Whether an operation may put entries along the first axis of a tensor in another order."""
    tensor, n_before = args[0], 2 if name in ("topk", "roll") else 1
    axes = tree_leaves((*args[n_before:], kwargs.get("dim"), kwargs.get("dims")))
    return tensor.dim() < 2 or 0 in axes or -tensor.dim() in axes
