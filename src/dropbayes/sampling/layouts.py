"""The layout of rows: the axis of a site's tensor or of an output that holds them, found by comparing two probes."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from dropbayes.sampling.inputs import Inputs
from dropbayes.sampling.probes import Probe, RowsDepend, rows_depend
from dropbayes.tracing import RowLayout, Site

Layouts = tuple[RowLayout | None, ...]  # of each tensor of an output


def site_names(probe: Probe) -> list[str]:
    """The names of the sites that a probe met, in order."""
    return [site.name for site in probe.recorder.sites]


def _layout(one: Sequence[int], several: Sequence[int], n_rows: int) -> RowLayout | str | None:
    """The layout of rows, from the shapes for one row and for several; None without rows, a reason if there is none."""
    if len(one) != len(several):
        return "another number of axes"
    grown = [axis for axis, (a, b) in enumerate(zip(one, several, strict=True)) if a != b]
    if not grown:
        return None
    if len(grown) > 1:
        return "more than one axis"
    axis = grown[0]
    if several[axis] != n_rows * one[axis]:
        # Some of the rows, each with one entry: a row may be sent elsewhere.
        return RowLayout(axis, 0) if one[axis] <= 1 else "not in proportion"
    return RowLayout(axis, one[axis])


def _layout_of_steps(one: Sequence[int], several: Sequence[int], n_rows: int) -> RowLayout | None:
    """The layout of sequences of several lengths, `[step, row, ...]`: a shorter one has the first steps' masks."""
    steps_first = len(one) == len(several) and several[0] >= one[0] and tuple(several[2:]) == tuple(one[2:])
    return RowLayout(1, one[1]) if steps_first and several[1] == n_rows * one[1] else None


def site_layouts(alone: Probe, batch: Probe, n_rows: int) -> tuple[tuple[Site, ...], bool]:
    """The sites with their layouts, and whether all of them have one: several rows can then be one batch."""
    by_name = {site.name: site for site in alone.recorder.sites}
    sites, together = [], True
    for site in batch.recorder.sites:
        one = by_name.pop(site.name, None)
        # A site that the first row does not meet has one entry for each row that does.
        shape = site.shape if one is None else one.shape
        layout = RowLayout(0, 0) if one is None and site.shape else _layout(shape, site.shape, n_rows)
        if site.kind == "recurrent" and isinstance(layout, str):
            layout = _layout_of_steps(shape, site.shape, n_rows) or layout
        together &= not isinstance(layout, str)
        found = None if isinstance(layout, str) else layout
        sites.append(replace(site, shape=shape, layout=found, before=site.before or (one.before if one else None)))
    return tuple(replace(site, index=i) for i, site in enumerate(sites)), together and not by_name


def output_layouts(alone: Probe, batch: Probe, n_rows: int) -> Layouts:
    """The layout of each tensor of the output; raises if there is none, since the rows then depend on each other."""
    if len(alone.tensors) != len(batch.tensors):
        raise rows_depend(f"gives {len(alone.tensors)} tensors for one row and {len(batch.tensors)} for {n_rows}")
    layouts = []
    for one, more in zip(alone.tensors, batch.tensors, strict=True):
        layout = _layout(one.shape, more.shape, n_rows)
        if isinstance(layout, str) or (layout is not None and not layout.inner):
            squeezed = any(more.select(axis, 0).shape == one.shape for axis in range(more.dim()))
            squeeze = "it squeezes the row axis of a single row. Name the axis, as in squeeze(-1)."
            rule = f"gives an output of shape {tuple(one.shape)} for one row, {tuple(more.shape)} for {n_rows}"
            raise RowsDepend(f"`net` {rule}: {squeeze}") if squeezed else rows_depend(rule)
        layouts.append(layout)
    return tuple(layouts)


def row_of(whole: Tensor, layout: RowLayout | None, row: int, n_rows: int) -> Tensor | None:
    """The output of one row in that of a batch; None if the batch's has another form."""
    if layout is None:
        return whole
    if whole.dim() <= layout.axis or whole.shape[layout.axis] != n_rows * layout.inner:
        return None
    return whole.narrow(layout.axis, row * layout.inner, layout.inner)


def whole_arguments(inputs: Inputs) -> str:
    """The remedy for an argument that was cut into rows by mistake, if there are several."""
    if sum(axis is not None for axis in inputs.axes) < 2:
        return ""
    return (
        "An argument whose length happens to be the number of rows may have been cut into rows: say which arguments "
        'have rows, as in row_axis={"x": 0, "positions": None}. '
    )
