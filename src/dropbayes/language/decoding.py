"""The stand-in for a model while transformers decodes: its forward pass runs many draws.

The decoding itself (greedy, sampling, beams, penalties, stopping) is transformers' own `generate`. It is called on a
view of the model whose forward pass runs all draws as one batch, each with its own rows in the cache, and returns
the log of their mean distribution, or one distribution per draw.
"""

from __future__ import annotations

import copy
import functools
import math
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import PyTree

from dropbayes.language.folding import FoldedDraws, cache_bytes, cache_name, n_rows_of, reorder, spread
from dropbayes.sampling import View, copied_cache, equal_but_for_rounding

_MODES = ("greedy_search", "sample", "beam_search", "beam_sample")
_OURS = {
    "past_key_values": "each draw makes its own cache",
    "return_dict_in_generate": "the result already describes each token",
    "custom_generate": "the decoding is transformers' own",
    "streamer": "pass on_token= instead, which also gets the uncertainty of each token",
}
# By model, the keys for which a cached step was checked against the whole text.
_checked: weakref.WeakKeyDictionary[nn.Module, set[Any]] = weakref.WeakKeyDictionary()


class DrawnModel:
    """The stand-in for the model in transformers' `generate`, with masks by position.

    `together`, all draws read the same text and return their mean; otherwise each reads its own rows.
    """

    def __init__(self, chunks: list[FoldedDraws], *, together: bool) -> None:
        self.chunks, self.together, first = chunks, together, chunks[0]
        self.net, self.n_draws = first.net, sum(len(chunk.draws) for chunk in chunks)
        self.log_probs = torch.empty(0)  # of the last step, [draw, row, token]
        self.cache_bytes = 0
        self._caches: list[Any] = []
        self._prompt: dict[str, Any] = {}
        self._keyed = (first.keys, first.draws.start, self.n_draws, first.sampling)

    def model(self) -> Any:
        stand_in = generating_module(View(self.net).net)

        @functools.wraps(stand_in.forward)  # transformers reads its parameters
        def forward(**arguments: Any) -> PyTree:
            return self.forward(arguments)

        stand_in.forward = forward
        return stand_in

    def forward(self, arguments: dict[str, Any]) -> PyTree:
        """The forward pass of all draws: logits are the log of their mean distribution, or those of each draw."""
        n_rows = n_rows_of(arguments) // (1 if self.together else self.n_draws)
        name = cache_name(arguments)
        cache: Any = arguments.get(name or "")
        is_prompt = cache is not None and not any(cache is known for known in self._caches)
        if is_prompt:  # a new, empty one: of the first draws, with one more for each other chunk
            self._caches = [cache, *(copied_cache(cache) for _ in self.chunks[1:])]
            if self.together or self.n_draws > 1:
                cache.reorder_cache = self._reorder
        outputs, logits = [], []
        for index, chunk in enumerate(self.chunks):
            chunk_arguments = {key: self._chunk_rows(value, chunk, n_rows) for key, value in arguments.items()}
            if name is not None:
                chunk_arguments[name] = self._caches[index]
            outputs.append(chunk(chunk_arguments, n_rows, alike=self.together or is_prompt))
            if name is not None and not self.together and is_prompt:
                spread(self._caches[index], n_rows, len(chunk.draws))
            logits.append(outputs[-1].logits[:, -1].float().unflatten(0, (len(chunk.draws), n_rows)))
        dtype = outputs[0].logits.dtype
        self.log_probs = torch.cat(logits).log_softmax(-1)
        if is_prompt:
            self._prompt = arguments
        elif name is not None and self._keyed not in _checked.setdefault(self.net, set()):
            self._check_step(arguments, n_rows, name, dtype)
            _checked[self.net].add(self._keyed)
        self.cache_bytes = max(self.cache_bytes, sum(map(cache_bytes, self._caches)))
        answer = self.log_probs.logsumexp(0) - math.log(self.n_draws) if self.together else self.log_probs.flatten(0, 1)
        output = outputs[0]
        output["logits"] = answer[:, None]
        return output

    def _chunk_rows(self, value: Any, chunk: FoldedDraws, n_rows: int) -> Any:
        """The rows of a chunk's draws, from a value with the rows of all draws (the encoder's output)."""
        if len(self.chunks) == 1 or not hasattr(value, "last_hidden_state"):
            return value
        first = chunk.draws.start - self.chunks[0].draws.start
        rows = slice(first * n_rows, (first + len(chunk.draws)) * n_rows)
        return type(value)(last_hidden_state=value.last_hidden_state[rows])

    def _reorder(self, rows: Tensor) -> None:
        for cache, chunk in zip(self._caches, self.chunks, strict=True):
            reorder(cache, rows, len(chunk.draws) if self.together else 1)

    @torch.no_grad()
    def _check_step(self, step: dict[str, Any], n_rows: int, name: str, dtype: torch.dtype) -> None:
        """Raises if the first step from the cache differs from a forward pass of the whole text without sharing."""
        whole = {key: value for key, value in step.items() if key != name}
        for key in ("input_ids", "decoder_input_ids", "position_ids", "token_type_ids", "decoder_position_ids"):
            if step.get(key) is not None:
                whole[key] = torch.cat([self._prompt[key], step[key]], -1)
        mask, ids = (self._prompt.get(key) for key in ("attention_mask", "input_ids"))
        if mask is not None and ids is not None and getattr(mask, "shape", None) == ids.shape:
            whole["attention_mask"] = torch.cat([mask, torch.ones_like(mask[:, :1])], -1)
        if "inputs_embeds" in self._prompt or step.get("decoder_inputs_embeds") is not None:
            return
        whole["use_cache"] = False
        outputs = [
            chunk({key: self._chunk_rows(value, chunk, n_rows) for key, value in whole.items()}, n_rows, alike=False)
            for chunk in self.chunks
        ]
        logits = [output.logits[:, -1].float().unflatten(0, (-1, n_rows)) for output in outputs]
        expected = torch.cat(logits).log_softmax(-1)
        if not equal_but_for_rounding(self.log_probs.to(dtype), expected.to(dtype), offsets=False):
            difference = float((self.log_probs - expected).abs().max())
            raise ValueError(
                f"`model` cannot share its cache among draws: a step from it differs from the whole text by "
                f"{difference:.2g} in log-probability. Pass use_cache=False."
            )


# --- which models can be generated from, and with which options ---------------------------------------------------


def checked_language_model(model: Any) -> nn.Module:
    """`model`, if it is a language model of transformers that can be drawn from; otherwise raises with the reason."""
    if not isinstance(model, nn.Module) or not hasattr(type(generating_module(model)), "can_generate"):
        raise TypeError(f"`model` must be a language model of transformers; got {type(model).__name__}.")
    if any("_orig_mod" in module._modules or module._compiled_call_impl is not None for module in model.modules()):
        raise ValueError(
            "`model` must not be compiled: compiled code hides its dropout. Pass the model that was compiled."
        )
    homes = {type(module).__module__ for module in model.modules()}
    quantised = ("torch.ao.nn.quantized", "bitsandbytes", "hqq", "optimum.quanto", "torchao")
    if getattr(model, "is_quantized", False) or any(home.startswith(quantised) for home in homes):
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
    config = copy.deepcopy(options.get("generation_config") or generating_module(model).generation_config)
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
