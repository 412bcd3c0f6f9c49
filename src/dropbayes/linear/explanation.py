r"""Why is the network unsure? The shares of the epistemic variance: of sites, units, positions and input features.

The linear method writes the variance as a sum over the masks, $\sum_i v_i (\partial f / \partial z_i)^2$: the share of
a site, a unit or a position is the sum of its own terms. A feature of the input has no mask: its share is the variance
that it adds to that of a baseline, by Shapley's rule for a table, to first order for any other input.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, nn

from dropbayes.linear.passes import LinearPlan, linear_plan
from dropbayes.runtime.batches import given_arguments
from dropbayes.runtime.formatting import Table
from dropbayes.runtime.validation import NOT_FINITE, check_type, finite_tensor, needed_for
from dropbayes.sampling import Inputs, Sampling, as_inputs, check_sampling
from dropbayes.tracing import Site

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_SHAPLEY_FEATURES = 64
"""The widest table whose features have Shapley values; the features of a wider one have first-order shares."""

_N_ORDERS = 32  # in which a row's columns replace those of the baseline; as many again are their reverse
_MIXED_ROWS = 2**14  # evaluated at a time

Part = Literal["site", "feature", "position"]


@dataclass(frozen=True)
class Explanation:
    """The epistemic variance of each row, and its shares; prints as a table."""

    sites: tuple[Site, ...]
    by_unit: tuple[Tensor, ...]  #: The share of each unit of each site, `[row, ...]`; all of them sum to the variance.
    by_position: Tensor | None
    """The share of each position of the sequence, `[row, position]`, if requested; less than the variance where masks
    belong to no position."""
    by_feature: Tensor | None
    """The share of each number of the input, in its shape; None for tokens and for several arguments."""
    names: tuple[str, ...]  #: The names of a table's features.

    @property
    def by_site(self) -> Tensor:
        """The share of each site, `[row, site]`; a row's shares sum to its variance."""
        return torch.stack([shares.reshape(len(shares), -1).sum(1) for shares in self.by_unit], 1)

    @property
    def variance(self) -> Tensor:
        """The variance that is explained, `[row]`."""
        return self.by_site.sum(1)

    @property
    def baseline(self) -> Tensor | None:
        """The variance without the features' shares, `[row]`: with them it sums to the variance."""
        return None if self.by_feature is None else self.variance - self.by_feature.flatten(1).sum(1)

    def parts(self, part: Part) -> tuple[list[str], Tensor]:
        """The names and the shares `[row, part]` of the sites, the features of a table, or the positions."""
        if part == "site":
            return [f"{site.path or '(network)'} {site.kind}" for site in self.sites], self.by_site
        shares = self.by_position if part == "position" else self.by_feature
        if shares is None:
            remedy = "Positions need explain(..., positions=True), features an input that is one tensor of real numbers"
            raise ValueError(f"`part` {part!r} has no shares here. {remedy}.")
        shares = shares.flatten(1)
        names = self.names if part == "feature" and self.names else [f"{part} {i}" for i in range(shares.shape[1])]
        return list(names), shares

    def plot(self, part: Part = "site", *, row: int | None = None, ax: Axes | None = None) -> Axes:
        """Bars of the shares of one row, or of the mean over rows; of the features of an image, a map."""
        with needed_for("a picture"):
            import matplotlib.pyplot as plt
        ax = plt.figure(layout="constrained").add_subplot() if ax is None else ax
        names, shares = self.parts(part)
        values = (shares.mean(0) if row is None else shares[row]).cpu()
        if part == "feature" and self.by_feature is not None and self.by_feature.dim() > 2:
            image = values.view(-1, *self.by_feature.shape[-2:]).sum(0)  # over channels
            size = float(image.abs().max())
            picture = ax.imshow(image.numpy(), cmap="PuOr_r", vmin=-size, vmax=size)
            ax.figure.colorbar(picture, ax=ax, label="share of the variance")
            return ax
        order = values.argsort(descending=True).tolist() if part == "feature" else range(len(values))
        ax.barh([names[i] for i in order], [float(values[i]) for i in order], color="#56789c")
        ax.invert_yaxis()
        ax.set_xlabel("share of the epistemic variance")
        return ax

    def __str__(self) -> str:
        total, texts = float(self.variance.mean()) or 1.0, [repr(self)]
        known = {"site": self.by_site, "feature": self.by_feature, "position": self.by_position}
        for part in [part for part in get_args(Part) if known[part] is not None]:
            names, shares = self.parts(part)
            rows = sorted(zip(names, shares.mean(0).tolist(), strict=True), key=lambda row: -row[1])[:8]
            if part == "feature" and self.baseline is not None:
                rows.append(("(baseline)", float(self.baseline.mean())))
            cells = [(name, f"{100 * share / total:.1f} %") for name, share in rows]
            left = [f"({len(names) - 8} more)"] if len(names) > 8 else []
            texts.append(Table("", cells, (part, "share"), "<>", left).text())
        return "\n\n".join(texts)

    def __repr__(self) -> str:
        return f"Explanation({len(self.variance)} rows, mean epistemic variance {float(self.variance.mean()):.3g})"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


@torch.inference_mode(False)
@torch.enable_grad()
def explain(
    net: nn.Module,
    x: Any,
    *,
    output: int | Literal["largest"] | None = None,
    positions: bool = False,
    baseline: Tensor | None = None,
    names: Sequence[str] = (),
    sampling: Sampling = Sampling(),
) -> Explanation:
    """The shares of the epistemic variance of a network's output, by the linear method.

    Args:
        net: Any network with dropout that `predict` takes with `method="linear"`; it is not changed.
        x: Its input.
        output: The number of a row's output to explain, "largest" for each row's largest (its class); None for the
            sum of the variances of all of them.
        positions: Whether the positions of the input's sequence have shares; a weight of attention counts half for
            the position that attends and half for the other.
        baseline: What the features of `x` replace: a row without information, or many typical ones `[row, ...]`, such
            as those of training; by default the mean of the rows.
        names: The names of a table's features.
        sampling: As for `predict`.

    Example:
        >>> net = nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 1, bias=False))
        >>> _ = nn.init.constant_(net[1].weight, 1.0)
        >>> why = explain(net, torch.tensor([[3.0, 1.0]]), baseline=torch.zeros(2))
        >>> why.variance, why.by_unit[0], why.by_feature.round(decimals=3)
        (tensor([10.]), tensor([[9., 1.]]), tensor([[9., 1.]]))
    """
    check_sampling(sampling)
    check_type("names", names, Iterable, "be a list of the features' names")
    names = tuple(map(str, names))
    inputs = as_inputs(given_arguments(net, x), net, row_axis=sampling.row_axis)
    sampling = replace(sampling, positions="per_position" if positions else sampling.positions)
    plan = linear_plan(net, inputs, sampling)
    n_outputs = plan.only_size() if output is None else plan.sizes[0]
    if len(plan.sizes) > 1 or output not in (None, "largest", *range(n_outputs)):
        rule = f"be one of the {n_outputs} numbers of a row's output, which is one tensor"
        got = f"{output!r} for {len(plan.sizes)} tensors"
        raise ValueError(f"`output` must {rule}; got {got}. Pass a network that returns the tensor to explain.")
    if output == "largest":
        chosen = torch.cat([linear.output.argmax(1, keepdim=True) for _, (linear,) in plan.linearised(inputs)])
    else:
        every = torch.arange(n_outputs, device=inputs.device).expand(inputs.n_rows, -1)
        chosen = every if output is None else every[:, [output]]
    units = _unit_shares(plan, inputs, chosen)
    has_features = len(inputs.leaves) == 1 and inputs.leaves[0].is_floating_point() and not inputs.is_one_row
    by_feature = _feature_shares(plan, inputs, baseline, chosen) if has_features else None
    by_position = _position_shares(units) if positions else None
    if names and (by_feature is None or len(names) != by_feature[0].numel()):
        raise ValueError(f"`names` must name each feature of a table; got {len(names)} names.")
    # Without the axis of length 1 in a row's mask that holds the rows of a batch.
    by_unit = tuple(u.squeeze(1 + s.layout.axis) if s.layout and s.layout.inner == 1 else u for s, u in units)
    found = Explanation(tuple(site for site, _ in units), by_unit, by_position, by_feature, names)
    if not bool(found.variance.isfinite().all()):
        raise ValueError(NOT_FINITE)
    return found


def _unit_shares(plan: LinearPlan, inputs: Inputs, chosen: Tensor) -> list[tuple[Site, Tensor]]:
    """The sites, and the share of each of their units, in the shape of a row's mask."""
    blocks = []
    for rows, (linear,) in plan.linearised(inputs, chosen):
        blocks.append([(site, slope.square().sum(0).view(len(rows), *site.shape)) for site, slope in linear.slopes()])
    return [(parts[0][0], torch.cat([shares for _, shares in parts])) for parts in zip(*blocks, strict=True)]


def shapley(value: Callable[[Tensor], Tensor], x: Tensor, baseline: Tensor, *, columns: Tensor | None = None) -> Tensor:
    """What each column of a table adds to a function of its rows: Shapley values, over some orders of the columns.

    Args:
        value: The function of rows `[row, input]`: a number for each row, or several.
        x: The rows to explain.
        baseline: The row whose columns are replaced by those of `x`, or many `[row, input]`, evenly chosen ones of
            which are taken in turn.
        columns: The number of the column that each input belongs to; by default every input is a column.

    Returns:
        `[row, column, ...]`. Those of a row sum to its value less the mean value of the baseline's rows that are taken.

    Example:
        >>> shapley(lambda rows: rows.prod(1), torch.tensor([[2.0, 3.0]]), torch.zeros(2))
        tensor([[3., 3.]])
    """
    columns = torch.arange(x.shape[1], device="cpu") if columns is None else columns.cpu()
    n_columns, generator = 1 + int(columns.max()), torch.Generator("cpu").manual_seed(0)
    n_orders = min(_N_ORDERS, max(_N_ORDERS // 4, _MIXED_ROWS // (4 * n_columns)))  # of many columns, fewer orders
    orders = torch.stack([torch.randperm(n_columns, generator=generator, device="cpu") for _ in range(n_orders)])
    places = torch.cat([orders, orders.flip(1)]).argsort(1)  # of each column in each order
    starts = baseline.reshape(-1, x.shape[1])
    taken = torch.linspace(0, len(starts) - 1, min(len(starts), n_orders), device="cpu").round().long()
    starts = starts[taken[torch.arange(n_orders, device="cpu") % len(taken)]].repeat(2, 1)
    # With each step one column more is that of `x`.
    present = (places[:, None] < torch.arange(n_columns + 1, device="cpu")[:, None])[..., columns].to(x.device)
    numbers, shares = torch.arange(len(places), device="cpu")[:, None], []
    for rows in x.split(max(1, _MIXED_ROWS // present[..., 0].numel())):
        mixed = torch.where(present, rows[:, None, None], starts[:, None])
        values = value(mixed.flatten(0, 2)).unflatten(0, mixed.shape[:3])
        shares.append(values.diff(dim=2)[:, numbers, places].mean(1))
    return torch.cat(shares)


def _feature_shares(plan: LinearPlan, inputs: Inputs, baseline: Tensor | None, chosen: Tensor) -> Tensor:
    """What each number of the input adds to the variance of the baseline; of a table by Shapley's rule."""
    x = inputs.leaves[0].detach().movedim(inputs.axes[0] or 0, 0)
    start = x.mean(0) if baseline is None else finite_tensor("baseline", baseline).to(x)
    if x.shape[1:] not in (start.shape, start.shape[1:]):
        rule = f"have the shape of a row, {tuple(x.shape[1:])}, or be several"
        raise ValueError(f"`baseline` must {rule}; got {tuple(start.shape)}.")
    if not inputs.is_matrix or x.shape[1] > MAX_SHAPLEY_FEATURES:
        return _first_order(plan, inputs, chosen) * (x - (start.mean(0) if start.dim() == x.dim() else start))
    shares = torch.zeros_like(x)
    for numbers in chosen.unique(dim=0):

        def variance(mixed: Tensor, numbers: Tensor = numbers) -> Tensor:
            rows = replace(inputs, leaves=(mixed,), n_rows=len(mixed))
            blocks = plan.linearised(rows, numbers.expand(len(mixed), -1))
            return torch.cat([linear.variance().sum(1) for _, (linear,) in blocks])

        rows = (chosen == numbers).all(1)
        shares[rows] = shapley(variance, x[rows], start).to(x)
    return shares


def _first_order(plan: LinearPlan, inputs: Inputs, chosen: Tensor) -> Tensor:
    """The derivative of the variance by each number of the input."""
    leaf = inputs.leaves[0].detach().clone().requires_grad_()
    slopes = []
    for rows, (linear,) in plan.linearised(replace(inputs, leaves=(leaf,)), chosen, twice=True):
        total = torch.stack([slope.square().sum() for _, slope in linear.slopes()]).sum()
        (slope,) = torch.autograd.grad(total + 0 * leaf.sum(), leaf)  # 0 where it does not depend on the input
        slopes.append(slope.movedim(inputs.axes[0] or 0, 0)[rows.start : rows.stop])
    return torch.cat(slopes)


def _position_shares(units: list[tuple[Site, Tensor]]) -> Tensor:
    """The sum of the shares of the masks at each position of the first sequence, `[row, position]`."""
    found: list[Tensor] = []
    for site, shares in units:
        axes = [1 + position.axis for position in site.positions if position.sequence == 0]
        found += [torch.einsum("rp...->rp", shares.movedim(axis, 1)) / len(site.positions) for axis in axes]
    if not found:
        raise ValueError("`positions` needs a site with an axis of positions; `net` has none. Leave `positions` out.")
    return torch.stack(found).sum(0)
