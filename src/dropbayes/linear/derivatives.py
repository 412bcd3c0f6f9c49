r"""The network as a linear function of its masks: one forward pass, and one backward pass for each output.

With $z_i$ the masks of all sites, of mean 1 and variance $v_i$,
$f(z) \approx f(1) + \sum_i (z_i - 1) \, \partial f / \partial z_i$, so that

$$\mathrm{Cov}[f_j, f_k] \approx \sum_i v_i \frac{\partial f_j}{\partial z_i} \frac{\partial f_k}{\partial z_i}.$$

Rows do not depend on each other, so a backward pass from the sum over rows gives each row its own derivatives.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._pytree import PyTree, tree_map

from dropbayes.linear.points import N_POINTS, gaussian_points
from dropbayes.linear.variables import MASK_KINDS, SiteValues, SiteVariables, Variable, linear_part
from dropbayes.sampling import Inputs, Inspection, Keys, Sampling, cloned_leaves, eagerly, rows_first
from dropbayes.tracing import AtMeans, Interception, Site, SiteNames
from dropbayes.tracing.generators import keyed_generators
from dropbayes.tracing.outputs import split

_MAX_UNITS = 4096  # of a site whose masks are laid out; the sum over more is Gaussian enough


@dataclass(frozen=True)
class Linearisation:
    """One tensor of a network's output for some rows, linear in the variables of its sites."""

    tensor: Tensor  #: The output at the variables' means, `[row, ...]`.
    output: Tensor  #: Its numbers, `[row, number]`; of a complex one, both parts.
    variables: list[Variable]
    at_once: int  #: The numbers that are differentiated together.
    twice: bool = False  # gradients can be differentiated again

    @torch.inference_mode(False)
    @torch.enable_grad()
    def chosen(self, numbers: Tensor) -> Self:
        """The linearisation of some numbers of the output alone, `[row, choice]`."""
        return replace(self, output=self.output.gather(1, numbers))

    @torch.inference_mode(False)
    @torch.enable_grad()
    def _each(self, summary: Callable[[list[Tensor]], PyTree]) -> PyTree:
        """A summary of the scaled derivatives `[row, unit]` by each variable, for each number of the output."""
        output, values = self.output, [variable.value for variable in self.variables]

        def summarised(direction: Tensor) -> PyTree:
            found: Iterable[Tensor] = map(torch.zeros_like, values)  # of a constant
            if output.requires_grad:
                of_rows = direction.expand_as(output)  # the same for every row
                found = torch.autograd.grad(
                    output, values, of_rows, retain_graph=True, create_graph=self.twice, materialize_grads=True
                )
            pairs = zip(self.variables, found, strict=True)  # a network may be on several devices
            return summary([self._by_row(variable, one.to(output.device)) for variable, one in pairs])

        # Made on the device: a copy would wait for the forward pass.
        return self._mapped(summarised, [torch.eye(output.shape[1], dtype=output.dtype, device=output.device)])

    def _by_row(self, variable: Variable, gradient: Tensor) -> Tensor:
        """The derivatives by the numbers of a variable, in its deviations, `[row, unit]`."""
        layout, slope = variable.site.layout, gradient if gradient.dtype.itemsize > 2 else gradient.float()
        if layout is not None and layout.axis > 0:
            slope = slope.unflatten(layout.axis, (len(self.output), -1)).movedim(layout.axis, 0)
        return slope.reshape(1 if layout is None else len(self.output), -1) * variable.std

    def _mapped(self, function: Callable[..., PyTree], directions: list[Tensor]) -> PyTree:
        """A function of each of the directions, stacked: mapped over, some of them together, or else one by one."""
        if len(directions[0]) > 1:
            with contextlib.suppress(RuntimeError), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of an operation that is mapped one by one
                return torch.vmap(function, chunk_size=self.at_once)(*directions)
        return tree_map(lambda *parts: torch.stack(parts), *[function(*one) for one in zip(*directions, strict=True)])

    def slopes(self) -> Iterator[tuple[Site, Tensor]]:
        """Each site, with the scaled derivatives of each number of the output by its numbers, `[output, row, unit]`."""
        return zip([variable.site for variable in self.variables], self._each(lambda slopes: slopes), strict=True)

    def variance(self) -> Tensor:
        """The variance of each number of the output, `[row, output]`."""
        norms = self._each(lambda slopes: torch.stack([torch.linalg.vector_norm(slope, dim=1) for slope in slopes]))
        return norms.double().square().sum(1).T

    def points(self) -> Tensor:
        """What fixed masks add to the output, `[point, row, output]`: of mean 0, and of its variance.

        A few inputs that are seldom dropped make a distribution that is far from a Gaussian. A site of very many units,
        or whose masks would drop none of so few points, has the Gaussian of its covariance.
        """
        keys, draws = Keys(0, N_POINTS, "stratified"), range(N_POINTS)
        moved = torch.zeros(N_POINTS, *self.output.shape, dtype=torch.float64, device=self.output.device)
        variance, rest = torch.zeros_like(moved[0]), torch.zeros_like(moved[0].unsqueeze(-1) * moved[0].unsqueeze(-2))
        for site, slope in self.slopes():
            variance += slope.square().sum(2, dtype=torch.float64).T
            if slope.shape[2] <= _MAX_UNITS and (site.drop_prob or 0) * N_POINTS >= 1:
                moved += linear_part(site, slope, keys, draws)
            else:
                rest += torch.einsum("kru,lru->rkl", slope, slope)
        moved += gaussian_points(torch.zeros_like(variance), rest)
        moved -= moved.mean(0)
        return moved * (variance / moved.square().mean(0).clamp(min=1e-300)).sqrt()

    @torch.inference_mode(False)
    @torch.enable_grad()
    def deviations(self, n_probes: int) -> Tensor:
        """What random values of the variables add to the output, `[probe, row, output]`; all rows share the values."""
        values, direction = [one.value for one in self.variables], torch.zeros_like(self.output, requires_grad=True)
        # The product with the Jacobian's transpose is linear in its direction: its own derivative is the Jacobian.
        found = torch.autograd.grad(self.output, values, direction, create_graph=True, allow_unused=True)
        pairs = zip(self.variables, found, strict=True)
        reached = [(variable, one) for variable, one in pairs if one is not None and one.requires_grad]
        generator = torch.Generator("cpu").manual_seed(0)
        noise = [_noise(variable, n_probes, len(self.output), generator) for variable, _ in reached]
        ends = [one for _, one in reached]
        return self._mapped(lambda *probe: torch.autograd.grad(ends, direction, probe, retain_graph=True)[0], noise)


@torch.inference_mode(False)
@torch.enable_grad()
def linearise(
    inspection: Inspection, inputs: Inputs, sampling: Sampling, at_once: int, twice: bool = False
) -> list[Linearisation]:
    """Each tensor of the output, linearised, of all rows as one batch; `twice` for derivatives by the input as well."""
    profile, at_sites = inspection.profile, inspection.findings.get("linear")
    view = at_sites or inspection.network()
    source = SiteVariables(profile, SiteNames(view.paths), sampling.ignored, tied=sampling.positions == "tied")
    leaves: Sequence[Any] = (inputs if twice else inputs.with_tensors(Tensor.detach)).leaves
    leaves = cloned_leaves(leaves) if profile.writes_input else leaves
    seeded = keyed_generators(None) if profile.seeds_torch else contextlib.nullcontext()
    has_gates = any(site.kind in ("rand", "randperm", "bernoulli") for site in profile.sites)
    mode = (AtMeans if has_gates else Interception)(source)
    with seeded, mode if at_sites is None else mode.at_sites():
        tensors, _ = split(eagerly(inputs.call)(view.net, leaves))
    if at_sites is not None and (mode.drawn_elsewhere or len(source.variables) < profile.n_random):
        inspection.findings["linear"] = None
        return linearise(inspection, inputs, sampling, at_once, twice)
    if "linear" not in inspection.findings:  # the first pass, in the mode throughout, looks for hard choices
        again = SiteValues(profile, SiteNames({}), (), tied=False)  # torch.utils.checkpoint runs modules again
        are_masks = {site.kind for site in profile.sites} <= MASK_KINDS
        inspection.findings["linear"] = inspection.view_at_sites(again) if are_masks else None
    found = []
    for out, layout in zip(tensors, profile.outputs, strict=True):
        tensor = rows_first(out, layout, 1, inputs.n_rows)[0]
        output = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(inputs.n_rows, -1)
        found.append(Linearisation(tensor, output, source.variables, at_once, twice))
    return found


def _noise(variable: Variable, n_probes: int, n_rows: int, generator: torch.Generator) -> Tensor:
    """Normal numbers of a variable's variance, in pairs of opposite sign, the same for every row."""
    layout, shape = variable.site.layout, list(variable.value.shape)
    if layout is not None:
        shape[layout.axis] //= n_rows
    half = torch.randn((n_probes // 2, *shape), generator=generator, dtype=torch.float64, device="cpu")
    both = torch.stack([half, -half], 1).flatten(0, 1).to(variable.value)
    return (both if layout is None else torch.cat([both] * n_rows, 1 + layout.axis)) * variable.std
