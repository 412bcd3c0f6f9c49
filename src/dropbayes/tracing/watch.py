"""What the dispatcher sees of a forward pass: unaccounted randomness, memory, writes, and values that Python reads.

Every operation passes the dispatcher, whichever Python function called it. The watch follows through all of them which
tensors depend on the rows of the input and which on a site, so that a branch on such a value is noticed.
"""

from __future__ import annotations

import itertools
import sys
import types
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import PyTree

from dropbayes.tracing.operations import Arguments, NamedArguments, operands

Read = tuple[bool, bool, bool]
"""A value that Python read: whether it depends on a site, on the rows, and whether it is more than true or false."""
Line = tuple[types.CodeType, int]


class SharedWrite(Exception):
    """A pass is about to write into a tensor that it shares with the network; nothing was written."""


class Watch(TorchDispatchMode):
    """Observes every operation at the dispatcher, of an input with `rows` and `whole` tensors beside them.

    None may write into what is `shared`.
    """

    supports_higher_order_operators = True  # to refuse them in its own words

    def __init__(
        self, rows: Iterable[Tensor] = (), shared: Mapping[str, Tensor] | None = None, whole: Iterable[Tensor] = ()
    ) -> None:
        super().__init__()
        self.unaccounted: list[str] = []  # random operations that were not replaced and take no generator
        self.draws_by_generator = 0  # and the numbers that others draw from torch's own
        self._reads = set[Read]()
        self._at_gates = set[Read]()  # and where it asks on which side of a number a single uniform lies
        self._asked = dict[Line, list[tuple[Read, bytes]]]()  # whether, where or how many entries there are, by line
        self.numbers: list[bytes] = []  # that Python read and that depend on the rows
        self.written: set[int] = set()  # the memory that operations wrote to, by address
        self.writes_input = False
        self.has_dynamic_shapes = False  # a shape depends on values of the rows or of a site
        self.selects_parts = False  # and entries are then taken from an axis of several: of a row, some of its parts
        self.reorders = False  # entries are taken or put by indices that depend on values: rows may be sorted
        self.ranked: list[tuple[str, int]] = []  # how values along axes of such lengths are sorted, added up, or paired
        self.peak_bytes = self.peak_suffix_bytes = self._total = self._suffix_total = 0
        self._rows = _memory(rows)
        self._inputs = {*self._rows, *map(storage, whole)} - {0}
        self._shared = {key: name for name, tensor in (shared or {}).items() if (key := storage(tensor))}
        self._rowed, self._drawn = dict(self._rows), dict[int, StorageWeakRef]()
        self._counts = dict[int, StorageWeakRef]()  # tensors that say whether, where or how many entries there are
        self._sized_drawn = dict[int, StorageWeakRef]()  # and those whose length depends on a site,
        self._sized_rowed = dict[int, StorageWeakRef]()  # or on the rows
        self._parts = dict[int, StorageWeakRef]()  # or that are computed of such, but for where they are put
        self._gates = dict[int, StorageWeakRef]()  # tensors that say on which side of a number a single uniform lies
        self._empty = False, False  # whether an empty one, which has no memory, depends on a site, on the rows
        self._after_site = False
        self._seed = 0  # of torch's generator when the pass began
        # Views of parameters, buffers and inputs take no memory.
        self._live: dict[int, tuple[int, bool, Any]] = dict.fromkeys((*self._rows, *self._shared), (0, False, None))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # with True, torch would load its compiler, which takes seconds

    def __enter__(self) -> Watch:
        self._seed = torch.default_generator.initial_seed()
        super().__enter__()
        return self

    def is_seeded(self) -> bool:
        """Whether torch's generator was seeded since the pass began: its numbers are the same in every pass."""
        return torch.default_generator.initial_seed() != self._seed

    def mark_drawn(self, tensors: Iterable[Tensor]) -> None:
        """Notes the results of a site."""
        self._after_site = True
        self._drawn |= _memory(tensors)

    def unmark(self, tensor: Tensor) -> None:
        """Notes a tensor that is the same under every draw, whatever it was computed from."""
        self._drawn.pop(storage(tensor), None)

    def mark_gate(self, tensor: Tensor) -> None:
        """Notes the comparison of a single uniform with a number."""
        self._gates |= _memory([tensor])

    def holds_parts(self, tensor: Tensor) -> bool:
        """Whether a tensor may hold some of the parts of the rows only: those that were sent somewhere."""
        return _marks({storage(tensor)}, self._parts)

    def note_read(self, tensor: Any, *, number: bool) -> None:
        """Notes that Python read the values of a tensor."""
        key = storage(tensor) if isinstance(tensor, Tensor) else 0
        drawn, rowed = _marks({key}, self._drawn), _marks({key}, self._rowed)
        if not (drawn or rowed):
            return
        if _marks({key}, self._gates) and not rowed:
            self._at_gates.add((True, False, False))
            return
        flat = tensor.detach().cpu().clone(memory_format=torch.contiguous_format).view(-1)
        value, read = flat.view(torch.uint8).numpy().tobytes(), (drawn, rowed, number)
        self.numbers += [value] if number else []
        if _marks({key}, self._counts):
            self._asked.setdefault(_line(), []).append((read, value))
        else:
            self._reads.add(read)

    def note_length(self, tensor: Tensor) -> None:
        """Notes that Python read the lengths of a tensor, which are values where they depend on some."""
        # Of rows that are sent to experts, only whether there are any is asked: draws run apart, rows need not.
        kinds, depends = ((True, False, False), (False, True, False)), self._sized(tensor)
        for read in itertools.compress(kinds, depends if tensor.numel() else self._empty):
            self._asked.setdefault(_line(), []).append((read, str(tuple(tensor.shape)).encode()))

    def _sized(self, *tensors: Any) -> tuple[bool, bool]:
        """Whether the length of one of the tensors depends on a site, and on the rows."""
        keys = {storage(tensor) for tensor in tensors if isinstance(tensor, Tensor)}
        return _marks(keys, self._sized_drawn), _marks(keys, self._sized_rowed)

    @property
    def reads(self) -> set[Read]:
        """What Python read that depends on a site or on the rows."""
        return self._reads.union(self._at_gates, (read for answers in self._asked.values() for read, _ in answers))

    @property
    def asks(self) -> bool:
        """Whether Python read counts in a pass that sends rows elsewhere."""
        return self.sends_rows and bool(self._asked)

    @property
    def sends_rows(self) -> bool:
        """Whether rows are sent to places: some are selected by values, or sorted and counted."""
        return self.has_dynamic_shapes or (bool(self._asked) and any(how == "sort" for how, _ in self.ranked))

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Arguments = (), kwargs: NamedArguments | None = None
    ) -> PyTree:
        if not isinstance(func, OpOverload):  # torch.cond and its like, whose operations pass by
            remedy = "scaled_dot_product_attention" if "attention" in str(func) else "`if` or `for`"
            raise NotImplementedError(f"`net` must not call {func}, which hides its operations. Use {remedy}.")
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        given = {key for tensor in operands((*args, *kwargs.values())) if (key := storage(tensor))}
        tags, by_generator = func.tags, False
        is_random = torch.Tag.nondeterministic_seeded in tags and _draws(func, args, kwargs)
        if is_random and kwargs.get("generator") is None and not self.is_seeded():
            func = _with_generator(func)
            if any(argument.name == "generator" for argument in func._schema.arguments):
                device = next((tensor.device for tensor in operands(args)), kwargs.get("device") or torch.device("cpu"))
                by_generator = device.type == "cpu"
                kwargs = {**kwargs, "generator": torch.Generator(device)}  # torch's own, which is the user's, stays
            if kwargs.get("generator") is None or kwargs["generator"].device.type != "cpu":  # which alone is keyed
                self.unaccounted.append(func.overloadpacket.__name__)
        drawn, rowed = _marks(given, self._drawn), _marks(given, self._rowed)
        if torch.Tag.data_dependent_output in tags and args:
            self.note_read(args[0], number=name != "equal" and args[0].dtype != torch.bool)
        sized, length = self._sized(*args[:1]), (False, False)
        if torch.Tag.dynamic_output_shape in tags and _selects(func, args):  # of what a mask selects, by that alone
            by = set(map(storage, operands(args[1:]))) if name in ("index", "masked_select") else given
            length = _marks(by, self._drawn), _marks(by, self._rowed)
        self.has_dynamic_shapes |= any(length)
        sized = sized[0] or length[0], sized[1] or length[1]
        is_count = name in ("any", "count_nonzero", "nonzero") or (
            name == "sum" and args[0].dtype in (torch.bool, torch.int64)
        )
        is_count |= bool(given) and all(_marks({key}, self._counts) for key in given)
        puts = ("index_put", "index_add", "index_copy", "scatter")
        is_part = any(sized) or (_marks(given, self._parts) and not any(word in name for word in puts))
        self.selects_parts |= self.has_dynamic_shapes and _takes_parts(func, args)
        if (drawn or rowed) and any(word in name for word in ("index", "gather", "scatter", "take")):
            indices = {storage(index) for index in operands(args[1:]) if index.dtype == torch.int64}
            known = self._drawn | self._rowed
            # Of a length that depends on values, they send some of the rows elsewhere, which is seen by that.
            by_value = bool(indices) and all(_marks({index}, known) for index in indices)
            by_value &= not _marks(indices, self._sized_drawn | self._sized_rowed)
            self.reorders |= by_value and _marks(given - indices, known)
        if rowed and name in ("cumprod", "cumsum", "sort", "topk") and args[0].dim():
            self.ranked.append((name, args[0].shape[_named(func, args, kwargs)["dim"]]))
        if name in ("mm", "_cdist_forward", "_euclidean_dist") and all(storage(t) in self._rowed for t in args[:2]):
            self.ranked.append((name, args[1].shape[-1 if name == "mm" else -2]))
        if func._schema.is_mutable:
            written = _written(func, args, kwargs)
            for key in written & self._shared.keys():
                raise SharedWrite(self._shared[key])
            self.written |= written
            self.writes_input |= bool(written & self._inputs)
        if args and isinstance(args[0], Tensor) and args[0].is_cuda:
            check_indices(name, args)
        result = func(*args, **kwargs)
        for tensor in operands(result if isinstance(result, (tuple, list)) else (result,)):
            self.draws_by_generator += tensor.numel() if by_generator else 0
            of_length = sized if tensor.dim() else (False, False)
            self._hold(tensor, given, (drawn, rowed, is_count, is_part, *of_length))
        if name == "_pack_padded_sequence" and not _marks({storage(args[1])}, self._drawn):
            self.unmark(result[1])  # the number of sequences at each step depends on their lengths alone
        return result

    def _hold(self, tensor: Tensor, given: set[int], marks: tuple[bool, bool, bool, bool, bool, bool]) -> None:
        if not (key := storage(tensor)):
            self._empty = marks[4:] if any(marks[4:]) else self._empty
            return
        kinds = (self._drawn, self._rowed, self._counts, self._parts, self._sized_drawn, self._sized_rowed)
        for depends, keys in zip(marks, kinds, strict=True):
            if depends:
                keys[key] = StorageWeakRef(tensor.untyped_storage())
            elif key not in given:  # new memory, perhaps at the address of a tensor that is gone
                keys.pop(key, None)
        if key in self._live:
            return
        size = tensor.untyped_storage().nbytes()
        self._live[key] = size, self._after_site, weakref.ref(tensor, lambda _: self._free(key))
        self._total += size
        self._suffix_total += size if self._after_site else 0
        self.peak_bytes = max(self.peak_bytes, self._total)
        self.peak_suffix_bytes = max(self.peak_suffix_bytes, self._suffix_total)

    def _free(self, key: int) -> None:
        size, in_suffix, _ = self._live.pop(key, (0, False, None))
        self._total -= size
        self._suffix_total -= size if in_suffix else 0


def reads_of(batch: Watch, *others: Watch, counts: bool = True, gates: bool = True) -> set[Read]:
    """What Python reads in passes of a batch, and of other batches and rows with the outputs that they have in it.

    Where rows are sent to experts, a line of code that reads other counts there asks which experts have any: rows need
    not run apart for it, nor draws if those that are sent can be followed. On request, without such `counts`, and
    without the sides on which numbers of `gates` lie.
    """
    found = set[Read]().union(*(watch._reads | (watch._at_gates if gates else set()) for watch in (batch, *others)))
    for line in {line for watch in (batch, *others) for line in watch._asked}:
        answers = [watch._asked.get(line, []) for watch in (batch, *others)]
        kinds = {read for answer in answers for read, _ in answer}
        if batch.asks and any([v for _, v in one] != [v for _, v in answers[0]] for one in answers[1:]):
            parts = {part for drawn, rowed, _ in kinds for part in ((drawn, False, False), (False, rowed, False))}
            kinds = parts if counts else set()
        found |= kinds - {(False, False, False)}
    return found


def _line() -> Line:
    """The line of the network that is running."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("dropbayes", "torch"):
        frame = frame.f_back
    return frame.f_code, frame.f_lineno


def _marks(given: set[int], keys: dict[int, StorageWeakRef]) -> bool:
    """Whether memory that was marked is among `given`: not another tensor's, at the address of one that is gone."""
    return any(not keys[key].expired() for key in given if key in keys)


def _with_generator(func: OpOverload) -> OpOverload:
    """The form of an operation that takes a generator, if there is one: of rand, randn, randint and randperm."""
    name = "generator" if func._overloadname == "default" else f"{func._overloadname}_generator"
    return cast(OpOverload, getattr(func.overloadpacket, name, func))


def storage(tensor: Tensor) -> int:
    """The address of a tensor's memory; 0 for one that has none of its own: sparse, nested, on the meta device."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


def _memory(tensors: Iterable[Tensor]) -> dict[int, StorageWeakRef]:
    """The memory of tensors by address."""
    return {key: StorageWeakRef(tensor.untyped_storage()) for tensor in tensors if (key := storage(tensor))}


def _named(func: OpOverload, args: Arguments, kwargs: NamedArguments) -> dict[str, Any]:
    """The arguments of an operation by name, with its defaults."""
    arguments = func._schema.arguments
    named = {a.name: a.default_value for a in arguments if a.has_default_value()}
    return named | {a.name: value for a, value in zip(arguments, args, strict=False)} | kwargs


def _written(func: OpOverload, args: Arguments, kwargs: NamedArguments) -> set[int]:
    """The memory that an operation writes to."""
    named = _named(func, args, kwargs)
    targets = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return {key for tensor in operands(named.get(name) for name in targets) if (key := storage(tensor))}


def _selects(func: OpOverload, args: Arguments) -> bool:
    """Whether the shape of the result depends on values: not if elements are taken by their number."""
    by_index = func.overloadpacket.__name__ == "index"
    return not by_index or any(isinstance(one, Tensor) and one.dtype in (torch.bool, torch.uint8) for one in args[1])


def _takes_parts(func: OpOverload, args: Arguments) -> bool:
    """Whether an operation takes entries, by tensors, of axes that have several; by a mask, of all its axes."""
    index = args[1][0] if func is torch.ops.aten.index.Tensor else None
    n_axes = index.dim() if index is not None and index.dtype in (torch.bool, torch.uint8) else 1
    n_axes = max(n_axes, len(args[1])) if index is not None else n_axes  # rows and tokens, each by a tensor
    return (index is not None or func is torch.ops.aten.index_select.default) and args[0].shape[:n_axes].numel() > 1


def check_indices(name: str, args: Arguments) -> None:
    """Raises, as on a CPU, for an index out of range: on a GPU, that would end its use by the whole process."""
    indices, axis = list[tuple[Tensor, int]](), 0  # with the length of the axis that each is for
    of_axes = name in ("index", "index_put", "index_put_", "_index_put_impl_")
    if of_axes:
        for index in args[1]:
            is_mask = index is not None and index.dtype in (torch.bool, torch.uint8)
            indices += [] if index is None or is_mask else [(index, args[0].shape[axis])]
            axis += index.dim() if is_mask else 1
    elif name in ("embedding", "_embedding_bag", "_embedding_bag_forward_only"):
        indices = [(args[1], args[0].shape[0])]
        bags = [0] if name == "embedding" else args[2].tolist()  # where each begins
        if bags[:1] != [0] or [*bags, len(args[1])] != sorted([*bags, len(args[1])]):
            raise IndexError(f"bags of {len(args[1])} entries must begin at 0 and follow each other; got {bags[:4]}")
    elif name.startswith(("gather", "scatter", "index_")) and isinstance(args[1], int):  # along that axis
        indices = [(args[2], args[0].shape[args[1]])]
    for index, size in indices:
        least, most = (int(index.min()), int(index.max())) if index.numel() else (0, -1)
        from_end = of_axes or name.startswith("index_fill")  # negative ones are counted
        if least < (-size if from_end else 0) or most >= size:
            raise IndexError(f"indices from {least} to {most} are out of range for an axis of length {size}")


def _draws(func: OpOverload, args: Arguments, kwargs: NamedArguments) -> bool:
    """Whether an operation that may be random is random with these arguments."""
    named = _named(func, args, kwargs)
    switches = [named.get(name) for name in ("train", "training", "dropout_p", "dropout", "p")]
    return not any(isinstance(value, (int, float)) and value == 0 for value in switches)
