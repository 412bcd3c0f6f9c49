r"""The Gaussian process of a given network, from its layers, widths, length-scales and shortcuts.

As the number of units of every layer grows, their values become jointly Gaussian and independent of each other [GG16,
sect:going_deep]; those of a convolution's channels, at every position [Novak et al. 2019; Garriga-Alonso et al. 2019].
A convolution of $C$ channels with prior length-scale $l$ maps their covariance $c$ at the position $p$ of x and y to

$$c'(p) = \frac{C}{l^2} \sum_\delta c(sp + \delta) + l'^{-2},$$

the sum over the offsets of the kernel; a linear layer is one without positions, an activation acts on every position.
"""

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from dropbayes.layers import Prior, decays
from dropbayes.layers.family import is_zero
from dropbayes.layers.structure import stated_keep_prob
from dropbayes.processes.covariances import Erf, Identity, Layer, Quadrature, ReLU, Sigmoid, TanH
from dropbayes.processes.pairs import Covariance, Pairs
from dropbayes.runtime.validation import check_type
from dropbayes.tracing.views import check_modules, checked_network

_ELEMENTS = 2**22  # in a block of covariances, each pair of rows with all its positions
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
    **dict.fromkeys((getattr, operator.getitem, len, "size"), "shape"),  # read for later reshapes
}
"""What an operation does to the covariance of its input, by the class of a module, a function or a method's name."""


def _kind(operation: Any) -> str:
    """The entry of an operation, or of the class it inherits from (the layers of `dropbayes.layers`)."""
    return next((_KINDS[key] for key in (operation, *type(operation).__mro__) if key in _KINDS), "")


@dataclass(frozen=True)
class Step:
    """One operation of the network: its name, the steps it reads, and its map of their covariances."""

    name: str
    sources: tuple[str, ...]
    values: tuple[str, int]  # what it gives (inputs, units, channels at positions, flattened positions), and how many
    is_gaussian: bool = False  # whether these are sums over many units: of a layer with weights, or of such layers
    layer: Layer | None = None  # the units of an activation, or the scales of weights as an `Identity`
    # Before that: patches, sums or means of covariances [*positions, x row, y row].
    covariances: Callable[..., Tensor] | None = None

    @property
    def scales(self) -> dict[str, float | Tensor]:
        """The scales of its weights, if it multiplies by some."""
        return self.layer.scales if isinstance(self.layer, Identity) else {}

    def __call__(self, pairs: Pairs, *others: Pairs) -> Pairs:
        if self.covariances is not None:
            pairs = pairs.through(self.covariances, *others)
        if self.layer is None:
            return pairs
        # Weights map pairs exactly: nearly equal inputs keep their digits up to the first activation.
        return pairs.affine(**self.scales) if self.scales else self.layer.units(pairs)


@dataclass(frozen=True)
class NetworkCovariance(Covariance):
    r"""The covariance of a network's output as its widths grow, step by step [GG16, sect:going_deep].

    A linear layer of $K$ inputs with prior length-scale $l$ maps a covariance $c$ of its units to $cK/l^2 + l'^{-2}$; a
    sum of two branches, one of which ends in a linear layer that the other does not read, adds their covariances.
    Inputs of a convolutional network are images, `[row, channel, ...]`, or flat rows of them.
    """

    steps: tuple[Step, ...]  # in the order of the forward pass
    output_bias: float = 0.0  # of the output layer where its prior is flat: the process's mean function
    input_shape: tuple[int, ...] | None = None  # of one image, channels first; None without convolutions

    def __call__(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        if self.input_shape is None:
            return super().__call__(x, y)
        y = x if y is None else y
        at_once = max(1, _ELEMENTS // max(1, math.prod(self.input_shape[1:]) * y.shape[0]))
        return torch.cat([super(NetworkCovariance, self).__call__(rows, y) for rows in x.split(at_once)], -2)

    def parts(self, x: Tensor, name: str) -> Tensor:
        """Images as `[*positions, row, channel]`."""
        if self.input_shape is None:
            return x
        if x.flatten(1).shape[1] != math.prod(self.input_shape):
            rule = f"hold inputs of the shape {self.input_shape}, flat or not"
            raise ValueError(f"`{name}` must {rule}; got {tuple(x.shape[1:])}.")
        return x.reshape(-1, *self.input_shape).movedim((0, 1), (-2, -1))

    def of_pairs(self, pairs: Pairs) -> Tensor:
        known = {"input": pairs}
        for step in self.steps:
            known[step.name] = step(*(known[source] for source in step.sources))
        return known[self.steps[-1].name].product

    @property
    def scales(self) -> dict[str, float | Tensor]:
        return {f"{step.name}_{name}": value for step in self.steps for name, value in step.scales.items()}

    def with_scales(self, values: Mapping[str, float | Tensor]) -> Self:
        scaled = ((step, step.layer and step.layer.with_own_scales(values, f"{step.name}_")) for step in self.steps)
        return replace(self, steps=tuple(replace(step, layer=layer) for step, layer in scaled))


def process_of(
    net: nn.Module,
    prior: Prior,
    *,
    input_shape: Sequence[int] | None = None,
    keep_probs: Mapping[str, float] | None = None,
) -> NetworkCovariance:
    r"""The covariance of the Gaussian process that `net` tends to as its widths grow, under `prior`.

    Read off the network's graph (`torch.fx`): linear layers, convolutions, activations, dropout, and sums of branches
    (residual networks). Every layer has the length-scale from `prior`, which is the prior of the objective, its own
    width and its own bias. Use it with `exact_process`, `prior_draws` and `dropbayes.processes.variance_ratio`.

    Args:
        net: A perceptron or a convolutional network, with or without shortcuts, that `torch.fx` can trace.
        prior: The length-scales. A bias with a flat prior ($l' = 0$) is allowed only in the output layer, where it is
            the mean function.
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
    check_modules(net := checked_network(net))
    check_type("prior", prior, Prior, "be a record Prior(...)")
    if _kind(net) == "weights":
        raise ValueError("`net` must hold its layers; got one layer itself. Pass nn.Sequential(net).")
    kept = {}
    if prior.applies_to == "stored":
        kept = {decay.name: decay.keep_prob for decay in decays(net, prior=prior, keep_probs=keep_probs)}
    reading = _Reading(net, prior, kept)
    if reading.convolutional and input_shape is None:
        raise ValueError("`input_shape` must say the shape of one input of a convolutional network: (channels, ...).")
    try:
        nodes = _LayerTracer().trace(net).nodes
    except fx.proxy.TraceError as error:
        raise ValueError(f"`net` must run the same layers for every input, to be read as them: {error}.") from None
    for node in nodes:
        reading.read(node)
    name, last = next(reading.weighted[step.name] for step in reversed(reading.steps) if step.name in reading.weighted)
    biased = [one for one, module in reading.weighted.values() if module.bias is not None]
    flat = {one for one in biased if is_zero(prior.of_bias(one, parameter="bias"))}
    if flat - {name} or (flat and len(last.bias) > 1):
        raise ValueError(f"`prior` must be flat for the bias of a single output alone; it is for {sorted(flat)}.")
    output_bias = float(last.bias.detach()) if flat else 0.0
    shape = tuple(input_shape) if reading.convolutional and input_shape is not None else None
    return NetworkCovariance(tuple(reading.steps), output_bias, shape)


class _LayerTracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:  # those of `dropbayes.layers`, too
        return _kind(m) == "weights" or super().is_leaf_module(m, module_qualified_name)


class _Reading:
    """The steps of a network, read node by node off its graph."""

    def __init__(self, net: nn.Module, prior: Prior, kept: Mapping[str, float]) -> None:
        self.modules, self.prior, self.kept = dict(net.named_modules()), prior, kept
        self.convolutional = any(isinstance(module, _CONVOLUTIONS) for module in net.modules())
        self.steps: list[Step] = []
        self.step_of: dict[fx.Node, Step] = {}
        self.weighted: dict[str, tuple[str, Any]] = {}  # the name and module of each step with weights

    def read(self, node: fx.Node) -> None:
        operation = self.modules[str(node.target)] if node.op == "call_module" else node.target
        if node.op == "placeholder":
            self.step_of[node] = Step("input", (), ("inputs", 0))
        elif node.op == "output":
            self._end_at(node.args[0])
        elif _kind(operation) != "shape":
            sources = [self.step_of[a] for a in node.args if isinstance(a, fx.Node) and a in self.step_of]
            step = self._step(node, operation, *sources) if sources else None
            if step is None:
                rule = "linear layers, convolutions, activations, dropout, sums, and positions that are flattened"
                got = f"{node.target!r} ({node.op}), whose covariance is not implemented"
                raise ValueError(f"`net` must be made of {rule}; got {got}.")
            self.step_of[node] = step
            if step is not sources[0]:
                self.steps.append(step)

    def _end_at(self, output: Any) -> None:
        """Deletes the steps after the output."""
        last = self.step_of.get(output) if isinstance(output, fx.Node) else None
        if last is None or not last.is_gaussian:
            raise ValueError("`net` must have a linear layer, and return what a layer or a sum of layers gives.")
        if last.values[0] != "units":
            raise ValueError("`net` must flatten its positions before a last linear layer: its output has some left.")
        del self.steps[self.steps.index(last) + 1 :]

    def _step(self, node: fx.Node, operation: Any, source: Step, *others: Step) -> Step | None:
        """The step of a node, or the source it passes on; None when the node is not supported."""
        kind, (values, n_units), sources = _kind(operation), source.values, (source.name, *(s.name for s in others))
        if kind == "passed":
            return source
        options: Any = (*node.args[1:], *node.kwargs.values())
        if kind == "flattened" and node.op == "call_module":
            options = operation.start_dim, operation.end_dim
        sizes = options[0] if len(options) == 1 else options
        is_flat = isinstance(sizes, (tuple, list)) and len(sizes) == 2 and -1 in sizes  # one axis for each input
        if (kind == "flattened" and options in ((1,), (1, -1))) or (kind == "reshaped" and is_flat):
            if values != "positions":
                return source
            # All positions as separate units, of which only the mean covariance is known.
            return Step(node.name, sources, ("flattened", n_units), covariances=lambda c: c.flatten(0, -3).mean(0))
        if kind == "weights":
            return self._weights(str(node.target), operation, source)
        if kind == "sum" and len(others) == 1 and node.kwargs.get("alpha", 1) == 1:
            other, both = others[0], source.is_gaussian and others[0].is_gaussian
            if not (self._is_new(source, other) or self._is_new(other, source)) or source.values != other.values:
                rule = "add branches with the same units and positions, one of which ends in a layer of its own"
                raise ValueError(f"`net` must {rule}; {node.name} does not.")
            return Step(node.name, sources, source.values, both, covariances=torch.add)
        layer = _activation_layer(node, operation)
        if layer is None:
            return None
        if not source.is_gaussian:
            rule = "apply activations to the outputs of layers or to their sums, and before it flattens positions"
            raise ValueError(f"`net` must {rule}; {node.name} reads {source.name}, whose units are not Gaussian.")
        return Step(node.name, sources, source.values, layer=layer)

    def _is_new(self, step: Step, other: Step) -> bool:
        """Whether a step has weights of its own, on which the other does not depend: their product has mean 0."""
        read = {other.name}
        for one in reversed(self.steps):
            read.update(one.sources if one.name in read else ())
        return step.name in self.weighted.keys() - read

    def _weights(self, name: str, module: Any, source: Step) -> Step:
        step_name, patches = name.replace(".", "_"), None
        if step_name in self.weighted:
            raise ValueError(f"`net` must use each layer once; {name} is used again, with the same weights.")
        values, on_positions = source.values[0], not isinstance(module, nn.Linear)
        if on_positions != (values == "positions" or (values == "inputs" and self.convolutional)):
            raise ValueError("`net` must flatten its positions before a linear layer, and not before others.")
        if on_positions:
            if module.groups != 1 or module.padding_mode != "zeros":
                raise ValueError("`net` must have convolutions of one group that are padded with zeros.")
            convolve = (F.conv1d, F.conv2d, F.conv3d)[len(module.kernel_size) - 1]
            geometry = {"stride": module.stride, "padding": module.padding, "dilation": module.dilation}
            patches = functools.partial(_patches, functools.partial(convolve, **geometry), module.kernel_size)
        kept, fan_in = self.kept.get(f"{name}.weight", stated_keep_prob(module)), module.weight[0].numel()
        scale = self.prior.of_weight(name, parameter="weight", first=values == "inputs", fan_in=fan_in, keep_prob=kept)
        inverse = 0.0 if module.bias is None else self.prior.of_bias(name, parameter="bias")
        bias_scale = 0.0 if is_zero(inverse) else 1 / inverse
        # The inputs' covariance is a sum over them, the units' is that of one: a layer adds up K of them.
        length_scale = scale if values == "inputs" else scale / module.weight.shape[1] ** 0.5
        self.weighted[step_name] = (name, module)
        given = ("positions" if on_positions else "units", module.weight.shape[0])
        return Step(step_name, (source.name,), given, True, Identity(length_scale, bias_scale), patches)


def _patches(convolve: Callable[[Tensor, Tensor], Tensor], kernel: tuple[int, ...], covariance: Tensor) -> Tensor:
    """The sum over the offsets of a kernel, for covariances `[*positions, x row, y row]`."""
    pairs = covariance.flatten(-2).movedim(-1, 0)[:, None]
    summed = convolve(pairs, pairs.new_ones(1, 1, *kernel))[:, 0]
    return summed.movedim(0, -1).unflatten(-1, covariance.shape[-2:])


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
