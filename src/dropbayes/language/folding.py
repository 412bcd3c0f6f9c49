"""Some draws of a language model as one batch: the rows of every draw side by side, draws outermost.

A draw's masks are those of `function_draw`: keyed by site and position, so that a step that reads a cache continues the
function that filled it. Blocks before the first site are the same for every draw: they run, and are cached, once.

Decoding itself (greedy, sampling, beams, penalties, stopping) is transformers' own `generate`. It is called on a view
of the model whose forward pass runs all draws, each with its own rows in the cache, and returns the log of their mean
distribution, or one distribution per draw.
"""

import functools
import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._pytree import PyTree

from dropbayes import sampling
from dropbayes.runtime.rounding import equal_but_for_rounding
from dropbayes.tracing import Interception
from dropbayes.tracing.outputs import split

_TEXT = ("input_ids", "inputs_embeds", "decoder_input_ids", "decoder_inputs_embeds")
# By model, what was checked: that a text alone is the text in a batch, and the keys of steps from a cache.
checked: weakref.WeakKeyDictionary[nn.Module, set[Any]] = weakref.WeakKeyDictionary()


def text_shape(arguments: dict[str, Any]) -> tuple[int, ...]:
    """The numbers of rows and of tokens of the text that grows."""
    return next(tuple(arguments[name].shape[:2]) for name in reversed(_TEXT) if arguments.get(name) is not None)


def next_log_probs(logits: list[Tensor], n_rows: int) -> Tensor:
    """The log-probabilities of the next token, `[draw, row, ..., token]`, from the logits of some draws each."""
    log_probs = torch.cat([one.float().unflatten(0, (-1, n_rows)) for one in logits]).log_softmax(-1)
    if bool(log_probs[..., 0].isnan().any()):  # all are NaN where one logit is, or is infinite
        raise ValueError("`model` gave NaN or infinite logits. Check its weights for NaN, or use bfloat16 or float32.")
    return log_probs


class FoldedDraws:
    """Some draws of a model, with the call signature of the model; its masks are by position."""

    def __init__(self, net: nn.Module, keys: sampling.Keys, draws: range, settings: sampling.Sampling) -> None:
        self.net, self.keys, self.draws, self.sampling = net, keys, draws, settings
        self._known: dict[Any, tuple[sampling.Inspection, sampling.View]] = {}
        self._source: sampling.KeyedSource  # of the call under way
        self._n_rows, self._alike = 0, True

    def __call__(self, arguments: dict[str, Any], n_rows: int, *, alike: bool = True) -> PyTree:
        """The model's output with the rows of all draws, `n_rows` each, which may be `alike`, for named arguments."""
        inspection, view = self._inspected(arguments, n_rows)
        inputs = self._one_draw(arguments)
        spec = sampling.mask_spec(inspection.profile, inputs, keys=self.keys, masks="shared", sampling=self.sampling)
        source = sampling.KeyedSource(spec, self.draws, range(n_rows), folded=True)
        self._source, self._alike = source, alike
        source.follow(view.paths, ())
        folded = pytree.tree_map_only(Tensor, self._fold, arguments, is_leaf=sampling.is_cache)
        try:
            with Interception(source):
                output = sampling.eagerly(view.net.__call__)(**folded)
            source.finish(split(output)[0])
        except sampling.UnsupportedStrategy as changed:
            what = f"met other sites than when it was inspected ({changed}): its sites depend on the text"
            remedy = "Use dropbayes.function_draw"
            raise ValueError(f"`model` {what}, so that draws cannot share a batch. {remedy}.") from None
        return output

    def _inspected(self, arguments: dict[str, Any], n_rows: int) -> tuple[sampling.Inspection, sampling.View]:
        """The inspection of the model for arguments of this form, on the first draw's rows, and the view that runs."""
        self._n_rows, name = n_rows, cache_name(arguments)
        filled = name is not None and bool(held_tensors(arguments[name]))
        lengths = [arguments[name].shape[1] == 1 for name in _TEXT if arguments.get(name) is not None]
        form = (tuple(sorted(n for n, v in arguments.items() if v is not None)), tuple(lengths), filled, n_rows == 1)
        if form not in self._known:
            cache = {} if name is None else {name: first_rows(arguments[name], n_rows)}
            inputs = self._one_draw(arguments | cache)
            inspection = sampling.inspect(self.net, inputs, self.sampling.ignored, positions=True, any_length=True)
            inspection.profile.check_random()
            profile = inspection.profile  # tokens that are sorted by expert are put back, if there is room for all
            if not (profile.rows_together or profile.sites_have_rows) or profile.ranks_rows or profile.host_random:
                why = "its texts depend on each other, or it draws from Python's or NumPy's generator"
                what = f"takes one text at a time ({why}), so that draws cannot share a batch"
                raise ValueError(f"`model` {what}. Use dropbayes.function_draw.")
            self._known[form] = inspection, self._view(inspection)
        return self._known[form]

    def is_foldable(self, arguments: dict[str, Any], n_rows: int) -> bool:
        """Whether several draws can share a batch: not if a mask has no rows, as in LayerDrop."""
        return self._inspected(arguments, n_rows)[0].profile.sites_have_rows

    def _one_draw(self, arguments: dict[str, Any]) -> sampling.Inputs:
        """The arguments of the first draw as inputs, texts first: their number is the number of rows."""
        names = sorted(arguments, key=lambda name: name not in _TEXT)
        given = {name: arguments[name] for name in names if arguments[name] is not None}
        return sampling.as_inputs(pytree.tree_map_only(Tensor, self._first_draw, given, is_leaf=sampling.is_cache))

    def _fold(self, leaf: Tensor) -> Tensor:
        """The rows of one draw, repeated for each draw."""
        return torch.cat([leaf] * len(self.draws)) if leaf.dim() > 1 and len(leaf) == self._n_rows else leaf

    def _first_draw(self, leaf: Tensor) -> Tensor:
        is_whole = leaf.shape[:1] == (self._n_rows * len(self.draws),)
        is_text = leaf.dim() > 2 or (leaf.dim() > 1 and not leaf.is_floating_point())
        return leaf[: self._n_rows] if is_whole and is_text else leaf

    def _shared(self, leaf: Tensor) -> Tensor:
        """The first of the equal parts of the draws, of one row or of one head of a row each; all else as it is."""
        n_draws = len(self.draws)
        if leaf.dim() < 2 or leaf.shape[0] % (self._n_rows * n_draws):
            return leaf
        first = leaf[: leaf.shape[0] // n_draws]
        repeated = torch.cat([first] * n_draws)
        # Not so a bias with as many heads as there are rows in all.
        is_equal = torch.equal(leaf, repeated) or equal_but_for_rounding(leaf, repeated, offsets=False)
        return first if is_equal else leaf

    def _view(self, inspection: sampling.Inspection) -> sampling.View:
        """A view of the model in which blocks before the first site run once for all draws."""
        view = sampling.View(self.net, inspection.flags)
        paths = [site.path for site in inspection.profile.sites if site.is_random]
        for path, container in view.net.named_modules():
            for name, block in container.named_children() if isinstance(container, nn.ModuleList) else ():
                child = f"{path}.{name}"
                if not any(f"{site}.".startswith(f"{child}.") for site in paths):
                    block.forward = functools.partial(self._run_once, block.forward)
        return view

    def _run_once(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> PyTree:
        """A block before the first site, run on the rows of one draw."""
        if self._source.site or not self._alike or len(self.draws) == 1:
            return forward(*args, **kwargs)
        args, kwargs = pytree.tree_map_only(Tensor, self._shared, (args, kwargs), is_leaf=sampling.is_cache)
        return pytree.tree_map_only(Tensor, self._fold, forward(*args, **kwargs), is_leaf=sampling.is_cache)


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
        self._n_tokens = 0  # of the text that was read last
        self._keyed = (first.keys, first.draws.start, self.n_draws, first.sampling)

    def model(self) -> Any:
        stand_in = generating_module(sampling.View(self.net).net)
        counted = stand_in._prepare_position_ids_for_generation

        def positions(text: Tensor, known: dict[str, Any]) -> Tensor | None:
            """None without padding: the model's own, which need not begin at 0 (RoBERTa's do not)."""
            given, mask = counted(text, known), known.get("attention_mask")
            if given.dim() == 3 and bool((given == given[:1]).all()):
                return given[0]  # in a text without images, time, height and width are one
            return None if given.dim() == 2 and (mask is None or bool(mask.all())) else given

        @functools.wraps(stand_in.forward)  # transformers reads its parameters
        def forward(**arguments: Any) -> PyTree:
            return self.forward(arguments)

        stand_in.forward, stand_in._prepare_position_ids_for_generation = forward, positions
        return stand_in

    def forward(self, arguments: dict[str, Any]) -> PyTree:
        """The forward pass of all draws: logits are the log of their mean distribution, or those of each draw."""
        n_rows, n_tokens = text_shape(arguments)
        n_rows //= 1 if self.together else self.n_draws
        name = cache_name(arguments)
        cache: Any = arguments.get(name or "")
        is_known = any(cache is known for known in self._caches)
        if n_tokens <= self._n_tokens and not (is_known and held_tensors(cache)):
            raise ValueError("`model` keeps a state outside its cache, which draws cannot share. Pass use_cache=False.")
        self._n_tokens, is_prompt = n_tokens, cache is not None and not is_known
        if is_prompt:  # a new, empty one: of the first draws, with one more for each other chunk
            self._caches = [cache, *(sampling.copied_cache(cache) for _ in self.chunks[1:])]
            cache.reorder_cache = self._reorder
        output, self.log_probs = self._run(arguments, n_rows, alike=self.together or is_prompt)
        if is_prompt:
            self._prompt = arguments
            for cache, chunk in zip(self._caches, self.chunks, strict=True):
                spread(cache, n_rows, 1 if self.together else len(chunk.draws))
        n_bytes = sum(map(cache_bytes, self._caches))  # none if the model keeps no cache
        if not is_prompt and name and n_bytes and self._keyed not in checked.setdefault(self.net, set()):
            self._check_step(arguments, n_rows, name, output.logits.dtype)
            checked[self.net].add(self._keyed)
        self.cache_bytes = max(self.cache_bytes, n_bytes)
        answer = self.log_probs.logsumexp(0) - math.log(self.n_draws) if self.together else self.log_probs.flatten(0, 1)
        output["logits"] = answer[:, None]
        return output

    def _run(self, arguments: dict[str, Any], n_rows: int, *, alike: bool) -> tuple[Any, Tensor]:
        """The first chunk's output, and the log-probabilities of the next token by all draws, each from its cache."""
        name, outputs = cache_name(arguments), []
        for index, chunk in enumerate(self.chunks):
            given = {key: self._chunk_rows(value, chunk, n_rows) for key, value in arguments.items()}
            outputs.append(chunk(given if name is None else given | {name: self._caches[index]}, n_rows, alike=alike))
        return outputs[0], next_log_probs([output.logits[:, -1] for output in outputs], n_rows)

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
        whole = {**step, name: None, "use_cache": False}
        for key in ("input_ids", "decoder_input_ids", "position_ids", "token_type_ids", "decoder_position_ids"):
            if step.get(key) is not None:
                whole[key] = torch.cat([self._prompt[key], step[key]], -1)
        mask, ids = (self._prompt.get(key) for key in ("attention_mask", "input_ids"))
        if mask is not None and ids is not None and getattr(mask, "shape", None) == ids.shape:
            whole["attention_mask"] = torch.cat([mask, torch.ones_like(mask[:, :1])], -1)
        if "inputs_embeds" in self._prompt or step.get("decoder_inputs_embeds") is not None:
            return
        _, expected = self._run(whole, n_rows, alike=False)
        if not equal_but_for_rounding(self.log_probs.to(dtype), expected.to(dtype), offsets=False):
            difference = float((self.log_probs - expected).abs().max())
            why = f"a step from it differs from the whole text by {difference:.2g} in log-probability"
            raise ValueError(f"`model` cannot share its cache among draws: {why}. Pass use_cache=False.")


def generating_module(model: nn.Module) -> Any:
    """The module of transformers inside `model` that generates: `model` itself, or the module that PEFT wraps."""
    return next((m for m in model.modules() if hasattr(type(m), "can_generate")), model)


def cache_name(arguments: dict[str, Any]) -> str | None:
    """The name of the cache argument; None without one."""
    return next((name for name in ("past_key_values", "cache_params") if arguments.get(name) is not None), None)


def held_tensors(cache: Any) -> list[Tensor]:
    """The tensors with rows that a cache holds: in its layers, in its sub-caches and beside them."""
    leaves = pytree.tree_leaves(vars(cache))
    inside = [tensor for leaf in leaves if sampling.is_cache(leaf) for tensor in held_tensors(leaf)]
    return inside + [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > 1 and leaf.numel()]


def cache_bytes(cache: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in held_tensors(cache))


def _change_rows(cache: Any, change: Callable[[Tensor], Tensor]) -> None:
    changed = sampling.copied_cache(cache, lambda held: change(held) if held.dim() > 1 else held)
    cache.__dict__.update(vars(changed))


def reorder(cache: Any, rows: Tensor, n_draws: int) -> None:
    """Takes the given rows in every draw; a layer that all draws share has them once."""
    n_rows = len(rows)
    folded = torch.cat([rows + draw * n_rows for draw in range(n_draws)])
    _change_rows(cache, lambda held: held[(rows if len(held) == n_rows else folded).to(held.device)])


def spread(cache: Any, n_rows: int, n_draws: int) -> None:
    """Gives each draw its own rows in the layers that all draws have shared so far."""
    _change_rows(cache, lambda held: torch.cat([held] * n_draws) if len(held) == n_rows else held)


def first_rows(cache: Any, n_rows: int) -> Any:
    """A copy of the cache with the rows of the first draw alone."""
    copied = sampling.copied_cache(cache, lambda held: held[:n_rows].clone() if held.dim() > 1 else held.clone())
    copied.__dict__.pop("reorder_cache", None)  # bound to the original cache
    return copied
