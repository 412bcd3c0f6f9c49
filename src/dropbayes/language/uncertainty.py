r"""The uncertainty of a text under draws of a language model, per token and as a whole.

Draw $t$ gives the next token the distribution $p_t(y_l \mid y_{<l}, x)$. Malinin and Gales (2021, *Uncertainty
Estimation in Autoregressive Structured Prediction*) combine the draws in two ways: the *product of expectations*
averages them at every token,

$$P(y \mid x) = \prod_l \frac1T \sum_t p_t(y_l \mid y_{<l}, x),$$

and the *expectation of products* averages whole texts,

$$P(y \mid x) = \frac1T \sum_t \prod_l p_t(y_l \mid y_{<l}, x)
 = \prod_l \sum_t w_{t,l}\, p_t(y_l \mid y_{<l}, x), \qquad w_{t,l} \propto \prod_{k<l} p_t(y_k \mid y_{<k}, x),$$

in which the text so far has updated the weight of each draw. With weights $w$, the total uncertainty of a token is the
entropy of the mean distribution, data uncertainty the mean of the entropies, and knowledge uncertainty their
difference, the mutual information of token and draw. Those of a text are the means over its tokens (rates, in nats per
token): the chain rule of the entropy of a sequence, estimated with this one text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch
from torch import Tensor

from dropbayes.runtime.formatting import Printed, Table, count, printable_name
from dropbayes.runtime.validation import needed_for
from dropbayes.sampling import evaluation_output

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class SequenceUncertainty:
    """The uncertainty of whole texts under one combination of the draws, one number per row."""

    log_prob: Tensor  #: The log-probability of the text.
    normalised_log_prob: Tensor  #: The log-probability over the number of tokens.
    total: Tensor  #: The total uncertainty in nats per token: data and knowledge together.
    data: Tensor  #: The data uncertainty in nats per token: that on which the draws agree.
    knowledge: Tensor  #: The knowledge uncertainty in nats per token: the disagreement of the draws.


@dataclass(frozen=True, kw_only=True)
class TextUncertainty(Printed):
    """The uncertainty of texts, `[row, token]`, NaN after the end of a text; prints as a table."""

    tokens: Tensor  #: The tokens that were judged, without the prompt.
    mask: Tensor  #: Which of them are part of the text: False for the padding after its end.
    draw_log_probs: Tensor  #: The log-probability that each draw gives each token, `[draw, row, token]`.
    token_log_prob: Tensor  #: The log of the mean probability of each token.
    token_entropy: Tensor  #: The entropy of the mean distribution: total uncertainty.
    token_expected_entropy: Tensor  #: The mean of the draws' entropies: data uncertainty.
    token_mutual_information: Tensor  #: Their difference, that of token and draw: knowledge uncertainty.
    token_disagreement: Tensor  #: The share of draws whose most probable token is not that of the majority.
    product_of_expectations: SequenceUncertainty  #: Texts judged by the mean distribution at every token.
    expectation_of_products: SequenceUncertainty  #: Texts judged by the mean over draws of their probability.
    texts: list[str] | None = None  #: The texts themselves, if a tokenizer was given.

    def to_pandas(self) -> pandas.DataFrame:
        """A pandas table with a line for each text: its log-probability and its uncertainty, in nats per token."""
        whole = self.product_of_expectations
        numbers = {"n_tokens": self.mask.sum(-1), "log_prob": whole.log_prob, "total": whole.total, "data": whole.data}
        numbers |= {"knowledge": whole.knowledge, "log_prob_std": self.draw_log_probs.nansum(-1).std(0, correction=0)}
        return text_frame({"row": torch.arange(len(self.tokens))}, numbers, self.texts)

    def table(self) -> Table:
        """The texts, one in each line."""
        return text_table(f"{count(len(self.tokens), 'text')}, {len(self.draw_log_probs)} draws", self.to_pandas())

    @property
    def token_probability(self) -> Tensor:
        """The mean probability of each token."""
        return self.token_log_prob.exp()


def text_frame(index: dict[str, Tensor], numbers: dict[str, Tensor], texts: list[str] | None) -> pandas.DataFrame:
    with needed_for("a table of texts"):
        import pandas
    columns = {name: value.cpu().numpy() for name, value in (index | numbers).items()}
    return pandas.DataFrame(columns if texts is None else {**columns, "text": texts})


def text_table(title: str, frame: pandas.DataFrame) -> Table:
    """A table of texts as text, with the beginning of each."""
    shown = {name: [f"{cell:.4g}" for cell in frame[name]] for name in frame if name != "text"}
    if "text" in frame:
        shown["text"] = [printable_name(text, max_length=40) for text in frame["text"]]
    rows = list(zip(*shown.values(), strict=True))
    return Table(title, rows, list(shown), align=">" * (len(shown) - ("text" in shown)))


@dataclass(frozen=True)
class TokenUncertainty:
    """The uncertainty of one new token per row, or of texts, `[row, token]`; NaN after the end of a text."""

    tokens: Tensor
    mask: Tensor
    log_prob: Tensor
    entropy: Tensor
    expected_entropy: Tensor
    mutual_information: Tensor
    disagreement: Tensor
    draw_log_probs: Tensor  #: The log-probability that each draw gives the token, `[draw, row]`.
    weighted_entropy: Tensor  #: The entropy of the distribution in which draws are weighted by the text so far.
    weighted_expected_entropy: Tensor
    text_log_probs: Tensor  #: The log-probability that each draw gives the text so far, the token included.

    @classmethod
    def of(cls, log_probs: Tensor, tokens: Tensor, mask: Tensor, before: Self | None = None) -> Self:
        """That of the token after those `before`, from the log-probabilities of all by each draw, `[draw, row, token]`.

        `mask` has the rows whose text had not ended.
        """
        n_draws = log_probs.shape[0]
        so_far = torch.zeros_like(log_probs[..., 0]) if before is None else before.text_log_probs
        chosen = log_probs.gather(-1, tokens.expand(n_draws, -1)[..., None])[..., 0]
        entropies, weights, votes = _entropy(log_probs), so_far.log_softmax(0), log_probs.argmax(-1)
        mean = log_probs.logsumexp(0) - math.log(n_draws)
        judged = {
            "log_prob": mean.gather(-1, tokens[:, None])[:, 0],
            "entropy": _entropy(mean),
            "expected_entropy": entropies.mean(0),
            "mutual_information": (_entropy(mean) - entropies.mean(0)).clamp(min=0),
            "disagreement": 1 - (votes == votes.mode(0).values).float().mean(0),
            "draw_log_probs": chosen,
            "weighted_entropy": _entropy((log_probs + weights[..., None]).logsumexp(0)),
            "weighted_expected_entropy": (weights.exp() * entropies).sum(0),
        }
        judged = {name: value.masked_fill(~mask, math.nan) for name, value in judged.items()}
        return cls(tokens, mask, **judged, text_log_probs=so_far + chosen.masked_fill(~mask, 0.0))

    @classmethod
    def joined(cls, parts: Sequence[Self], join: Callable[..., Tensor], axis: int) -> Self:
        """Tokens stacked to texts, or the texts of several rows one after another."""
        return cls(**{name: join([vars(part)[name] for part in parts], axis) for name in vars(parts[0])})

    def texts(self) -> TextUncertainty:
        """The uncertainty of the texts that the tokens make."""
        names = ("log_prob", "entropy", "expected_entropy", "mutual_information", "disagreement")
        known: dict[str, Any] = {f"token_{name}": vars(self)[name] for name in names}
        known |= {name: vars(self)[name] for name in ("tokens", "mask", "draw_log_probs")}
        whole = self.text_log_probs[..., -1].logsumexp(0) - math.log(len(self.text_log_probs))
        product = _sequence(self.log_prob.nansum(-1), self.entropy, self.expected_entropy, self.mask)
        expectation = _sequence(whole, self.weighted_entropy, self.weighted_expected_entropy, self.mask)
        return TextUncertainty(product_of_expectations=product, expectation_of_products=expectation, **known)


def _sequence(log_prob: Tensor, total: Tensor, data: Tensor, mask: Tensor) -> SequenceUncertainty:
    length = mask.sum(-1)
    total, data = total.nansum(-1) / length, data.nansum(-1) / length
    return SequenceUncertainty(log_prob, log_prob / length, total, data, (total - data).clamp(min=0))


def _entropy(log_probs: Tensor) -> Tensor:
    """The entropy over the last axis; a token of probability 0 adds nothing."""
    return -torch.where(log_probs > -math.inf, log_probs.exp() * log_probs, 0.0).sum(-1)


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
    if weights.shape != (len(texts),) or not math.isfinite(weights.max()):  # that of some may be -inf
        raise ValueError(f"`log_probs` must have a number for each of the {len(texts)} texts; got {log_probs!r}.")
    firsts: list[Text] = []
    shares: list[float] = []
    for text, share in zip(texts, weights.double().softmax(0).tolist(), strict=True):
        alike = (n for n, first in enumerate(firsts) if equivalent(first, text) and equivalent(text, first))
        if (index := next(alike, len(firsts))) == len(firsts):
            firsts.append(text)
            shares.append(0.0)
        shares[index] += share
    return -sum(share * math.log(share) for share in shares if share > 0) + 0.0


def entailment(model: Any, tokenizer: Any, *, question: str = "") -> Callable[[str, str], bool]:
    """Whether one text implies another, by a model of natural-language inference: for `semantic_entropy`.

    The function of a premise and a hypothesis asks a sequence classifier of transformers one of whose labels is
    "entailment" (`AutoModelForSequenceClassification.from_pretrained("microsoft/deberta-large-mnli")`). The `question`
    that the texts answer is put before both.
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
