r"""The theory of a given network: which of its weights are Bayesian, their priors, and the process it tends to."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import PyTree

from dropbayes.layers import Prior, decays, is_bias, keep_probs, kl_is_weight_decay, trace, weight_layers
from dropbayes.predictive import predict
from dropbayes.processes.exact import exact_process
from dropbayes.processes.networks import NetworkCovariance
from dropbayes.runtime.formatting import Printed, Table
from dropbayes.runtime.validation import check_n_data, check_positive
from dropbayes.sampling import Sampling, Site, sites


@dataclass(frozen=True)
class WeightReading:
    r"""The theory's reading of one weight matrix: "Bayesian" (dropped), "MAP" (a point with a prior) or "flat".

    The keep probability $p$ of its inputs, the length-scale $l$ of its active $\mathbf M = \theta/p$ and the decay
    $\lambda/p^2 = l^2/(2pN\tau)$ of its stored $\theta$ are None for a family that states its own KL.
    """

    name: str
    shape: tuple[int, ...]
    keep_prob: float | None
    length_scale: float | None
    weight_decay: float | None
    reading: str


@dataclass(frozen=True)
class TheoryReport(Printed):
    """The theory's reading of a network; prints as a table and notes."""

    weights: tuple[WeightReading, ...]
    outside: tuple[tuple[Site, str], ...]  # the sites that are draws of no q(W), each with the reason
    without_prior: tuple[str, ...]  # parameters outside weight layers: normalisation, tokens, positions

    @property
    def is_variational(self) -> bool:
        """Whether every draw of the network is a draw of its weights, and some weight is random."""
        return not self.outside and any(weight.reading == "Bayesian" for weight in self.weights)

    def table(self) -> Table:
        """The weights, one in each line, and below them what is outside the theory."""
        head = ("weight", "shape", "keep_prob", "length-scale", "weight decay", "reading")
        body = []
        for weight in self.weights:
            numbers = (weight.keep_prob, weight.length_scale, weight.weight_decay)
            written = ("-" if number is None else f"{number:.3g}" for number in numbers)
            body.append((weight.name, "x".join(map(str, weight.shape)), *written, weight.reading))
        notes = [f"site {site.index} ({site.path or 'network'}): {reason}" for site, reason in self.outside]
        if not self.outside:
            notes.append("every site is a draw of some q(W)" if self.is_variational else "no weight is random: MAP")
        if self.without_prior:
            notes.append(f"without a prior: {', '.join(self.without_prior)}")
        return Table("", body, head, notes=notes, rule=True)


def theory_report(
    net: nn.Module, x: PyTree, prior: Prior, n_data: int, *, precision: float = 1.0, row_axis: int = 0
) -> TheoryReport:
    r"""The theory's reading of `net`: its Bayesian and MAP weights, their $\lambda$, and the sites outside the theory.

    A weight matrix whose input units are dropped with one mask per row is a draw of $q(\mathbf W)$; one whose inputs
    are not dropped is a point, MAP under its prior [GG16, section "Applications"]. A mask that differs from position to
    position, that multiplies no weight's input (on a residual branch, on attention weights), or that is drawn anew for
    a second use of the same weight is a draw of no distribution over weights.

    The network is not changed. `x` is a batch of its input (a tensor, a tuple of positional or a dict of named
    arguments) with its rows on `row_axis`; `n_data` is $N$, `precision` is $\tau$, 1 for classification.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 1))
        >>> print(theory_report(net, torch.zeros(3, 2), Prior(length_scale=2.0), n_data=100, precision=10.0))
        weight    shape  keep_prob  length-scale  weight decay  reading
        --------  -----  ---------  ------------  ------------  --------
        0.weight  8x2    1          2             0.002         MAP
        3.weight  1x8    0.9        2             0.00222       Bayesian
        every site is a draw of some q(W)
    """
    check_n_data(n_data)
    check_positive("precision", precision)
    weights = []
    for one in decays(net, prior=prior, keep_probs=keep_probs(net, x)):
        if is_bias(one.parameter):
            continue
        p, scale, decay = one.keep_prob, float(one.length_scale), float(one.coefficient) / (2 * n_data * precision)
        reading = "flat" if scale == 0 else "Bayesian" if p < 1 else "MAP"
        weights.append(WeightReading(one.name, tuple(one.value.shape), p, scale, decay, reading))
    for name, module in weight_layers(net):
        if not kl_is_weight_decay(module):
            shape = tuple(getattr(module, "weight", torch.empty(0)).shape)
            weights.append(WeightReading(f"{name}.weight".lstrip("."), shape, None, None, None, "Bayesian"))
    of_layers = {id(p) for _, module in weight_layers(net) for p in module.parameters()}
    others = tuple(name for name, p in net.named_parameters() if id(p) not in of_layers)
    return TheoryReport(tuple(weights), _sites_outside(net, x, row_axis), others)


def _sites_outside(net: nn.Module, x: PyTree, row_axis: int) -> tuple[tuple[Site, str], ...]:
    uses = Counter(name for name, _ in trace(net, x))
    repeated = {name.rpartition(".")[0] for name, count in uses.items() if count > 1}
    own_kl = {name for name, module in weight_layers(net) if not kl_is_weight_decay(module)}
    outside = []
    for site in sites(net, x, sampling=Sampling(row_axis=row_axis)):
        if not site.is_random or any(f"{site.path}.".startswith(f"{layer}.") for layer in own_kl):
            continue
        if site.kind in ("attention", "recurrent"):
            outside.append((site, f"{site.kind} dropout is drawn anew at every position"))
        elif site.before is None:
            outside.append((site, "its mask multiplies no weight's input"))
        elif sum(size > 1 for size in site.shape) > 1:
            outside.append((site, f"its mask differs from position to position of {site.before}'s input"))
        elif site.before in repeated:
            outside.append((site, f"{site.before} is used more than once, with a mask each time"))
    return tuple(outside)


@dataclass(frozen=True)
class VarianceRatio:
    """The variance over the draws of a network, `[row]`, and the posterior variance of its process at the same rows."""

    network: Tensor
    process: Tensor

    @property
    def ratio(self) -> Tensor:
        """The network's variance divided by the process's, `[row]`."""
        return self.network / self.process


def variance_ratio(
    net: nn.Module,
    covariance: NetworkCovariance,
    data: tuple[Tensor, Tensor],
    x: Tensor,
    *,
    precision: float,
    n_draws: int = 200,
    seed: int = 0,
    **options: Any,
) -> VarianceRatio:
    r"""The variance of a trained network's dropout draws at `x`, and that of the exact process it tends to.

    The network has one output, and `covariance` is `process_of(net, prior)`. The training rows `data`, $(\mathbf X,
    \mathbf Y)$, condition the process; `precision` is $\tau$ of both, `options` are further arguments of `predict`.
    """
    inputs, targets = data
    rows, y, bias = inputs.double().flatten(1), targets.double().reshape(len(inputs)), covariance.output_bias
    process = exact_process(covariance, rows, y, precision=precision, output_bias=bias)
    prediction: Any = predict(net, x, n_draws=n_draws, seed=seed, **options)
    return VarianceRatio(prediction.epistemic.reshape(len(x)).double(), process.variance(x.double().flatten(1)))
