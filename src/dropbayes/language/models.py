"""Which models can be generated from, and with which options."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

__all__ = ["checked_language_model", "generating_module"]

_MODES = ("greedy_search", "sample", "beam_search", "beam_sample")
_QUANTISED = ("torch.ao.nn.quantized", "bitsandbytes", "hqq", "optimum.quanto", "torchao")
_OURS = {
    "past_key_values": "each draw makes its own cache",
    "return_dict_in_generate": "the result already describes each token",
    "custom_generate": "the decoding is transformers' own",
    "streamer": "pass on_token= instead, which also gets the uncertainty of each token",
}


def checked_language_model(model: Any) -> nn.Module:
    """`model`, if it is a language model of transformers that can be drawn from; otherwise raises with the reason."""
    if not isinstance(model, nn.Module) or not hasattr(type(generating_module(model)), "can_generate"):
        raise TypeError(f"`model` must be a language model of transformers; got {type(model).__name__}.")
    if any("_orig_mod" in module._modules or module._compiled_call_impl is not None for module in model.modules()):
        raise ValueError(
            "`model` must not be compiled: compiled code hides its dropout. Pass the model that was compiled."
        )
    homes = {type(module).__module__ for module in model.modules()}
    if getattr(model, "is_quantized", False) or any(home.startswith(_QUANTISED) for home in homes):
        raise ValueError(
            "`model` must not be quantised: how its kernels round may depend on the batch, so that a draw among others "
            "need not be the draw alone. Load it in bfloat16 or float16."
        )
    inner = generating_module(model)
    if not inner.can_generate():
        raise ValueError(
            f"`model` must generate text; {type(inner).__name__} has no language-model head. Load it with "
            "AutoModelForCausalLM or AutoModelForSeq2SeqLM, or judge a classifier with dropbayes.predict."
        )
    return model


def generating_module(model: nn.Module) -> Any:
    """The module of transformers inside `model` that generates: `model` itself, or the module that PEFT wraps."""
    return next((m for m in model.modules() if hasattr(type(m), "can_generate")), model)


def checked_options(model: nn.Module, options: dict[str, Any]) -> Any:
    """The model's generation configuration with `options`; raises on options that draws do not support."""
    for name, reason in _OURS.items():
        if name in options:
            raise ValueError(f"`{name}` has no place here: {reason}.")
    config = copy.deepcopy(generating_module(model).generation_config)
    if isinstance(options.get("generation_config"), type(config)):
        config = copy.deepcopy(options["generation_config"])
    config.update(**{name: value for name, value in options.items() if name != "generation_config"})
    if config.cache_implementation not in (None, "dynamic"):
        raise ValueError(
            f"`cache_implementation` must be the default, which grows as draws need it; got "
            f"{config.cache_implementation!r}, a cache that draws cannot share."
        )
    mode = config.get_generation_mode(options.get("assistant_model")).value
    if mode not in _MODES:
        raise ValueError(f"`generate` decodes by {', '.join(_MODES)}; the options ask for {mode}. Leave them out.")
    return config


def checked_padding(config: Any, n_rows: int, mask: Tensor | None) -> None:
    """Raises on several texts without a padding token or not padded on the left."""
    if n_rows > 1 and config.eos_token_id is not None and config.pad_token_id is None:
        raise ValueError(
            "`pad_token_id` must be known for several texts, which end at different lengths; the model has none. Pass "
            "pad_token_id=tokenizer.pad_token_id (or eos_token_id)."
        )
    if mask is not None and n_rows > 1 and bool((mask[:, -1] == 0).any()):
        raise ValueError(
            "`inputs` must be padded on the left: a text that goes on after padding is not the text. Tokenize with "
            'padding_side="left".'
        )
