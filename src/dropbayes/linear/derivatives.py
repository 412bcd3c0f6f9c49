r"""The network as a linear function of its masks: one forward pass, and one backward pass for each output.

With $z_i$ the masks of all sites, of mean 1 and variance $v_i$,
$f(z) \approx f(1) + \sum_i (z_i - 1) \, \partial f / \partial z_i$, so that

$$\mathrm{Cov}[f_j, f_k] \approx \sum_i v_i \frac{\partial f_j}{\partial z_i} \frac{\partial f_k}{\partial z_i}.$$

Rows do not depend on each other, so a backward pass from the sum over rows gives each row its own derivatives.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dropbayes.linear.points import gaussian_points
from dropbayes.linear.variables import SiteVariables, Variable, standard_masks
from dropbayes.sampling import Inputs, Inspection, Keys, RowLayout, cloned_leaves, eagerly, split
from dropbayes.tracing import AtMeans, Interception, SiteNames, version
from dropbayes.tracing.generators import keyed_generators

_MAX_UNITS = 4096  # of a site whose masks are laid out; the sum over more is Gaussian enough


@dataclass(frozen=True)
class Linearisation:
    """Some rows of a network, linear in the variables of its sites."""

    outputs: list[Tensor]  #: Each tensor of the output at the variables' means, `[row, ...]`.
    variables: list[Variable]
    n_rows: int
    twice: bool = False  # gradients can be differentiated again

    @torch.inference_mode(False)
    @torch.enable_grad()
    def flat(self, index: int) -> Tensor:
        """A tensor of the output as numbers, `[row, output]`; of a complex one, both parts."""
        output = self.outputs[index]
        return (torch.view_as_real(output) if output.is_complex() else output).reshape(self.n_rows, -1)

    def _slopes(self, output: Tensor, at_once: int) -> Iterator[list[Tensor]]:
        """The derivatives of `at_once` outputs at a time by each variable, still to be scaled by `_scale`."""
        values = [variable.value for variable in self.variables]
        # Made on the device: a copy would wait for the forward pass.
        for directions in torch.eye(output.shape[1], dtype=output.dtype, device=output.device).split(at_once):
            directions = directions[:, None].expand(-1, len(output), -1)  # the same for every row
            if output.requires_grad:
                found = _batched([output], values, [directions], self.twice)
            else:  # a constant
                found = [value.new_zeros((len(directions), *value.shape)) for value in values]
            yield [self._by_row(variable, one) for variable, one in zip(self.variables, found, strict=True)]

    def _by_row(self, variable: Variable, gradients: Tensor) -> Tensor:
        """The derivatives by the numbers of a variable, `[output, row, unit]`, from those by its value."""
        slope, layout = variable.derivative(gradients), variable.site.layout
        slope = slope * variable.std if isinstance(variable.std, Tensor) else slope
        slope = slope if slope.dtype.itemsize > 2 else slope.float()
        if self.n_rows == 1 or layout is None:
            return slope.unsqueeze(1).flatten(2)
        return slope.unflatten(1 + layout.axis, (self.n_rows, -1)).movedim(1 + layout.axis, 1).flatten(2)

    @property
    def _scale(self) -> list[float]:
        r"""The deviation $\sqrt{v_i}$ of each variable whose numbers have one in common."""
        return [1.0 if isinstance(variable.std, Tensor) else variable.std for variable in self.variables]

    @torch.inference_mode(False)
    @torch.enable_grad()
    def slopes(self, index: int = 0, at_once: int | None = None) -> list[Tensor]:
        """The scaled derivatives of each number of an output by each variable, `[output, row, unit]`."""
        output = self.flat(index)
        chunks = zip(*self._slopes(output, at_once or output.shape[1]), strict=True)
        return [torch.cat(parts) * scale for parts, scale in zip(chunks, self._scale, strict=True)]

    @torch.inference_mode(False)
    @torch.enable_grad()
    def variance(self, index: int, at_once: int) -> Tensor:
        """The variance of each number of an output, `[row, output]`; `at_once` of them are differentiated together."""
        chunks = [
            torch.stack([_norm(slope) * scale for slope, scale in zip(slopes, self._scale, strict=True)])
            for slopes in self._slopes(self.flat(index), at_once)
        ]
        return torch.cat(chunks, 1).square().sum(0).T

    def points(self, index: int, n_points: int, at_once: int) -> Tensor:
        """An output of the linear network under fixed masks, `[point, row, output]`: of its mean, and its variance.

        A few inputs that are seldom dropped make a distribution that is far from a Gaussian. A site of very many units,
        or whose masks would drop none of so few points, has the Gaussian of its covariance.
        """
        mean = self.flat(index)
        moved = torch.zeros(n_points, *mean.shape, dtype=torch.float64, device=mean.device)
        variance, rest = torch.zeros_like(moved[0]), torch.zeros_like(moved[0].unsqueeze(-1) * moved[0].unsqueeze(-2))
        for variable, slope in zip(self.variables, self.slopes(index, at_once), strict=True):
            variance += _norm(slope).square().T
            site, shape = variable.site, (slope.shape[2],)
            if shape[0] <= _MAX_UNITS and (site.drop_prob or 0) * n_points >= 1:
                masks = standard_masks(site, Keys(0, n_points, "stratified"), range(n_points), shape, slope)
                moved += torch.einsum("kru,pu->prk", slope, masks)
            else:
                rest += torch.einsum("kru,lru->rkl", slope, slope)
        moved += gaussian_points(torch.zeros_like(variance), rest)
        moved -= moved.mean(0)
        return mean + moved * (variance / moved.square().mean(0).clamp(min=1e-300)).sqrt()

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
        pairs = zip(self.variables, found, strict=True)
        reached = [(variable, one) for variable, one in pairs if one is not None and one.requires_grad]
        products = [variable.derivative(one[None])[0] for variable, one in reached]
        generator = torch.Generator("cpu").manual_seed(0)
        noise = [_noise(variable, n_probes, self.n_rows, generator) for variable, _ in reached]
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
    source = SiteVariables(profile, SiteNames(net), ignored, tied, mask_leaves)
    leaves: Sequence[Any] = (inputs if twice else inputs.with_tensors(Tensor.detach)).leaves
    leaves = cloned_leaves(leaves) if profile.writes_input else leaves
    seeded = keyed_generators(None) if profile.seeds_torch else contextlib.nullcontext()
    has_gates = any(site.kind in ("rand", "randperm", "bernoulli") for site in profile.sites)
    with seeded, (AtMeans if has_gates else Interception)(source):
        tensors, _ = split(eagerly(inputs.call)(net, leaves))
    products = [variable for variable in source.variables if variable.factor is not None]
    written = any(version(one.value) != one.version for one in products)
    if not mask_leaves and (source.has_derivatives or written):
        return linearise(inspection, inputs, ignored, tied, twice, mask_leaves=True)
    outputs = [rows_first(out, layout, inputs.n_rows) for out, layout in zip(tensors, profile.outputs, strict=True)]
    return Linearisation(outputs, source.variables, inputs.n_rows, twice)


def _norm(slope: Tensor) -> Tensor:
    return torch.linalg.vector_norm(slope, dim=2, dtype=torch.float64)


def rows_first(output: Tensor, layout: RowLayout | None, n_rows: int) -> Tensor:
    """`[row, ...]` of an output; without rows, of the one row there is."""
    if layout is None:
        return output[None]
    split_out = output.unflatten(layout.axis, (n_rows, -1)).movedim(layout.axis, 0)
    return split_out.squeeze(1 + layout.axis) if layout.inner == 1 else split_out


def _noise(variable: Variable, n_probes: int, n_rows: int, generator: torch.Generator) -> Tensor:
    """Normal numbers of a variable's variance, in pairs of opposite sign, the same for every row."""
    value, layout, shape = variable.value, variable.site.layout, list(variable.shape)
    axis = 0 if layout is None else layout.axis
    if n_rows > 1:
        shape[axis] //= n_rows
    half = torch.randn((n_probes // 2, *shape), generator=generator, dtype=torch.float64, device="cpu").to(value)
    both = torch.stack([half, -half], 1).flatten(0, 1)
    if n_rows > 1:
        both = both.unsqueeze(1 + axis).expand(-1, *shape[:axis], n_rows, *shape[axis:]).flatten(1 + axis, 2 + axis)
    return both * variable.std


def _batched(
    outputs: list[Tensor], values: list[Tensor], directions: list[Tensor], twice: bool = False
) -> list[Tensor]:
    """Vector-Jacobian products for each of the first axis of `directions`: mapped over, or else one by one."""
    gradients = functools.partial(
        torch.autograd.grad, outputs, values, retain_graph=True, create_graph=twice, materialize_grads=True
    )
    n_directions = len(directions[0])
    if n_directions > 1 and not twice:
        with contextlib.suppress(RuntimeError), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of an operation that is mapped one by one
            found = gradients(directions, is_grads_batched=True)
            return [one.expand(n_directions, *value.shape) for one, value in zip(found, values, strict=True)]
    rows = [gradients([direction[i] for direction in directions]) for i in range(n_directions)]
    return [torch.stack(one) for one in zip(*rows, strict=True)]
