"""Semantic entropy: the uncertainty about the meaning of a text rather than its wording."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from dropbayes.sampling import evaluation_output

__all__ = ["entailment", "semantic_entropy"]

Text = TypeVar("Text")


def semantic_entropy(
    texts: Sequence[Text],
    equivalent: Callable[[Text, Text], bool],
    *,
    log_probs: Sequence[float] | Tensor | None = None,
) -> float:
    r"""The entropy in nats over the meanings of texts (Kuhn, Gal and Farquhar 2023, *Semantic Uncertainty*).

    $-\sum_c P(c) \ln P(c)$, where $P(c)$ is the share of texts in class $c$, or the sum of their probabilities,
    normalised. A text joins the first class whose first member is equivalent to it, in both directions.

    Args:
        texts: The texts drawn for one prompt, one per draw: strings, or any values that `equivalent` accepts.
        equivalent: A function that says whether the first text implies the second; called in both directions.
        log_probs: The log-probability of each text; by default all have the same weight.

    Example:
        >>> same_number = lambda a, b: a.strip(".") == b.strip(".")
        >>> round(semantic_entropy(["42", "42.", "41", "42"], same_number), 3)
        0.562
    """
    if isinstance(texts, str) or len(texts) == 0:
        raise ValueError(f"`texts` must be a sequence of at least one text; got {texts!r}.")
    if not callable(equivalent):
        raise TypeError(f"`equivalent` must be a function of two texts; got {type(equivalent).__name__}.")
    weights = torch.zeros(len(texts)) if log_probs is None else torch.as_tensor(log_probs, dtype=torch.float64)
    if weights.shape != (len(texts),) or bool(weights.isnan().any()):
        raise ValueError(f"`log_probs` must have a number for each of the {len(texts)} texts; got {log_probs!r}.")
    firsts: list[Text] = []
    shares: list[float] = []
    for text, share in zip(texts, weights.double().softmax(0).tolist(), strict=True):
        index = next((n for n, first in enumerate(firsts) if equivalent(first, text) and equivalent(text, first)), None)
        if index is None:
            firsts.append(text)
            shares.append(share)
        else:
            shares[index] += share
    return -sum(share * math.log(share) for share in shares if share > 0) + 0.0


def entailment(model: Any, tokenizer: Any, *, question: str = "") -> Callable[[str, str], bool]:
    """Whether one text implies another, by a model of natural-language inference: for `semantic_entropy`.

    Args:
        model: A sequence classifier of transformers one of whose labels is "entailment"
            (`AutoModelForSequenceClassification.from_pretrained("microsoft/deberta-large-mnli")`).
        tokenizer: Its tokenizer.
        question: The question that the texts answer, put before both.

    Returns:
        A function of a premise and a hypothesis.
    """
    labels = {index: str(label).lower() for index, label in model.config.id2label.items()}
    implied = [index for index, label in labels.items() if label.startswith("entail")]
    if len(implied) != 1:
        raise ValueError(f"`model` must have one label called entailment; its labels are {list(labels.values())}.")

    def implies(premise: str, hypothesis: str) -> bool:
        texts = [f"{question} {text}".strip() for text in (premise, hypothesis)]
        pair = tokenizer(*texts, return_tensors="pt", truncation=True)
        inputs = {name: value.to(model.device) for name, value in pair.items()}
        return int(evaluation_output(model, inputs).logits.argmax(-1)) == int(implied[0])

    return implies
