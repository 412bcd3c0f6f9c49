r"""The network as a linear function of its masks: one forward pass, and one backward pass for each output.

With $z_i$ the masks of all sites, of mean 1 and variance $v_i$,
$f(z) \approx f(1) + \sum_i (z_i - 1) \, \partial f / \partial z_i$, so that

$$\mathrm{Cov}[f_j, f_k] \approx \sum_i v_i \frac{\partial f_j}{\partial z_i} \frac{\partial f_k}{\partial z_i}.$$

Rows do not depend on each other, so a backward pass from the sum over rows gives each row its own derivatives.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dropbayes.linear.variables import SiteVariables, Variable
from dropbayes.sampling import Inputs, Inspection, RowLayout, cloned_leaves, eagerly, split
from dropbayes.tracing import Interception, SiteNames
from dropbayes.tracing.generators import keyed_generators

__all__ = ["Linearisation", "linearise", "one_each", "rows_first", "rows_second"]


@dataclass(frozen=True)
class Linearisation:
    """Some rows of a network, linear in the variables of its sites."""

    outputs: list[Tensor]
    """Each tensor of the output at the variables' means, `[row, ...]`."""
    variables: list[Variable]
    n_rows: int
    twice: bool = False  # gradients can be differentiated again

    @torch.inference_mode(False)
    @torch.enable_grad()
    def flat(self, index: int) -> Tensor:
        """A tensor of the output as numbers, `[row, output]`; of a complex one, both parts."""
        output = self.outputs[index]
        return (torch.view_as_real(output) if output.is_complex() else output).reshape(self.n_rows, -1)

    def gradients(self, output: Tensor, directions: Tensor) -> list[Tensor]:
        r"""The derivatives of combinations of outputs by each variable, scaled by its deviation $\sqrt{v_i}$.

        Args:
            output: The outputs, `[row, output]`, of this linearisation's graph.
            directions: The combinations, `[combination, row, output]`.

        Returns:
            For each variable, `[combination, row, unit]`.
        """
        found = zip(self.variables, self._derivatives(output, directions), strict=True)
        scaled = [(variable, one * variable.std) for variable, one in found]
        return [
            rows_second(one if one.dtype.itemsize > 2 else one.float(), variable, self.n_rows).flatten(2)
            for variable, one in scaled
        ]

    def _derivatives(self, output: Tensor, directions: Tensor) -> list[Tensor]:
        """The derivatives of combinations of outputs by the numbers of each variable."""
        values = [variable.value for variable in self.variables]
        if output.requires_grad:
            found = _batched([output], values, [directions], self.twice)
        else:  # a constant
            found = [value.new_zeros((len(directions), *value.shape)) for value in values]
        return [variable.derivative(one) for variable, one in zip(self.variables, found, strict=True)]

    @torch.inference_mode(False)
    @torch.enable_grad()
    def variance(self, index: int, at_once: int) -> Tensor:
        """The variance of each number of an output, `[row, output]`; `at_once` of them are differentiated together."""
        output = self.flat(index)
        total = torch.zeros(output.shape, dtype=torch.float64, device=output.device)
        for start in range(0, output.shape[1], at_once):
            columns = range(start, min(start + at_once, output.shape[1]))
            found = self._derivatives(output, one_each(output, columns))
            for variable, one in zip(self.variables, found, strict=True):
                alike = not isinstance(variable.variance, Tensor)
                by_row = rows_second(one if alike else one * variable.std, variable, self.n_rows).flatten(2)
                squares = torch.linalg.vector_norm(by_row, dim=2, dtype=torch.float64).square()
                total[:, columns.start : columns.stop] += (squares * variable.variance if alike else squares).T
        return total

    @torch.inference_mode(False)
    @torch.enable_grad()
    def slopes(self, output: Tensor, at_once: int | None = None) -> list[Tensor]:
        """The scaled derivatives of each output by each variable, `[output, row, unit]`; see `gradients`."""
        size = output.shape[1]
        starts = range(0, size, at_once or size)
        parts = [self.gradients(output, one_each(output, range(i, min(i + starts.step, size)))) for i in starts]
        return [torch.cat(chunks) for chunks in zip(*parts, strict=True)]

    def site_covariances(self, index: int, at_once: int) -> list[Tensor]:
        """The covariance between the numbers of an output due to each variable alone."""
        slopes = self.slopes(self.flat(index), at_once)
        return [torch.einsum("kru,lru->rkl", slope, slope).double() for slope in slopes]

    @torch.inference_mode(False)
    @torch.enable_grad()
    def deviations(self, index: int, n_probes: int, at_once: int) -> Tensor:
        """What random values of the variables add to an output, `[probe, row, output]`; all rows share the values.

        The product with the Jacobian's transpose is linear in its direction: its own derivative is the Jacobian.
        """
        output = self.flat(index)
        values = [variable.value for variable in self.variables]
        direction = torch.zeros_like(output, requires_grad=True)
        found = torch.autograd.grad(output, values, direction, create_graph=True, allow_unused=True)
        depends = [one is not None and one.requires_grad for one in found]
        pairs = zip(self.variables, found, strict=True)
        products = [variable.derivative(one[None])[0] for variable, one in itertools.compress(pairs, depends)]
        generator = torch.Generator().manual_seed(0)
        reached = itertools.compress(self.variables, depends)
        noise = [_noise(variable, n_probes, self.n_rows, generator) for variable in reached]
        parts = [[one[start : start + at_once] for one in noise] for start in range(0, n_probes, at_once)]
        return torch.cat([_batched(products, [direction], part)[0] for part in parts])


@torch.inference_mode(False)
@torch.enable_grad()
def linearise(
    inspection: Inspection,
    inputs: Inputs,
    ignored: tuple[str, ...] = (),
    tied: bool = False,
    twice: bool = False,
    mask_leaves: bool = False,
) -> Linearisation:
    """The linearisation of all rows as one batch; `twice` for gradients with derivatives by the input."""
    profile, net = inspection.profile, inspection.network()
    names = SiteNames({id(module): path for path, module in net.named_modules()})
    source = SiteVariables(profile, names, ignored, tied, mask_leaves)
    leaves: Sequence[Any] = inputs.leaves
    if not twice:
        leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    leaves = cloned_leaves(leaves) if profile.writes_input else leaves
    seeded = keyed_generators(None) if profile.seeds_torch else contextlib.nullcontext()
    with seeded, Interception(source):
        tensors, _ = split(eagerly(inputs.call)(net, leaves))
    if not all(variable.is_intact for variable in source.variables):
        return linearise(inspection, inputs, ignored, tied, twice, mask_leaves=True)
    outputs = [rows_first(out, layout, inputs.n_rows) for out, layout in zip(tensors, profile.outputs, strict=True)]
    return Linearisation(outputs, source.variables, inputs.n_rows, twice)


def rows_first(output: Tensor, layout: RowLayout | None, n_rows: int) -> Tensor:
    """`[row, ...]` of an output; without rows, of the one row there is."""
    if layout is None:
        return output[None]
    split_out = output.unflatten(layout.axis, (n_rows, -1)).movedim(layout.axis, 0)
    return split_out.squeeze(1 + layout.axis) if layout.inner == 1 else split_out


def rows_second(gradient: Tensor, variable: Variable, n_rows: int) -> Tensor:
    """`[combination, row, ...]` of a gradient whose variable holds the rows along an axis."""
    layout = variable.site.layout
    if n_rows == 1 or layout is None:
        return gradient.unsqueeze(1)
    return gradient.unflatten(1 + layout.axis, (n_rows, -1)).movedim(1 + layout.axis, 1)


def _noise(variable: Variable, n_probes: int, n_rows: int, generator: torch.Generator) -> Tensor:
    """Normal numbers of a variable's variance, in pairs of opposite sign, the same for every row."""
    value, layout, shape = variable.value, variable.site.layout, list(variable.shape)
    axis = 0 if layout is None else layout.axis
    if n_rows > 1:
        shape[axis] //= n_rows
    half = torch.randn((n_probes // 2, *shape), generator=generator, dtype=torch.float64).to(value)
    both = torch.stack([half, -half], 1).flatten(0, 1)
    if n_rows > 1:
        both = both.unsqueeze(1 + axis).expand(-1, *shape[:axis], n_rows, *shape[axis:]).flatten(1 + axis, 2 + axis)
    return both * variable.std


def one_each(output: Tensor, columns: range) -> Tensor:
    """The directions of some outputs, the same for every row."""
    chosen = torch.eye(output.shape[1], dtype=output.dtype, device=output.device)[columns.start : columns.stop]
    return chosen[:, None].expand(-1, len(output), -1)


def _batched(
    outputs: list[Tensor], values: list[Tensor], directions: list[Tensor], twice: bool = False
) -> list[Tensor]:
    """Vector-Jacobian products for each of the first axis of `directions`: mapped over, or else one by one."""

    def products(rows: list[Tensor], batched: bool) -> list[Tensor]:
        found = torch.autograd.grad(
            outputs, values, rows, retain_graph=True, create_graph=twice, allow_unused=True, is_grads_batched=batched
        )
        lead = (len(rows[0]),) if batched else ()
        return [
            value.new_zeros((*lead, *value.shape)) if one is None else one
            for one, value in zip(found, values, strict=True)
        ]

    n_directions = len(directions[0])
    if n_directions > 1 and not twice:
        with contextlib.suppress(RuntimeError), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of an operation that is mapped one by one
            return products(directions, True)
    rows = [products([direction[i] for direction in directions], False) for i in range(n_directions)]
    return [torch.stack(one) for one in zip(*rows, strict=True)]
