"""Sets of a transformer's weight layers, to choose where it gets dropout with `add_dropout(where=...)`.

Each function returns names, so sets combine: `last_blocks(model, 4) & feed_forward_inputs(model)`. They are identified
by the structure of the network (its list of blocks, its attention modules) and the names that transformers uses; print
them to check the choice. Convolutions over time are never among them: networks of state-space layers read their
weights without calling them.
"""

import re
from collections.abc import Iterable

from torch import nn

from dropbayes.layers import weight_layers
from dropbayes.layers.hooks import adapted_layer, stacked_matrices
from dropbayes.layers.structure import fan_in
from dropbayes.runtime.validation import check_count

# The names that transformers gives to classes and layers.
_ATTENTION = re.compile(r"(Attention|Attn)\w{0,3}$")
_MIXING = re.compile(r"(Attention|Attn)\w{0,3}$|Mixer|Mamba|DeltaNet|Recurrent|ShortConv|SSM|TimeMix")
_ROUTER = re.compile(r"(router|gate|classifier)$", re.IGNORECASE)
_OTHER_INPUTS = re.compile(r"(^|[._])(vision|visual|image|audio|speech|multi_modal)", re.IGNORECASE)
_OUT_OF_ATTENTION = re.compile(r"\.(o|wo|out|output|dense|c_proj|proj)(_proj|_linear)?(\.\w+)?$")
_INTO_ATTENTION = re.compile(r"\.(w?[qkv]|qkv|kv|query|key|value|c_attn|in|gate|g|to_[qkv])(_\w+)?$", re.IGNORECASE)
_LEFT_OUT = re.compile(r"\.lora_|\.dt_proj$")  # state-space layers read its weight and their convolution's


def last_blocks(net: nn.Module, n_blocks: int) -> frozenset[str]:
    """The weight layers of the last `n_blocks` blocks; all draws then share the blocks before them.

    In an encoder-decoder model these are the decoder's; among several lists of blocks the largest is used, except
    those of images and sound.
    """
    names = _block_names(net)
    check_count("n_blocks", n_blocks, at_most=len(names))
    inside = names[-n_blocks:]
    return frozenset(name for name in [*_linear_layers(net), *_expert_stacks(net)] if _is_inside(name, inside))


def attention_outputs(net: nn.Module) -> frozenset[str]:
    """The output projection of every attention: dropout before it drops units of the heads' outputs."""
    outputs = set()
    for attention in _outermost(net, _ATTENTION):
        layers = [name for name in _linear_layers(net) if _is_inside(name, [attention])]
        others = [name for name in layers if not _INTO_ATTENTION.search(name)]
        outputs |= set([name for name in others if _OUT_OF_ATTENTION.search(name)][-1:] or others[-1:])
    return _nonempty(outputs, "a module of attention")


def feed_forward_inputs(net: nn.Module) -> frozenset[str]:
    """The layers that read a feed-forward network's input: in a block, outside its attention, as wide as the block.

    The experts of a mixture are among them, their router is not.
    """
    modules, blocks = dict(net.named_modules()), _block_names(net)
    width = _widths(modules[min(attention_outputs(net))])[1]
    mixing = _outermost(net, _MIXING, inside=blocks)
    chosen = {name for name in _expert_stacks(net) if _is_inside(name, blocks)}
    for block in blocks:
        layers = [name for name in _linear_layers(net) if _is_inside(name, [block]) and not _is_inside(name, mixing)]
        inputs = [name for name in layers if _widths(modules[name])[0] == width and not _ROUTER.search(name)]
        if inputs and inputs[-1] == layers[-1] and _widths(modules[layers[-1]])[1] == width:
            inputs = inputs[:-1]  # the output layer of a feed-forward network no wider than the block
        chosen |= set(inputs)
    return _nonempty(chosen, "a feed-forward part in its blocks")


def heads(net: nn.Module) -> frozenset[str]:
    """The weight layers after the last block: the projection to the vocabulary, a classifier."""
    blocks, names = _block_names(net), [name for name, _ in net.named_modules()]
    end = names.index(blocks[-1])
    layers = [name for name in _linear_layers(net) if not _is_inside(name, blocks) and not _OTHER_INPUTS.search(name)]
    return _nonempty({name for name in layers if names.index(name) > end}, "a weight layer after its blocks")


def adapters(net: nn.Module) -> frozenset[str]:
    """The first matrix of every low-rank adapter of PEFT: dropout before it is PEFT's `lora_dropout`."""
    if merged := [name for name, module in net.named_modules() if getattr(module, "merged_adapters", None)]:
        rule = f"have adapters beside its weights; {merged[0]} has one merged into its weight, which is then constant"
        raise ValueError(f"`net` must {rule}. Undo it with net.unmerge_adapter().")
    matrices = {name for name, _ in net.named_modules() if adapted_layer(net, name) is not None}
    return _nonempty(matrices, "a low-rank adapter of PEFT (merge_and_unload removes them: load them again)")


def _block_names(net: nn.Module) -> list[str]:
    """The names of the blocks: the elements of the largest list of modules with several weight layers each."""
    decoder: nn.Module = getattr(net, "get_decoder", lambda: net)()  # the accessor of transformers
    for root in (decoder, net):
        lists = [
            (name, module)
            for name, module in root.named_modules()
            if isinstance(module, (nn.ModuleList, nn.Sequential))
            and len(module)
            and all(len([*weight_layers(block), *_expert_stacks(block)]) > 1 for block in module)
        ]
        lists = [item for item in lists if not _OTHER_INPUTS.search(item[0])] or lists
        if lists:
            largest = max(lists, key=lambda item: sum(p.numel() for p in item[1].parameters()))[1]
            prefix = next(name for name, module in net.named_modules() if module is largest)
            return [f"{prefix}.{key}" for key in largest._modules]
    raise ValueError("`net` must have a list of blocks (an nn.ModuleList of them); name its layers in `where` instead.")


def _expert_stacks(net: nn.Module) -> list[str]:
    return [name for name, module in net.named_modules() if any(stacked_matrices(module))]


def _linear_layers(net: nn.Module) -> list[str]:
    others = (nn.Embedding, nn.modules.conv._ConvNd)
    layers = [(name, layer) for name, layer in weight_layers(net) if "weight" in layer._parameters]
    return [name for name, layer in layers if not isinstance(layer, others) and not _LEFT_OUT.search(name)]


def _is_inside(name: str, modules: Iterable[str]) -> bool:
    return any(name.startswith(f"{module}.") for module in modules)


def _outermost(net: nn.Module, kind: re.Pattern[str], inside: list[str] | None = None) -> list[str]:
    """The outermost modules whose class name matches `kind`."""
    names: list[str] = []
    for name, module in net.named_modules():
        is_within = inside is None or _is_inside(name, inside)
        if kind.search(type(module).__name__) and is_within and not _is_inside(name, names):
            names.append(name)
    return names


def _widths(layer: nn.Module) -> tuple[int, int]:
    """The numbers of input and output units of a linear layer."""
    weight = layer.get_parameter("weight")
    inputs = fan_in(layer, "weight", weight)
    return inputs, weight.numel() // inputs


def _nonempty(names: set[str], kind: str) -> frozenset[str]:
    if not names:
        raise ValueError(f"`net` must have {kind}; it has none. Name the layers in `where` instead.")
    return frozenset(names)
