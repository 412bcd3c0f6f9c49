r"""Draws of a network with low-rank adapters, as adapters.

A mask that is the same at every position can be folded into the adapter whose input it drops,
$\mathbf B \mathbf A (\mathbf z \odot \mathbf x) / (1 - p) = \mathbf B \mathbf A' \mathbf x$ with
$\mathbf A' = \mathbf A\,\mathrm{diag}(\mathbf z) / (1 - p)$: a draw of the network is the network with another,
ordinary adapter (Hu et al. 2021 for the adapter, Gal and Ghahramani 2016 for the mask that positions share). $T$ draws
are $T$ adapters in PEFT's format, which any server of adapters can load.
"""

import copy
import functools
import os
import pathlib
import shutil
import tempfile
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import PyTree

from dropbayes.language.blocks import adapters
from dropbayes.layers.hooks import adapted_layer
from dropbayes.runtime.validation import check_count, check_type, needed_for
from dropbayes.sampling import Sampling, function_draw, sites


def export_adapters(
    model: Any, folder: str | os.PathLike[str], *, n_draws: int = 8, seed: int = 0, x: PyTree = None
) -> list[pathlib.Path]:
    r"""Writes draws of a network with low-rank adapters as adapters, one folder each, in PEFT's own format.

    Draw $t$ is $\mathbf A\,\mathrm{diag}(\mathbf z_t) / (1 - p)$ in place of $\mathbf A$, with the masks of
    `function_draw(model, t, n_draws=n_draws, seed=seed, sampling=Sampling(positions="tied"))`. Its own dropout is 0.

    Args:
        model: A `PeftModel` with LoRA adapters whose dropout (`lora_dropout`, or that of `add_dropout`) is the only
            randomness of the network. The active adapter is written.
        folder: The parent of the folders `draw-0`, `draw-1`, ...; created if missing, nothing in it is replaced.
        n_draws: The number of draws $T$.
        seed: The seed of the draws.
        x: An input of the model, for observing its masks; by default a few tokens.

    Returns:
        The folders of the adapters, in the order of the draws.
    """
    from safetensors.torch import save_file

    check_count("n_draws", n_draws)
    peft, name = _checked_adapter(model)
    folder = pathlib.Path(folder)
    names = [f"draw-{index}" for index in range(n_draws)]
    if existing := [folder / name for name in names if (folder / name).exists()]:
        raise FileExistsError(f"`folder` must not hold draws already; {str(existing[0])!r} exists.")
    inputs = {"input_ids": torch.arange(4, device=model.device)[None]} if x is None else x
    weights = peft.get_peft_model_state_dict(model, adapter_name=name)
    config = copy.copy(model.peft_config[name])
    config.lora_dropout, config.inference_mode = 0.0, True
    network, drawn = _observed(model, name)
    random = [site.path for site in sites(network, inputs) if site.drop_prob]
    others = [path for path in random if ".lora_" not in path and not hasattr(network.get_submodule(path), "lora_A")]
    if others:
        rule = f"be random in its adapters alone; {others[0]} has dropout too, which no adapter can hold"
        raise ValueError(f"`model` must {rule}. Set its drop probability to 0 first.")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as unfinished:
        for index, draw in enumerate(names):
            function_draw(network, index, n_draws=n_draws, seed=seed, sampling=Sampling(positions="tied"))(inputs)
            config.save_pretrained(pathlib.Path(unfinished) / draw)
            tensors = {key: value.contiguous() for key, value in {**weights, **drawn}.items()}
            save_file(tensors, pathlib.Path(unfinished) / draw / peft.utils.SAFETENSORS_WEIGHTS_NAME)
        for draw in names:
            shutil.move(pathlib.Path(unfinished) / draw, folder / draw)
    return [folder / draw for draw in names]


def _checked_adapter(model: Any) -> tuple[Any, str]:
    """The PEFT module and the name of the active adapter; raises if its draws are not adapters."""
    with needed_for("`export_adapters`"):
        import peft
    rule = "be a peft.PeftModel with adapters; merge_and_unload removes them and their dropout: load them again"
    check_type("model", model, peft.PeftModel, rule)
    active = model.active_adapters
    if len(active) != 1:
        raise ValueError(f"`model` must have one active adapter; it has {len(active)}. Choose with set_adapter(name).")
    config = model.peft_config[active[0]]
    if config.peft_type != peft.PeftType.LORA:
        raise TypeError(f"`model` must have LoRA adapters; {active[0]!r} is of type {config.peft_type.value}.")
    if config.use_dora:
        rule = f"the adapter {active[0]!r} must be plain LoRA to be written as draws; it is DoRA"
        why = "whose dropout also drops the input of the frozen weight: a draw is no adapter"
        raise ValueError(f"{rule}, {why}. Draw from it with predict or generate.")
    adapters(model)  # raises on merged adapters
    return peft, active[0]


def _observed(model: nn.Module, adapter: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A copy of the network, over the same weights, and the adapters' weights of its last draw, by PEFT's names."""
    network = copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})
    drawn: dict[str, Tensor] = {}

    def read(module: Any, args: Any, name: str) -> None:
        drawn[name] = module.lora_A[adapter].weight.detach()

    def multiply(module: Any, args: Any, name: str) -> None:
        mask = args[0].detach().reshape(-1, *args[0].shape[-1:])
        if mask.dim() != 2 or not bool((mask == mask[:1]).all()):
            raise ValueError(f"the mask before {name} must be the same at all positions to be part of an adapter.")
        drawn[name] = module.weight.detach() * mask[0]

    for path in adapters(network):
        if path.endswith(f".lora_A.{adapter}"):
            layer: Any = adapted_layer(network, path)
            name = f"{path.removesuffix(f'.{adapter}')}.weight"
            if hasattr(layer, "parameter_name"):  # its matrix is dropped itself
                layer.register_forward_pre_hook(functools.partial(read, name=name))
            else:
                # The dropout of ones is the mask, divided by the keep probability.
                layer.lora_dropout[adapter].register_forward_pre_hook(lambda module, args: torch.ones_like(args[0]))
                layer.lora_A[adapter].register_forward_pre_hook(functools.partial(multiply, name=name))
    return network, drawn
