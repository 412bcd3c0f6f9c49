r"""The weight layers of a network, their fan-in and their dropout: from its structure, or by tracing an input.

The pass is that of `dropbayes.tracing`, in which dropout is not applied but recorded with its output. The record
follows the tensor through operations that preserve a mask: reshapes, elementwise products, non-linearities with
σ(0) = 0 [GG16, section "Insights"]. A product with a parameter ends the record, which gives the keep probability of its
input. (The factor 1/p passes only a positively homogeneous σ: after another one a kept unit's weight is θ, not θ/p.)
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils.weak import WeakIdKeyDictionary

from dropbayes.layers.precision import Prior
from dropbayes.tracing import Interception, Recorder, SiteNames
from dropbayes.tracing.operations import LOOKUPS, tensor_leaves
from dropbayes.tracing.views import check_modules

_TABLES = (nn.Embedding, nn.EmbeddingBag)
_CONVOLUTION = nn.modules.conv._ConvNd
_PRODUCTS = (nn.Linear, nn.Bilinear, _CONVOLUTION, *_TABLES, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)


@runtime_checkable
class DroppedLayer(Protocol):
    """A weight layer that states the keep probability of each of its parameters."""

    def parameter_keep_probs(self) -> dict[str, float]:
        """The keep probability of every parameter whose prior is a weight decay, by its name in the layer."""


def states_keep_probs(module: nn.Module) -> bool:
    """Whether the layer is a `DroppedLayer`, read off its class: a failed lookup on a module is slow."""
    return issubclass(type(module), DroppedLayer)


def _covers_submodules(module: nn.Module) -> bool:
    return states_keep_probs(module) or isinstance(module, nn.MultiheadAttention)


def kl_is_weight_decay(module: Any) -> bool:
    """Whether a weight layer's KL is, up to a constant, a multiple of its squared weights: all but some of `layers`."""
    return module.kl_is_weight_decay if hasattr(type(module), "kl_is_weight_decay") else True


def matrices(module: nn.Module) -> dict[str, nn.Parameter]:
    """The module's direct parameters that may be matrices: `weight` of two axes or more, others of exactly two.

    Others of three axes are tokens and positions that networks add (`[1, position, unit]`).
    """
    known = {n: p for n, p in module._parameters.items() if not isinstance(p, (type(None), nn.UninitializedParameter))}
    return {n: p for n, p in known.items() if (p.dim() >= 2 if n == "weight" else p.dim() == 2 and min(p.shape) > 1)}


def is_weight_layer(module: nn.Module) -> bool:
    """Whether `module` multiplies its input by a weight matrix of its own, of any name and parametrisation."""
    if states_keep_probs(module) or isinstance(module, _PRODUCTS):
        return True
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):  # whose weights, of any shape, multiply element by element
        return False
    return isinstance(module._parameters.get("weight"), nn.UninitializedParameter) or bool(matrices(module))


def is_dropout(module: Any) -> bool:
    return isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0


def is_bias(parameter: str) -> bool:
    """Whether a weight layer adds its parameter of this name rather than multiplying by it (`bias_hh_l0`)."""
    return "bias" in parameter.split(".")[-1]


def weight_layers(net: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The weight layers of `net` in registration order, without submodules of one (an attention's `out_proj`)."""
    covered: set[nn.Module] = set()
    for name, module in net.named_modules():
        if parametrize.is_parametrized(module):
            covered.update(module.parametrizations.modules())
        if module not in covered and is_weight_layer(module):
            if _covers_submodules(module):  # any other may contain further weight layers
                covered.update(module.modules())
            yield name, module


def layer_parameters(module: nn.Module) -> Iterator[str]:
    """The names of one weight layer's weights and biases, with computed ones (`weight_norm`), without those inside."""
    inside = {layer for name, layer in weight_layers(module) if name}
    for name, _ in module.named_parameters():
        owner, _, parameter = name.rpartition(".")
        if "parametrizations" in owner.split("."):
            continue
        submodule = module.get_submodule(owner)
        sources = {f"{weight}_{suffix}" for weight in _weight_hooks(submodule) for suffix in ("g", "v", "orig", "u")}
        if _covers_submodules(module) or (submodule not in inside and parameter not in sources):
            yield name
    yield from (*getattr(module, "parametrizations", {}), *_weight_hooks(module))


def qualified_names(layer: str, module: nn.Module) -> list[str]:
    return [f"{layer}.{parameter}".lstrip(".") for parameter in layer_parameters(module)]


def _weight_hooks(module: nn.Module) -> dict[str, Any]:
    """The hooks of the older `weight_norm` and `spectral_norm`, by the weight that each computes."""
    hooks = module._forward_pre_hooks.values()
    return {hook.name: hook for hook in hooks if isinstance(hook, (WeightNorm, SpectralNorm))}


def parameter_value(module: nn.Module, name: str) -> Tensor:
    """The value of a weight layer's parameter, recomputed if it depends on others."""
    owner, _, parameter = name.rpartition(".")
    module = module.get_submodule(owner)
    hook = _weight_hooks(module).get(parameter)
    if hook is None:
        return getattr(module, parameter)
    options = {"do_power_iteration": False} if isinstance(hook, SpectralNorm) else {}
    return hook.compute_weight(module, **options)


def hook_owners(module: nn.Module) -> Iterator[Any]:
    """The objects whose methods, or who themselves, are hooks of the module: such as those of `add_dropout`."""
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    return (getattr(hook, "__self__", hook) for hook in hooks)


def hook_keep_prob(module: nn.Module) -> float | None:
    """The keep probability that a hook of the module (`add_dropout`) states for its input."""
    return next((owner.keep_prob for owner in hook_owners(module) if hasattr(owner, "keep_prob")), None)


def keep_probs_by_order(net: nn.Module) -> dict[str, float]:
    r"""The keep probability $p$ before every weight layer of `net`, read off its structure.

    The fallback where there is no input to trace (see `keep_probs`). A layer's own statement (the layers of
    `dropbayes.layers`, networks made by `add_dropout`) is multiplied by those of the `nn.Dropout` modules registered
    between the preceding weight layer and itself. That is certain in an `nn.Sequential`. In any other module the
    registration order may differ from the order of use, which is warned of. Functional dropout is not detected.

    Example:
        >>> keep_probs_by_order(nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Dropout(0.25), nn.Linear(8, 1)))
        {'0': 1.0, '3': 0.75}
    """
    layers = dict(weight_layers(net))
    by_layer: dict[str, float] = {}
    pending, guessed = 1.0, []
    for name, module in net.named_modules():
        if name in layers:
            by_layer[name] = pending * stated_keep_prob(module)
            pending = 1.0
        elif is_dropout(module):
            pending *= 1.0 - module.p
            if not isinstance(net.get_submodule(name.rpartition(".")[0]), nn.Sequential):
                guessed.append(name)
    if guessed and layers:
        what = f"The order in which {', '.join(guessed)} act on the weight layers"
        remedy = "Pass `keep_probs=dropbayes.layers.keep_probs(net, x)`, which traces an input"
        warnings.warn(f"{what} is guessed from the order of registration. {remedy}.", stacklevel=3)
    return by_layer


class KeepProbs(dict[str, float]):
    """Keep probabilities by parameter name in the order of use, with the layers that read the network's own input."""

    def __init__(self, keep_probs: Mapping[str, float], input_layers: frozenset[str]) -> None:
        super().__init__(keep_probs)
        self.input_layers = input_layers


def input_layers(net: nn.Module, prior: Prior, keep_probs: Mapping[str, float] | None) -> frozenset[str]:
    """The weight layers that read the network's own input: traced, or else the first in the order of registration.

    They have the paper's $l$, the others its $K$ [GG16, eq:L:GP-MC-reg-lengthscale]. A warning says where the guess
    matters: outside an `nn.Sequential` the order of registration may differ from the order of use.
    """
    if isinstance(keep_probs, KeepProbs):
        return keep_probs.input_layers
    names = [name for name, _ in weight_layers(net)]
    parents = {net.get_submodule(name.rpartition(".")[0]) for name in names}
    is_chain = all(isinstance(parent, nn.Sequential) for parent in parents)
    if prior.hidden_length_scale is not None and len(names) > 1 and not is_chain:
        what = f"Which layers read the input is guessed from the order of registration ({names[0]})"
        remedy = "Pass `keep_probs=dropbayes.layers.keep_probs(net, x)`, which traces an input"
        warnings.warn(f"{what}. {remedy}.", stacklevel=4)
    return frozenset(names[:1])


def stated_keep_prob(module: Any) -> float:
    """The keep probability that a layer, or the hook `add_dropout` gave it, states for its input; 1 if neither does."""
    stated = module.keep_prob if hasattr(type(module), "keep_prob") else hook_keep_prob(module)
    return 1.0 if stated is None else stated


def parameter_keep_prob(module: Any, parameter: str, keep_prob: float) -> float | None:
    """That of one parameter of a layer whose input is kept with `keep_prob`; None if its prior is no weight decay."""
    if states_keep_probs(module):
        stated = module.parameter_keep_probs().get(parameter)
        if stated is None or is_bias(parameter) or not reads_input(module, parameter):
            return stated
        return stated * keep_prob / stated_keep_prob(module)
    if is_bias(parameter):
        return 1.0
    if isinstance(module, nn.RNNBase) and not reads_input(module, parameter):
        # torch applies an RNN's own dropout between its stacked layers: to the inputs of every layer but the first.
        return 1.0 - float(module.dropout) if parameter.startswith("weight_ih") else 1.0
    # Dropout before an attention reaches its input projections only; a cell's hidden state is not its input.
    return keep_prob if reads_input(module, parameter) else 1.0


def reads_input(module: nn.Module, parameter: str) -> bool:
    """Whether this weight multiplies the layer's own input, not a recurrent state or an intermediate result."""
    if isinstance(module, nn.RNNBase):
        return parameter.startswith("weight_ih_l0")
    return parameter not in ("weight_hh", "out_proj.weight")


def _unit_axis(module: nn.Module, parameter: str) -> int:
    """The axis of a weight that indexes the units of the layer's input."""
    if isinstance(module, (*_TABLES, nn.modules.conv._ConvTransposeNd)):
        return 0
    if isinstance(module, _PRODUCTS) or parameter != "weight":
        return 1
    # A class outside torch.nn (the Conv1D of GPT-2) may store its matrix as inputs x outputs; it then has `nf`.
    return 0 if "nf" in module.__dict__ else 1


def fan_in(module: nn.Module, parameter: str, weight: Tensor) -> int:
    """The paper's K: the number of inputs that each output of the layer sums."""
    if isinstance(module, nn.modules.conv._ConvTransposeNd):
        return weight.shape[0] // module.groups * weight[0, 0].numel()
    if isinstance(module, _TABLES) or weight.dim() < 2:
        return 1  # a lookup reads one vector
    return weight.shape[0] if _unit_axis(module, parameter) == 0 else weight[0].numel()


def n_units(module: nn.Module, parameter: str, weight: Tensor) -> int:
    """The paper's Q: the number of input units, each dropped with one Bernoulli variable."""
    if is_bias(parameter) or weight.dim() < 2:
        return weight.numel()
    if isinstance(module, _CONVOLUTION):
        return module.in_channels
    n_masks = 3 if parameter == "in_proj_weight" else 1  # an attention's query, key and value have one mask each
    return n_masks * weight.shape[_unit_axis(module, parameter)]


class _Reading(Recorder):
    """A recorder that also finds the weight layers whose input has passed no other weight layer."""

    def __init__(
        self, names: SiteNames, weights: dict[int, str], layers: list[tuple[Tensor, str]], inputs: list[Tensor]
    ) -> None:
        super().__init__(names, weights=weights, every_dropout=True)
        self.freezes_statistics = True
        self.input_layers: set[str] = set()
        # By tensor: whether it holds values of the input, and the layers whose weights it holds.
        self._origins: Any = WeakIdKeyDictionary()
        for tensor, layer in layers:  # a tied weight belongs to several
            self._origins[tensor] = False, self._origins.get(tensor, (False, frozenset()))[1] | {layer}
        self._origins.update((tensor, (True, frozenset())) for tensor in inputs)

    def after(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        super().after(func, args, kwargs, result)
        origins = [self._origins[leaf] for leaf in tensor_leaves((args, kwargs)) if leaf in self._origins]
        if not origins:
            return
        reads = func in LOOKUPS or any(of_input for of_input, _ in origins)
        before = frozenset().union(*(layers for of_input, layers in origins if of_input))
        weights = frozenset().union(*(layers for of_input, layers in origins if not of_input))
        if reads and not before:
            self.input_layers |= weights
        self._origins.update((leaf, (reads, before | weights)) for leaf in tensor_leaves(result))


def _read(net: nn.Module, x: Any) -> _Reading:
    check_modules(net)
    buffers = [(buffer, buffer.clone()) for buffer in net.buffers()]
    # A computed weight (weight_norm) is computed once, so that it can be recognised by its identity.
    with parametrize.cached(), torch.random.fork_rng(devices=[]), torch.no_grad():
        weights: dict[int, str] = {}
        layers: list[tuple[Tensor, str]] = []
        for layer, module in weight_layers(net):
            values = {parameter: parameter_value(module, parameter) for parameter in layer_parameters(module)}
            for parameter, value in values.items():
                if not is_bias(parameter):
                    weights.setdefault(id(value), f"{layer}.{parameter}".lstrip("."))  # a tied weight: its first name
            layers += [(value, layer) for value in (*values.values(), *module.parameters(recurse=False))]
        paths = {id(module): path for path, module in net.named_modules()}
        reading = _Reading(SiteNames(paths), weights, layers, tensor_leaves(x))
        try:
            with Interception(reading):
                net(**x) if isinstance(x, Mapping) else net(*x) if isinstance(x, (tuple, list)) else net(x)
        finally:
            for buffer, value in buffers:  # such as running statistics
                buffer.copy_(value)
    return reading


def trace(net: nn.Module, x: Any) -> list[tuple[str, float]]:
    r"""The uses of the weights of `net` on input `x`, in order: the parameter's name, and $p$ of its input.

    A weight used twice appears twice. Flags, buffers and the random state are not changed. `x` is one batch of the
    input: a tensor, a tuple of positional or a dict of named arguments.

    Example:
        >>> drop, fc = nn.Dropout(0.5), nn.Linear(3, 3)
        >>> trace(nn.Sequential(fc, nn.ReLU(), drop, fc), torch.ones(1, 3))
        [('0.weight', 1.0), ('0.weight', 0.5)]
    """
    return _read(net, x).uses


def keep_probs(net: nn.Module, x: Any) -> KeepProbs:
    r"""The keep probability $p$ with which the input of every weight of `net` is kept, by parameter name.

    Found by a forward pass of `x`, so registration order, functional dropout and a dropout module used in several
    places make no difference. A dropout that no weight multiplies (on a residual branch) counts for no weight. A
    weight used more than once has the smallest of its keep probabilities. Weights that the input does not reach are
    absent, and so are layers whose KL is not a weight decay. The result also knows which layers read the input, so that
    a `Prior` with a `hidden_length_scale` reaches the others. `x` is as for `trace`; one row suffices.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(0.25), nn.Linear(8, 1))
        >>> keep_probs(net, torch.zeros(1, 2))
        {'0.weight': 1.0, '3.weight': 0.75}
    """
    reading = _read(net, x)
    decaying = [(layer, module) for layer, module in weight_layers(net) if kl_is_weight_decay(module)]
    names = {name for layer, module in decaying for name in qualified_names(layer, module)}
    tables = [(layer, module) for layer, module in decaying if isinstance(module, _TABLES)]
    lookups = [(f"{layer}.weight".lstrip("."), stated_keep_prob(module)) for layer, module in tables]
    found: dict[str, float] = {}
    for name, keep_prob in (*reading.uses, *lookups):
        if name in names:
            found[name] = min(keep_prob, found.get(name, 1.0))
    return KeepProbs(found, frozenset(reading.input_layers))
