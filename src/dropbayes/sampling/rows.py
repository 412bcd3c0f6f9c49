"""Rows as a batch: the axis that holds them, and the check that a row does not depend on the others."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from dropbayes.sampling.anatomy import RowLayout, Site
from dropbayes.sampling.generators import unchanged_generators
from dropbayes.sampling.looks import Flags, Look, LookFailed, equal_but_for_rounding, flags_down, look
from dropbayes.sampling.trees import Inputs, cloned_leaves, split
from dropbayes.sampling.views import eagerly

SEVERAL = 3  # the rows of a look that compares shapes
_WITNESS_BYTES = 256 * 2**20  # only the first rows of a batch that needs more memory are checked
_WITNESS_ROWS = 16


def look_at_several_rows(
    net: nn.Module, inputs: Inputs, flags: Flags, leave_out: tuple[str, ...], chosen: Look
) -> Look | None:
    """A look at several rows as one batch; None if the network takes one row at a time."""
    if inputs.is_one_row:
        return None
    index = [row % inputs.n_rows for row in range(SEVERAL)]
    try:
        return look(net, inputs, inputs.rows(index), flags, leave_out, honours=chosen.recorder.honours_flags)
    except LookFailed as failed:
        if isinstance(failed.error, NotImplementedError):
            raise failed.error from None
        return None


def _layout(one: tuple[int, ...], several: tuple[int, ...]) -> RowLayout | str | None:
    """The layout of rows, from the shapes for one row and for several; None without rows, a reason if there is none."""
    if len(one) != len(several):
        return "another number of axes"
    grown = [axis for axis, (a, b) in enumerate(zip(one, several, strict=True)) if a != b]
    if not grown:
        return None
    if len(grown) > 1 or several[grown[0]] != SEVERAL * one[grown[0]]:
        return "more than one axis" if len(grown) > 1 else "not in proportion"
    return RowLayout(grown[0], one[grown[0]])


def site_layouts(inputs: Inputs, chosen: Look, several: Look | None) -> tuple[tuple[Site, ...], bool]:
    recorded = chosen.recorder.sites
    if inputs.is_one_row:
        return tuple(recorded), True
    if several is None or len(several.recorder.sites) != len(recorded):
        return tuple(recorded), False
    layouts = [_layout(a.shape, b.shape) for a, b in zip(recorded, several.recorder.sites, strict=True)]
    together = not any(isinstance(layout, str) for layout in layouts)
    pairs = zip(recorded, layouts, strict=True)
    return tuple(replace(s, layout=None if isinstance(y, str) else y) for s, y in pairs), together


def output_layouts(inputs: Inputs, plain: Look, several: Look | None) -> tuple[RowLayout | None, ...]:
    if inputs.is_one_row:
        return (None,) * len(plain.tensors)
    if several is None or len(several.tensors) != len(plain.tensors):
        return tuple(RowLayout(0, 1) if t.shape[:1] == (1,) else None for t in plain.tensors)
    layouts = []
    for one, more in zip(plain.tensors, several.tensors, strict=True):
        layout = _layout(tuple(one.shape), tuple(more.shape))
        if isinstance(layout, str):
            raise ValueError(
                f"`net` gives an output of shape {tuple(one.shape)} for one row, {tuple(more.shape)} for {SEVERAL}: "
                "its rows depend on each other. Pass row_axis=None to take the whole input as one row."
            )
        layouts.append(layout)
    return tuple(layouts)


def check_single_row(net: nn.Module, inputs: Inputs, failed: LookFailed, leave_out: tuple[str, ...]) -> None:
    """Raises on a network that takes the batch but `failed` on a single row of it."""
    is_vector = len(inputs.leaves) == 1 and inputs.leaves[0].dim() == 1  # one row, which lacks its row axis
    if inputs.n_rows == 1 or is_vector:
        return
    try:
        look(net, inputs, list(inputs.leaves), flags_down, leave_out)
    except LookFailed:
        return
    raise ValueError(
        f"`net` takes the batch of {inputs.n_rows} rows but fails on a single one ({_first_line(failed)}): its rows "
        f"depend on each other. {_whole_arguments(inputs)}Pass row_axis=None to take the whole input as one row."
    ) from failed.error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def check_rows(
    net: nn.Module, inputs: Inputs, plain: Look, outputs: tuple[RowLayout | None, ...], leave_out: tuple[str, ...]
) -> None:
    """Raises on a network whose rows alone, evaluated by a view, differ from the network's own batch."""
    n_rows = inputs.n_rows
    if plain.moved or (inputs.is_one_row and (plain.recorder.sites or plain.view.changes())):
        return  # the host's generators, or masks that cannot be left out, differ between the two runs
    if n_rows * max(plain.watch.peak_bytes, _bytes_of(plain.tensors)) > _WITNESS_BYTES:
        n_rows = min(n_rows, _WITNESS_ROWS)
    leaves = list(inputs.leaves) if n_rows == inputs.n_rows else inputs.rows(range(n_rows))
    reference = _reference(net, inputs, leaves, plain, leave_out)
    for row in {0, n_rows - 1}:
        alone = plain.tensors if row == 0 else look(net, inputs, inputs.rows([row]), flags_down, leave_out).tensors
        for whole, expected, layout in zip(reference, alone, outputs, strict=True):
            actual = _row_of(whole, layout, row, n_rows)
            if actual is None or not equal_but_for_rounding(actual, expected, whole):
                if actual is not None and _agrees_in_double(net, inputs, leaves, outputs, row, n_rows):
                    continue  # a small difference of large numbers
                _refuse_dependence(inputs, whole, expected, row)


def _agrees_in_double(
    net: nn.Module, inputs: Inputs, leaves: list[Any], outputs: tuple[RowLayout | None, ...], row: int, n_rows: int
) -> bool:
    """Whether a row alone agrees with its batch in double precision."""

    def double(leaf: Any) -> Any:
        return leaf.double() if isinstance(leaf, Tensor) and leaf.dtype == torch.float32 else leaf

    try:
        exact = copy.deepcopy(net).double()
        batch = look(exact, inputs, [double(leaf) for leaf in leaves], flags_down, ()).tensors
        alone = look(exact, inputs, [double(leaf) for leaf in inputs.rows([row])], flags_down, ()).tensors
    except Exception:  # the network supports one precision only
        return False
    rows = [_row_of(whole, layout, row, n_rows) for whole, layout in zip(batch, outputs, strict=True)]
    return all(
        actual is not None and equal_but_for_rounding(actual, expected, whole)
        for actual, expected, whole in zip(rows, alone, batch, strict=True)
    )


def _bytes_of(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _reference(
    net: nn.Module, inputs: Inputs, leaves: list[Any], plain: Look, leave_out: tuple[str, ...]
) -> list[Tensor]:
    """The batch in evaluation: by the network itself if it is in that mode and a call does not change it."""
    itself = not (plain.recorder.sites or plain.moved or plain.view.changes() or plain.recorder.sites_left_out)
    if itself and not any(module.training for module in net.modules()):
        leaves = cloned_leaves(leaves)
        with unchanged_generators():
            return split(eagerly(inputs.call)(net, leaves))[0]
    try:
        return look(net, inputs, leaves, flags_down, leave_out).tensors
    except LookFailed as failed:
        raise failed.error from None


def _row_of(whole: Tensor, layout: RowLayout | None, row: int, n_rows: int) -> Tensor | None:
    if layout is None:
        return whole
    if whole.dim() <= layout.axis or whole.shape[layout.axis] != n_rows * layout.inner:
        return None
    return whole.narrow(layout.axis, row * layout.inner, layout.inner)


def _refuse_dependence(inputs: Inputs, whole: Tensor, alone: Tensor, row: int) -> None:
    raise ValueError(
        f"`net` gives row {row} another output alone (shape {tuple(alone.shape)}) than in its batch (shape "
        f"{tuple(whole.shape)}) in evaluation mode: its rows depend on each other, or a forward or hook was patched. "
        f"{_whole_arguments(inputs)}Pass row_axis=None to take the whole input as one row."
    )


def _whole_arguments(inputs: Inputs) -> str:
    """The remedy for an argument that was cut into rows by mistake, if there are several."""
    if sum(axis is not None for axis in inputs.axes) < 2:
        return ""
    return (
        "An argument whose length happens to be the number of rows may have been cut into rows: say which arguments "
        'have rows, as in row_axis={"x": 0, "positions": None}. '
    )
