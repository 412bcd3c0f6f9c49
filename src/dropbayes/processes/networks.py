r"""The Gaussian process of a given network, from its layers, widths, length-scales and shortcuts."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from dropbayes.covariances import Covariance, Erf, Identity, Layer, Pairs, Quadrature, ReLU, Sigmoid, TanH
from dropbayes.processes import convolutions as positions
from dropbayes.processes.convolutions import ConvolutionalCovariance
from dropbayes.weight_layers import decays
from dropbayes.weight_layers.precision import Prior
from dropbayes.weight_layers.structure import stated_keep_prob

__all__ = ["NetworkCovariance", "process_of"]

_CLOSED_FORMS: dict[Any, type[Layer]] = {
    **dict.fromkeys((nn.ReLU, torch.relu, F.relu, "relu"), ReLU),
    **dict.fromkeys((nn.Tanh, torch.tanh, F.tanh, "tanh"), TanH),
    **dict.fromkeys((nn.Sigmoid, torch.sigmoid, F.sigmoid, "sigmoid"), Sigmoid),
    **dict.fromkeys((torch.erf, "erf"), Erf),
}
_INTEGRATED: set[Any] = {nn.GELU, nn.SiLU, nn.Softplus, nn.ELU, nn.CELU, nn.SELU, nn.LeakyReLU, nn.Mish, nn.Softsign}
_INTEGRATED |= {F.gelu, F.silu, F.softplus, F.elu, F.celu, F.selu, F.leaky_relu, F.mish, F.softsign}
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_KINDS: dict[Any, str] = {
    **dict.fromkeys((nn.Linear, *_CONVOLUTIONS), "weights"),
    **dict.fromkeys((nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.Identity), "passed"),
    **dict.fromkeys((F.dropout, F.dropout1d, F.dropout2d, F.dropout3d), "passed"),
    **dict.fromkeys((nn.Flatten, torch.flatten, "flatten"), "flattened"),
    **dict.fromkeys((torch.reshape, "reshape", "view"), "reshaped"),
    **dict.fromkeys((operator.add, torch.add, "add"), "sum"),
    **dict.fromkeys((torch.mean, "mean"), "mean"),
    **dict.fromkeys((nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d), "pooled"),
    **dict.fromkeys((nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d), "pooled"),
    **dict.fromkeys((F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d), "pooled to one"),
    **dict.fromkeys((getattr, operator.getitem, len, "size"), "shape"),  # read for later reshapes
}
"""What an operation does to the covariance of its input, by the class of a module, a function or a method's name."""


def _kind(operation: Any) -> str:
    """The entry of an operation, or of the class it inherits from (the layers of `dropbayes.layers`)."""
    keys = type(operation).__mro__ if isinstance(operation, nn.Module) else (operation,)
    return next((_KINDS[key] for key in keys if key in _KINDS), "")


@dataclass(frozen=True)
class Step:
    """One operation of the network: its name, the steps it reads, and its map of their covariances.

    `layer` is None for a sum. `n_inputs` is the number of units that a linear layer sums; None for an activation.
    """

    name: str
    sources: tuple[str, ...]
    layer: Layer | None
    n_inputs: int | None = None


Triple = tuple[Pairs, Pairs, Pairs]
"""The pairs (x, x), (x, y) and (y, y), which the next step needs."""


@dataclass(frozen=True)
class NetworkCovariance(Covariance):
    r"""The covariance of a network's output as its widths grow, step by step [GG16, sect:going_deep].

    A linear layer of $K$ inputs with prior length-scale $l$ maps a covariance $c$ of its units to $cK/l^2 + l'^{-2}$;
    an activation is the covariance of its units; a sum of two branches, one of which ends in a linear layer of its own,
    adds their covariances.

    Args:
        steps: The steps in the order of the forward pass; the last is the output.
        output_bias: The bias of the output layer where its prior is flat: the process's mean function.
    """

    steps: tuple[Step, ...]
    output_bias: float = 0.0

    def of_pairs(self, pairs: Pairs) -> Tensor:
        inputs = tuple(Pairs.of_identical(norm) for norm in (pairs.norm_x, pairs.norm_y))
        values: dict[str, Triple] = {"input": (inputs[0], pairs, inputs[1])}
        covariances: dict[str, tuple[Tensor, ...]] = {"input": tuple(pairs.product for pairs in values["input"])}
        for step in self.steps:
            if step.layer is None:
                covariance_terms = tuple(
                    sum(terms) for terms in zip(*(covariances[s] for s in step.sources), strict=True)
                )
            else:
                covariance_terms = tuple(step.layer.of_pairs(pairs) for pairs in values[step.sources[0]])
            covariances[step.name] = covariance_terms
            of_x, both, of_y = covariance_terms
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
            scales = {}
            if step.layer is not None and step.n_inputs is not None:
                scales = {n: values[f"{step.name}_{n}"] for n in step.layer.scales if f"{step.name}_{n}" in values}
            steps.append(
                replace(step, layer=step.layer.with_scales(scales)) if scales and step.layer is not None else step
            )
        return replace(self, steps=tuple(steps))


def process_of(
    net: nn.Module,
    prior: Prior,
    *,
    input_shape: Sequence[int] | None = None,
    keep_probs: Mapping[str, float] | None = None,
) -> NetworkCovariance | ConvolutionalCovariance:
    r"""The covariance of the Gaussian process that `net` tends to as its widths grow, under `prior`.

    Read off the network's graph (`torch.fx`): linear layers, convolutions, activations, averages over positions,
    dropout, and sums of branches (residual networks). Every layer has the length-scale from `prior`, which is the prior
    of the objective, its own width and its own bias. Use it with `exact_process`, `prior_draws` and
    `dropbayes.processes.variance_ratio`.

    Args:
        net: A perceptron or a convolutional network, with or without shortcuts, in any module style that `torch.fx` can
            trace.
        prior: The length-scales of its weights and biases. A bias with a flat prior ($l' = 0$) is allowed only in the
            output layer, where it is the mean function.
        input_shape: The shape of one input of a convolutional network: channels, then the extent of each axis. Its
            covariance takes inputs of that shape, or flat ones.
        keep_probs: As for `negative_elbo`; used only by a prior with `applies_to="stored"`, which depends on them.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 50), nn.ReLU(), nn.Dropout(0.1), nn.Linear(50, 1))
        >>> covariance = process_of(net, Prior(length_scale=1.0, hidden_length_scale="fan_in"))
        >>> x = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
        >>> expected = ReLU(1.0, 1.0)(x) + 1.0  # the output layer has l² = K, and a bias
        >>> bool((covariance(x) - expected).abs() < 1e-12)
        True
    """
    convolutional = any(isinstance(module, _CONVOLUTIONS) for module in net.modules())
    if prior.applies_to == "stored":
        kept = {decay.name: decay.keep_prob for decay in decays(net, prior=prior, keep_probs=keep_probs)}
    else:
        kept = {}
    reading = _Reading(net, prior, kept, convolutional=convolutional)
    if reading.convolutional and input_shape is None:
        raise ValueError("`input_shape` must say the shape of one input of a convolutional network: (channels, ...).")
    for node in _LayerTracer().trace(net).nodes:
        reading.read(node)
    output_bias = _mean_function(prior, *reading.last)
    if not reading.convolutional:
        return NetworkCovariance(tuple(reading.steps), output_bias)
    assert input_shape is not None
    covariance = ConvolutionalCovariance(tuple(reading.steps), tuple(input_shape), output_bias)
    covariance.diagonal(torch.zeros(1, *covariance.input_shape))  # raises here when shapes do not match
    return covariance


class _LayerTracer(fx.Tracer):
    """A tracer that does not look into the layers with weights, such as those of `dropbayes.layers`."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, (nn.Linear, *_CONVOLUTIONS)) or super().is_leaf_module(m, module_qualified_name)


class _Reading:
    """The steps of a network, read node by node off its graph."""

    def __init__(self, net: nn.Module, prior: Prior, kept: Mapping[str, float], *, convolutional: bool) -> None:
        self.modules, self.convolutional = dict(net.named_modules()), convolutional
        self.prior, self.kept = prior, kept
        self.steps: list[Any] = []
        self.of_input = {"input"}  # the steps that no weights come before
        self.names: dict[fx.Node, str] = {}
        self.weighted: dict[str, tuple[str, Any]] = {}  # the name and module of each step with weights

    def read(self, node: fx.Node) -> None:
        operation = self.modules[str(node.target)] if node.op == "call_module" else node.target
        if node.op == "placeholder":
            self.names[node] = "input"
        elif node.op == "output":
            self._end_at(node.args[0])
        elif _kind(operation) != "shape":
            sources = tuple(self.names[a] for a in node.args if isinstance(a, fx.Node) and a in self.names)
            step = self._step(node, operation, sources) if sources else None
            if step is None:
                raise ValueError(
                    "`net` must be made of linear layers, convolutions, activations, averages over all positions or "
                    f"windows, dropout and sums; got {node.target!r} ({node.op}), whose covariance is not implemented."
                )
            if not isinstance(step, str):
                self.steps.append(step)
                if step.name not in self.weighted and self.of_input.issuperset(sources):
                    self.of_input.add(step.name)
            self.names[node] = step if isinstance(step, str) else step.name

    def _end_at(self, output: Any) -> None:
        """Deletes the steps after the output."""
        name = self.names.get(output) if isinstance(output, fx.Node) else None
        positions = [position for position, step in enumerate(self.steps) if step.name == name]
        if not positions:
            raise ValueError("`net` must have a linear layer, and return what a layer or a sum of layers gives.")
        del self.steps[positions[0] + 1 :]

    @property
    def last(self) -> tuple[str, Any]:
        """The name and the module of the last layer with weights; the first step is one."""
        return next(self.weighted[step.name] for step in reversed(self.steps) if step.name in self.weighted)

    def _step(self, node: fx.Node, operation: Any, sources: tuple[str, ...]) -> Any:
        """The step of a node, or the name of the step it passes on; None when the node is not supported."""
        kind = _kind(operation)
        flattens = kind == "flattened" or (kind == "reshaped" and _is_flat(node))
        if kind == "passed" or (flattens and not self.convolutional):
            return sources[0]
        if kind == "weights":
            step = self._weighted_sum(str(node.target), operation, sources[0])
            if step.name in self.weighted:
                raise ValueError(f"`net` must use each layer once; {node.target} is used again, with the same weights.")
            self.weighted[step.name] = (str(node.target), operation)
            return step
        if kind == "sum" and len(sources) == 2:
            _check_sum(self.steps, list(sources), node.name, convolutional=self.convolutional)
            return (
                positions.Step(node.name, sources, positions.Sum())
                if self.convolutional
                else Step(node.name, sources, None)
            )
        layer = _activation_layer(node, operation)
        if layer is not None:
            return self._activation(node.name, sources[0], layer)
        if not self.convolutional:
            return None
        if flattens:
            return positions.Step(node.name, sources, positions.Flatten())
        if kind == "pooled":
            n_axes = int(type(operation).__name__[-2])
            return positions.Step(node.name, sources, positions.pooling(operation, n_axes))
        if (kind == "mean" and _averages_positions(node)) or (kind == "pooled to one" and _is_one(node.args[1])):
            return positions.Step(node.name, sources, positions.Pooling(None))
        return None

    def _activation(self, name: str, source: str, layer: Layer) -> Any:
        below = next((step for step in self.steps if step.name == source), None)
        if below is None or (not self.convolutional and below.layer is None and "input" in below.sources):
            raise ValueError(
                "`net` must apply activations to the outputs of layers; units share one distribution, inputs do not."
            )
        if self.convolutional:
            return positions.Step(name, (source,), positions.Activation(layer))
        if isinstance(below.layer, Identity):
            # One step for both keeps the digits of nearly equal inputs.
            return Step(name, below.sources, layer.with_scales(below.layer.scales), below.n_inputs)
        return Step(name, (source,), layer)

    def _weighted_sum(self, name: str, module: Any, source: str) -> Any:
        scale = self.prior.of_weight(
            name,
            parameter="weight",
            first=source in self.of_input,
            fan_in=module.weight[0].numel(),
            keep_prob=self.kept.get(f"{name}.weight", stated_keep_prob(module)),
        )
        inverse = 0.0 if module.bias is None else self.prior.of_bias(name, parameter="bias")
        bias_scale = 1 / inverse if isinstance(inverse, Tensor) or inverse else 0.0
        step_name = name.replace(".", "_")
        if not self.convolutional:
            # The inputs' covariance is a sum over them, the units' is that of one: a layer adds up K of them.
            length_scale = scale if source == "input" else scale / module.in_features**0.5
            return Step(step_name, (source,), Identity(length_scale, bias_scale), module.in_features)
        if isinstance(module, nn.Linear):
            return positions.Step(step_name, (source,), positions.WeightedSum(scale, bias_scale, module.out_features))
        return positions.Step(step_name, (source,), positions.convolution(module, scale, bias_scale))


def _is_flat(node: fx.Node) -> bool:
    """Whether a reshape flattens each input to one axis."""
    sizes = node.args[1] if len(node.args) == 2 else node.args[1:]
    return isinstance(sizes, (tuple, list)) and len(sizes) == 2 and -1 in sizes


def _is_one(sizes: Any) -> bool:
    return sizes == 1 or (isinstance(sizes, (tuple, list)) and set(sizes) == {1})


def _averages_positions(node: fx.Node) -> bool:
    """Whether a mean is taken over all axes after the channels, without `keepdim`."""
    axes: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    keepdim = node.args[2] if len(node.args) > 2 else node.kwargs.get("keepdim", False)
    axes = sorted([axes] if isinstance(axes, int) else list(axes or []))
    return not keepdim and axes in ([2], [2, 3], [2, 3, 4], [-1], [-2, -1], [-3, -2, -1])


def _activation_layer(node: fx.Node, kind: Any) -> Layer | None:
    """The covariance of an activation with the arguments it has in the network; None for any other node."""
    key = type(kind) if node.op == "call_module" else kind
    if key in _CLOSED_FORMS:
        return _CLOSED_FORMS[key](1.0, 0.0)
    arguments = (*node.args[1:], *node.kwargs.values())
    if key not in _INTEGRATED or any(isinstance(argument, fx.Node) for argument in arguments):
        return None

    def function(u: Tensor) -> Tensor:
        return kind(u.clone(), *node.args[1:], **node.kwargs)  # which may work in place

    return Quadrature(1.0, 0.0, function=function)


def _check_sum(steps: list[Any], sources: list[str], name: str, *, convolutional: bool) -> None:
    if convolutional:
        weighted = {step.name for step in steps if isinstance(step.operation, positions.WeightedSum)}
    else:
        weighted = {step.name for step in steps if isinstance(step.layer, Identity)}
    if not weighted & set(sources) or sources[0] == sources[1] or (convolutional and "input" in sources):
        raise ValueError(f"`net` must add branches one of which ends in its own layer; {name} does not.")


def _mean_function(prior: Prior, name: str, module: Any) -> float:
    if module.bias is None or prior.of_bias(name, parameter="bias") != 0:
        return 0.0
    if len(module.bias) > 1:
        raise ValueError("`net` with a flat prior on its output bias must have one output.")
    return float(module.bias.detach())
