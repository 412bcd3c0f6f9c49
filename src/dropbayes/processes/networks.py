r"""The Gaussian process of a network as it stands: its own layers, widths, length-scales and shortcuts."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from dropbayes.covariances import Covariance, Erf, Identity, Layer, Pairs, Quadrature, ReLU, Sigmoid, TanH
from dropbayes.weight_layers.precision import Prior

__all__ = ["NetworkCovariance", "process_of"]

_ACTIVATIONS: dict[Any, Callable[[], Layer]] = {
    **dict.fromkeys((nn.ReLU, torch.relu, F.relu, "relu"), lambda: ReLU(1.0, 0.0)),
    **dict.fromkeys((nn.Tanh, torch.tanh, F.tanh, "tanh"), lambda: TanH(1.0, 0.0)),
    **dict.fromkeys((nn.Sigmoid, torch.sigmoid, F.sigmoid, "sigmoid"), lambda: Sigmoid(1.0, 0.0)),
    **dict.fromkeys((torch.erf, "erf"), lambda: Erf(1.0, 0.0)),
    **{
        module: lambda function=function: Quadrature(1.0, 0.0, function=function)
        for module, function in (
            (nn.GELU, F.gelu), (nn.SiLU, F.silu), (nn.Softplus, F.softplus), (nn.ELU, F.elu),
            (F.gelu, F.gelu), (F.silu, F.silu), (F.softplus, F.softplus), (F.elu, F.elu),
        )
    },
}  # fmt: skip
_PASSED = (nn.Dropout, nn.AlphaDropout, nn.Identity, nn.Flatten)
_PASSED_FUNCTIONS = (F.dropout, torch.flatten, "flatten")
_SUMS = (operator.add, torch.add, "add")


@dataclass(frozen=True)
class Step:
    """One operation of the network: its name, the steps it reads, and the covariance it makes of theirs.

    `layer` is None for a sum. `n_inputs` is how many units a linear layer adds up; None for an activation.
    """

    name: str
    sources: tuple[str, ...]
    layer: Layer | None
    n_inputs: int | None = None


Triple = tuple[Pairs, Pairs, Pairs]
"""The pairs (x, x), (x, y) and (y, y): what the next step needs of one."""


@dataclass(frozen=True)
class NetworkCovariance(Covariance):
    r"""The covariance of a network's output as its widths grow, step by step [GG16, sect:going_deep].

    A linear layer of $K$ inputs with prior length-scale $l$ maps a covariance $c$ of its units to $cK/l^2 + l'^{-2}$;
    an activation is the covariance of its units; a sum of two branches, one of which ends in a linear layer of its own,
    adds theirs.

    Args:
        steps: The steps in the order of the forward pass; the last is the output.
        output_bias: The bias of the output layer where its prior is flat: the process's mean function.
    """

    steps: tuple[Step, ...]
    output_bias: float = 0.0

    def of_pairs(self, pairs: Pairs) -> Tensor:
        inputs = tuple(Pairs.of_identical(norm) for norm in (pairs.norm_x, pairs.norm_y))
        values: dict[str, Triple] = {"input": (inputs[0], pairs, inputs[1])}
        covariances: dict[str, tuple[Tensor, ...]] = {"input": tuple(part.product for part in values["input"])}
        for step in self.steps:
            if step.layer is None:
                made = tuple(sum(terms) for terms in zip(*(covariances[s] for s in step.sources), strict=True))
            else:
                made = tuple(step.layer.of_pairs(part) for part in values[step.sources[0]])
            covariances[step.name] = made
            of_x, both, of_y = made
            values[step.name] = (
                Pairs.of_identical(of_x.clamp_min(0.0).sqrt()),
                Pairs.of_process(of_x, both, of_y),
                Pairs.of_identical(of_y.clamp_min(0.0).sqrt()),
            )
        return covariances[self.steps[-1].name][1]

    @property
    def scales(self) -> dict[str, float | Tensor]:
        return {
            f"{step.name}_{name}": value
            for step in self.steps
            if step.layer is not None and step.n_inputs is not None
            for name, value in step.layer.scales.items()
        }

    def with_scales(self, values: Mapping[str, float | Tensor]) -> Self:
        steps = []
        for step in self.steps:
            own = {}
            if step.layer is not None and step.n_inputs is not None:
                own = {n: values[f"{step.name}_{n}"] for n in step.layer.scales if f"{step.name}_{n}" in values}
            steps.append(replace(step, layer=step.layer.with_scales(own)) if own and step.layer is not None else step)
        return replace(self, steps=tuple(steps))


def process_of(net: nn.Module, prior: Prior) -> NetworkCovariance:
    r"""The covariance of the Gaussian process that `net` tends to as it is made wider, under `prior`.

    Read off the network's graph (`torch.fx`): linear layers, activations, dropout (which the prior does not see), and
    sums of branches (residual networks). Every linear layer has the length-scale that `prior` gives it, its own width
    and its own bias. Use it with `exact_process`, `prior_draws` and `dropbayes.processes.theory.variance_ratio`.

    Args:
        net: A perceptron, with or without shortcuts, in any module style that `torch.fx` can trace.
        prior: The length-scales of its weights and biases. A bias with a flat prior ($l' = 0$) is allowed in the output
            layer alone, where it is the mean function.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 50), nn.ReLU(), nn.Dropout(0.1), nn.Linear(50, 1))
        >>> covariance = process_of(net, Prior(length_scale=1.0, following_length_scale="fan_in"))
        >>> x = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
        >>> expected = ReLU(1.0, 1.0)(x) + 1.0  # the output layer has l² = K, and a bias
        >>> bool((covariance(x) - expected).abs() < 1e-12)
        True
    """
    graph = fx.symbolic_trace(net).graph
    modules, steps = dict(net.named_modules()), []
    aliases: dict[fx.Node, str] = {}
    last_linear: tuple[str, nn.Linear] | None = None
    n_linear = 0
    for node in graph.nodes:
        kind = modules[node.target] if node.op == "call_module" else node.target
        sources = [aliases[a] for a in node.args if isinstance(a, fx.Node) and a in aliases]
        if node.op == "placeholder":
            aliases[node] = "input"
        elif node.op == "output":
            break
        elif isinstance(kind, _PASSED) or kind in _PASSED_FUNCTIONS:
            aliases[node] = sources[0]
        elif isinstance(kind, nn.Linear):
            steps.append(_linear(str(node.target), kind, sources[0], prior, first=n_linear == 0))
            last_linear, n_linear = (str(node.target), kind), n_linear + 1
            aliases[node] = steps[-1].name
        elif kind in _SUMS and len(sources) == 2:
            _check_sum(steps, sources, node.name)
            steps.append(Step(node.name, tuple(sources), None))
            aliases[node] = node.name
        elif (key := type(kind) if node.op == "call_module" else kind) in _ACTIVATIONS:
            steps.append(_activation(node.name, steps, sources[0], _ACTIVATIONS[key]()))
            aliases[node] = node.name
        else:
            raise ValueError(
                f"`net` must be made of linear layers, activations, dropout and sums; got {node.target!r} "
                f"({node.op}), whose covariance is not known here."
            )
    if not steps or last_linear is None:
        raise ValueError("`net` must have a linear layer.")
    return NetworkCovariance(tuple(steps), _mean_function(prior, *last_linear))


def _linear(name: str, module: nn.Linear, source: str, prior: Prior, *, first: bool) -> Step:
    scale = prior.of_weight(name, parameter="weight", first=first, fan_in=module.in_features)
    bias_scale: Any = 0.0
    if module.bias is not None:
        inverse = prior.of_bias(name, parameter="bias")
        bias_scale = 1 / inverse if isinstance(inverse, Tensor) or inverse else 0.0
    # The inputs' covariance is a sum over them, the units' is that of one: a layer adds up K of them.
    length_scale = scale if source == "input" else scale / module.in_features**0.5
    return Step(name.replace(".", "_"), (source,), Identity(length_scale, bias_scale), module.in_features)


def _activation(name: str, steps: list[Step], source: str, layer: Layer) -> Step:
    below = next((step for step in steps if step.name == source), None)
    if below is None or (below.layer is None and "input" in below.sources):
        raise ValueError(
            "`net` must apply activations to linear layers' outputs; their units are alike, inputs are not."
        )
    if isinstance(below.layer, Identity):
        # One step for both keeps the digits of nearly equal inputs.
        merged = layer.with_scales(below.layer.scales)
        return Step(name, below.sources, merged, below.n_inputs)
    return Step(name, (source,), layer)


def _check_sum(steps: list[Step], sources: list[str], name: str) -> None:
    linear = {step.name for step in steps if isinstance(step.layer, Identity)}
    if not linear & set(sources) or sources[0] == sources[1]:
        raise ValueError(f"`net` must add branches of which one ends in a linear layer of its own; {name} does not.")


def _mean_function(prior: Prior, name: str, module: nn.Linear) -> float:
    if module.bias is None or prior.of_bias(name, parameter="bias") != 0:
        return 0.0
    if module.out_features > 1:
        raise ValueError("`net` with a flat prior on its output bias must have one output.")
    return float(module.bias.detach())
