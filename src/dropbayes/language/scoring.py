"""Scores of given texts under many draws, and what generation shares with them: the models, the options, the inputs."""

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import PyTree

from dropbayes.language.folding import FoldedDraws, checked, generating_module, next_log_probs
from dropbayes.language.uncertainty import TextUncertainty, TokenUncertainty
from dropbayes.runtime.devices import device_of
from dropbayes.runtime.rounding import equal_but_for_rounding
from dropbayes.runtime.validation import Array, check_count, to_tensor
from dropbayes.sampling import Keys, Sampling, check_sampling, evaluation_output

Text = str | Sequence[str] | Tensor | Mapping[str, Tensor]
"""Texts with a tokenizer, token ids `[row, token]`, or the output of the tokenizer."""

_TEXTS = ("input_ids", "attention_mask")
_MODES = ("greedy_search", "sample", "beam_search", "beam_sample")
_OURS = {
    "past_key_values": "each draw makes its own cache",
    "return_dict_in_generate": "the result already describes each token",
    "custom_generate": "the decoding is transformers' own",
    "streamer": "pass on_token= instead, which also gets the uncertainty of each token",
}


def score(
    model: Any,
    prompt: Text,
    answer: Tensor | str | Sequence[str],
    *,
    tokenizer: Any = None,
    answer_mask: Array | None = None,
    n_draws: int = 8,
    seed: int = 0,
    draws_at_once: int | None = None,
    sampling: Sampling = Sampling(positions="tied"),
) -> TextUncertainty:
    """The uncertainty of given answers to prompts, as `generate` reports it for its own texts.

    The answers, one for each prompt, are texts or their token ids `[row, token]`, padded on the right; `answer_mask`
    marks those that are part of an answer, by default all but the padding after its end. The prompts are as the
    inputs of `generate`, for an encoder-decoder model the encoder's input; the other arguments are those of `generate`.
    """
    work = checked_texts("prompt", prompt, model, tokenizer, n_draws, seed, sampling, {})
    if not isinstance(answer, Tensor):
        encoded = tokenized("answer", answer, tokenizer, side="right", add_special_tokens=False)
        answer, answer_mask = encoded["input_ids"], encoded["attention_mask"]
    if answer.dim() != 2 or 0 in answer.shape or answer.is_floating_point():
        raise TypeError(f"`answer` must be token ids [row, token]; got {tuple(answer.shape)} of {answer.dtype}.")
    if len(answer) != work.n_rows:
        raise ValueError(f"`answer` must have a row for each of the {work.n_rows} prompts; got {len(answer)}.")
    answer = answer.to(device_of(work.model))
    if answer_mask is None:
        n_after = (answer == work.padding).flip(-1).cumprod(-1).sum(-1, keepdim=True) - int(work.padding in work.ends)
        answer_mask = torch.arange(answer.shape[1], device=answer.device) < answer.shape[1] - n_after
    mask = to_tensor(answer_mask, name="answer_mask").to(answer.device)
    if mask.shape != answer.shape or bool((mask.int().diff() > 0).any()):
        raise ValueError(f"`answer_mask` must be 1, then 0 after each end, shaped like `answer`; got {mask!r}.")
    with torch.no_grad():
        result = score_answers(work, answer, mask.bool(), work.at_once(draws_at_once), range(n_draws))
    return replace(result, texts=decoded(tokenizer, result.tokens, result.mask))


@dataclass(frozen=True)
class Texts:
    """Prompts, with the model and the draws for their texts."""

    model: nn.Module
    keys: Keys
    sampling: Sampling
    given: dict[str, Tensor]
    config: Any
    options: dict[str, Any]

    @property
    def n_rows(self) -> int:
        return len(self.given["input_ids"])

    def folded(self, draws: range, at_once: int = 1) -> list[FoldedDraws]:
        """Some draws, so many in a batch; masks are tied over positions unless said otherwise, as a cache is read."""
        chunks = [draws[start : start + at_once] for start in range(0, len(draws), at_once)]
        sampling = replace(self.sampling, positions=self.sampling.positions or "tied")
        return [FoldedDraws(self.model, self.keys, chunk, sampling) for chunk in chunks]

    def at_once(self, wanted: int | None) -> int:
        """The most draws in one batch: as many as wanted, by default all; 1 if a mask has no rows."""
        n_draws = self.keys.n_draws
        check_count("draws_at_once", n_draws if wanted is None else wanted)
        (one,) = self.folded(range(1))
        first = self.given["input_ids"][:, :1]
        arguments, _ = _whole_text(self, self.texts, first, torch.ones_like(first))
        return min(wanted or n_draws, n_draws) if one.is_foldable(arguments, self.n_rows) else 1

    @property
    def texts(self) -> dict[str, Tensor]:
        """The inputs without those of a prompt alone, such as images."""
        return {name: value for name, value in self.given.items() if self.has_encoder or name in _TEXTS}

    @property
    def has_encoder(self) -> bool:
        return bool(generating_module(self.model).config.is_encoder_decoder)

    @property
    def ends(self) -> list[int]:
        """The tokens that end a text, of which a configuration names none, one or several."""
        ends = self.config.eos_token_id
        return [] if ends is None else torch.tensor(ends).flatten().tolist()

    @property
    def padding(self) -> int:
        """The token of padding, for transformers else the first that ends a text; without both, no token."""
        pad = self.config.pad_token_id
        return int([*self.ends, -1][0] if pad is None else pad)

    @property
    def has_beams(self) -> bool:
        return (self.config.num_beams or 1) > 1

    @property
    def new_from(self) -> int:
        """The column of a sequence at which new tokens begin."""
        return int(self.given["decoder_input_ids" if self.has_encoder else "input_ids"].shape[1])

    def with_encoder(self, chunks: list[FoldedDraws]) -> dict[str, Any]:
        """The inputs, with the encoder's output for each draw; it runs once, as part of the whole model."""
        if not self.has_encoder:
            return dict(self.given)
        from transformers.modeling_outputs import MoEModelOutput  # whose router some models read

        states = [chunk({**self.given, "use_cache": False}, self.n_rows).encoder_last_hidden_state for chunk in chunks]
        return {**self.given, "encoder_outputs": MoEModelOutput(last_hidden_state=torch.cat(states))}


def checked_texts(
    argument: str, inputs: Text, model: Any, tokenizer: Any, n_draws: int, seed: int, sampling: Sampling, options: Any
) -> Texts:
    """The texts that an argument of `generate` or `score` gives, with the other arguments that both have."""
    model = checked_language_model(model)
    check_sampling(sampling)
    keys, config = sampling.keys(n_draws, seed), checked_options(model, options)
    work = Texts(model, keys, sampling, named_inputs(argument, inputs, tokenizer, model), config, options)
    ids = work.given["input_ids"]
    if "attention_mask" not in work.given and work.padding not in work.ends and bool((ids == work.padding).any()):
        work.given["attention_mask"] = (ids != work.padding).long()  # as transformers does
    if work.has_encoder:
        begun = work.given.get("decoder_input_ids", options.pop("decoder_input_ids", ids[:, :0]))
        work.given["decoder_input_ids"] = _begun_by_the_start_token(begun, config)
    mask = work.given.get("attention_mask", torch.ones_like(ids))
    if mask.shape != ids.shape or not bool(mask.any(1).all()):
        rule = "have a token in every row, and a mask of their shape"
        raise ValueError(f"`{argument}` must {rule}; got tokens {tuple(ids.shape)}, the mask {tuple(mask.shape)}.")
    if not work.has_encoder and bool((mask[:, -1] == 0).any()):
        rule = "be padded on the left: a text that goes on after padding is not the text"
        raise ValueError(f'`{argument}` must {rule}. Tokenize with padding_side="left".')
    _check_reading(argument, work)
    return work


def _check_reading(argument: str, work: Texts) -> None:
    """Raises if the next token of a text depends on tokens after it, or on padding before it; once for each model."""
    ids, known = work.given["input_ids"], checked.setdefault(work.model, set())
    mask = work.given.get("attention_mask", torch.ones_like(ids)).bool()
    row = int(mask.sum(-1).argmin())
    padded = {name: value[row : row + 1] for name, value in work.texts.items()}
    alone = padded if work.has_encoder else {name: value[:, mask[row]] for name, value in padded.items()}
    is_padded = alone["input_ids"].shape != padded["input_ids"].shape
    if is_padded in known:
        return

    def next_token(texts: dict[str, Tensor], n_after: int) -> Tensor:
        after = alone["input_ids"][:, :1].expand(1, n_after)
        arguments, columns = _whole_text(work, texts, after, torch.ones_like(after))
        logits: Tensor = evaluation_output(work.model, arguments).logits[:, columns][:, 0]
        return logits.float().log_softmax(-1).to(logits.dtype)  # a logit may be zero but for rounding

    expected = next_token(alone, 1)
    if not equal_but_for_rounding(next_token(alone, 2), expected, offsets=False):
        rule = "predict a token from those before it; this one also reads those after"
        remedy = "Set is_decoder=True in its configuration, or use dropbayes.function_draw"
        raise ValueError(f"`model` must {rule}. {remedy}.")
    if is_padded and not equal_but_for_rounding(next_token(padded, 1), expected, offsets=False):
        rule = f"not be padded, as row {row} is: to this model a padded text is another text"
        raise ValueError(f"`{argument}` must {rule}. Pass texts of one length at a time.")
    known.add(is_padded)


def _begun_by_the_start_token(begun: Tensor, config: Any) -> Tensor:
    """The tokens with which the decoder begins, after the start token, which transformers adds as well."""
    start = config.bos_token_id if config.decoder_start_token_id is None else config.decoder_start_token_id
    if start is None:
        raise ValueError("`model` must define the token its decoder begins with. Pass decoder_start_token_id=.")
    first = torch.tensor(start, device=begun.device).view(-1, 1).expand(len(begun), 1)  # one, or one for each row
    return begun if begun.shape[1] and bool((begun[:, :1] == first).any()) else torch.cat([first, begun], 1)


def score_answers(work: Texts, answer: Tensor, mask: Tensor, at_once: int, draws: range) -> TextUncertainty:
    """The uncertainty of given answers under some draws, in chunks of rows."""
    folded = work.folded(draws, at_once)
    vocabulary = int(generating_module(work.model).config.get_text_config().vocab_size)
    bytes_per_row = 4 * len(draws) * answer.shape[1] * vocabulary
    rows_at_once = max(1, 2**28 // bytes_per_row)
    blocks = []
    for start in range(0, len(answer), rows_at_once):
        rows = slice(start, start + rows_at_once)
        arguments, columns = _whole_text(work, {k: v[rows] for k, v in work.given.items()}, answer[rows], mask[rows])
        n_rows, steps = len(answer[rows]), list[TokenUncertainty]()
        log_probs = next_log_probs([one(arguments, n_rows).logits[:, columns] for one in folded], n_rows)
        for tokens, among, step in zip(answer[rows].T, mask[rows].T, log_probs.unbind(2), strict=True):
            steps.append(TokenUncertainty.of(step, tokens, among, steps[-1] if steps else None))
        blocks.append(TokenUncertainty.joined(steps, torch.stack, -1))
    return TokenUncertainty.joined(blocks, torch.cat, -2).texts()


def _whole_text(work: Texts, given: dict[str, Tensor], answer: Tensor, mask: Tensor) -> tuple[dict[str, Any], slice]:
    """The arguments for prompt and answer together, and the columns of the logits that predict the answer."""
    length = answer.shape[1]
    if work.has_encoder:
        decoded = torch.cat([given["decoder_input_ids"], answer[:, :-1]], 1)
        return {**given, "decoder_input_ids": decoded, "use_cache": False}, slice(-length, None)
    if others := given.keys() - set(_TEXTS):
        raise ValueError(f"a text is scored by `input_ids` and `attention_mask` alone; got {sorted(others)} as well.")
    accepted = inspect.signature(generating_module(work.model).forward).parameters
    prompt_mask = given.get("attention_mask", torch.ones_like(given["input_ids"]))
    whole_mask = torch.cat([prompt_mask, mask.to(prompt_mask.dtype)], 1)
    arguments: dict[str, Any] = {"input_ids": torch.cat([given["input_ids"], answer], 1), "use_cache": False}
    if "attention_mask" in accepted:
        arguments["attention_mask"] = whole_mask
    if "position_ids" in accepted and bool((prompt_mask == 0).any()):  # else the model's own: RoBERTa's begin at 2
        arguments["position_ids"] = (whole_mask.cumsum(-1) - 1).clamp(min=0)
    return arguments, slice(-length - 1, -1)


def tokenized(argument: str, texts: Any, tokenizer: Any, *, side: str, **options: Any) -> dict[str, Tensor]:
    """The token ids and the attention mask of one or several texts, padded on a side."""
    several = [texts] if isinstance(texts, str) else list(texts)
    if not several or not all(isinstance(text, str) for text in several):
        raise TypeError(f"`{argument}` must be texts or token ids [row, token]; got {texts!r}.")
    if tokenizer is None:
        raise TypeError(f"`{argument}` of text needs the model's tokenizer: pass tokenizer=.")
    options |= {"padding": len(several) > 1, "padding_side": side, "return_token_type_ids": False}
    return dict(tokenizer(several, return_tensors="pt", return_attention_mask=True, **options))


def decoded(tokenizer: Any, tokens: Tensor, mask: Tensor) -> list[Any] | None:
    """The text of each row of tokens, `[..., token]`; None without a tokenizer."""
    if tokenizer is None:
        return None
    if tokens.dim() > 2:
        return [decoded(tokenizer, *row) for row in zip(tokens, mask, strict=True)]
    return [tokenizer.decode(row[kept], skip_special_tokens=True) for row, kept in zip(tokens, mask, strict=True)]


def named_inputs(argument: str, inputs: PyTree, tokenizer: Any, model: nn.Module) -> dict[str, Tensor]:
    """The inputs by name: token ids and the other outputs of the tokenizer."""
    match inputs:
        case str() | list() | tuple():
            side = "right" if generating_module(model).config.is_encoder_decoder else "left"  # where no token follows
            named = tokenized(argument, inputs, tokenizer, side=side)
        case Tensor():
            named = {"input_ids": inputs}
        case {"input_ids": Tensor()}:
            named = inputs
        case _:
            rule, got = "be texts, token ids [row, token], or a dict with `input_ids`", type(inputs).__name__
            raise TypeError(f'`{argument}` must {rule}; got {got}. Tokenize with return_tensors="pt".')
    ids, rule = named["input_ids"], "be token ids, whole numbers [row, token] with at least one of each"
    if ids.dim() != 2 or 0 in ids.shape or ids.is_floating_point():
        raise ValueError(f"`{argument}` must {rule}; got {tuple(ids.shape)} of {ids.dtype}.")
    tensors = {name: to_tensor(value, name=name) for name, value in named.items() if value is not None}
    return {name: value.to(device_of(model)) for name, value in tensors.items()}


def checked_language_model(model: Any) -> nn.Module:
    """`model`, if it is a language model of transformers that can be drawn from; otherwise raises with the reason."""
    if not isinstance(model, nn.Module) or not hasattr(type(generating_module(model)), "can_generate"):
        raise TypeError(f"`model` must be a language model of transformers; got {type(model).__name__}.")
    if any("_orig_mod" in module._modules or module._compiled_call_impl is not None for module in model.modules()):
        rule = "must not be compiled: compiled code hides its dropout"
        raise ValueError(f"`model` {rule}. Pass the model that was compiled.")
    homes = {type(module).__module__ for module in model.modules()}
    quantised = ("torch.ao.nn.quantized", "bitsandbytes", "hqq", "optimum.quanto", "torchao")
    if getattr(model, "is_quantized", False) or any(home.startswith(quantised) for home in homes):
        why = "how its kernels round may depend on the batch, so that a draw among others need not be the draw alone"
        raise ValueError(f"`model` must not be quantised: {why}. Load it in bfloat16 or float16.")
    if any(adapter.is_prompt_learning for adapter in getattr(model, "peft_config", {}).values()):
        raise ValueError("`model` must not have prompts as adapters, which no cache holds. Use dropbayes.predict.")
    inner = generating_module(model)
    if not inner.can_generate():
        rule = f"generate text; {type(inner).__name__} has no language-model head"
        remedy = "AutoModelForCausalLM or AutoModelForSeq2SeqLM, or judge a classifier with dropbayes.predict"
        raise ValueError(f"`model` must {rule}. Load it with {remedy}.")
    if inner.main_input_name != "input_ids":  # of speech, of images
        remedy = "Let it generate under each draw: dropbayes.guests.each_draw."
        raise ValueError(f"`model` must read token ids; this one reads `{inner.main_input_name}`. {remedy}")
    return model


def checked_options(model: nn.Module, options: dict[str, Any]) -> Any:
    """The model's generation configuration with `options`; raises on options that draws do not support."""
    for name, reason in _OURS.items():
        if name in options:
            raise ValueError(f"`{name}` cannot be passed here: {reason}.")
    own = generating_module(model).generation_config
    config = copy.deepcopy(options.get("generation_config") or own)
    config.update(**own.to_dict(), defaults_only=True)
    config.update(**{name: value for name, value in options.items() if name != "generation_config"})
    if (config.guidance_scale or 1) != 1:
        raise ValueError("`guidance_scale` must be 1: guidance runs the model beside its draws. Leave it out.")
    if config.cache_implementation not in (None, "dynamic", "hybrid"):  # for transformers, "hybrid" is the default
        got = f"{config.cache_implementation!r}, a cache that draws cannot share"
        raise ValueError(f"`cache_implementation` must be the default, which grows as draws need it; got {got}.")
    if (mode := config.get_generation_mode(options.get("assistant_model")).value) not in _MODES:
        raise ValueError(f"`generate` decodes by {', '.join(_MODES)}; the options select {mode}. Leave them out.")
    return config
