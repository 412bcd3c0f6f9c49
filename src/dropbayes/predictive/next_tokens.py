"""A text as held-out rows: each token is the outcome of those before it."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.utils._pytree import PyTree


class NextTokens(nn.Module):
    """A language model as a function from a text to the log-probability of every token except the first.

    The model is a causal one of transformers, or a network that returns logits `[row, position, token]`.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """The log-probabilities `[row, position - 1]`."""
        known = {} if attention_mask is None else {"attention_mask": attention_mask}
        output = self.model(input_ids=input_ids, **known)
        logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
        if not isinstance(logits, Tensor) or logits.dim() != 3 or logits.shape[:2] != input_ids.shape:
            raise ValueError(
                "`net` must be a causal language model, with logits [row, position, token] for every position: "
                "without outcomes `y`, `x` is a text."
            )
        log_probabilities = logits[:, :-1].float().log_softmax(-1)
        return log_probabilities.gather(-1, input_ids[:, 1:, None])[..., 0]


def text_densities(sampled: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    """The log-likelihood in nats of each text under draws of its tokens' log-probabilities, excluding padding.

    Scaled so that the mean over rows is the mean over tokens.
    """
    mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))
    counted = (mask[:, 1:] * mask[:, :-1]).double()  # the first token after padding has no context
    if not counted.sum() > 0:
        raise ValueError("`x` must hold a text of two tokens at least; every second token is padding.")
    mixed = sampled.double().logsumexp(0) - math.log(len(sampled))
    total = (mixed * counted.to(mixed.device)).sum(-1)
    return total * len(total) / float(counted.sum())


def text_inputs(x: PyTree) -> dict[str, Tensor]:
    """A text as the named inputs `input_ids` and, if given, `attention_mask`."""
    inputs = {"input_ids": x} if isinstance(x, Tensor) else dict(x) if isinstance(x, Mapping) else {}
    ids = inputs.get("input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point() or ids.shape[1] < 2:
        raise ValueError(
            "`x` must be a text where no `y` is given: token ids [row, position], two positions at least, or what a "
            f"tokenizer returns; got {type(x).__name__}{'' if ids is None else f' with input_ids {tuple(ids.shape)}'}."
        )
    return {name: inputs[name] for name in ("input_ids", "attention_mask") if name in inputs}
