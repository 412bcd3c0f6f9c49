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
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["SequenceUncertainty", "TextUncertainty"]


@dataclass(frozen=True)
class SequenceUncertainty:
    """The uncertainty of whole texts under one combination of the draws, one number per row."""

    log_prob: Tensor
    """The log-probability of the text."""
    normalised_log_prob: Tensor
    """The log-probability over the number of tokens."""
    total: Tensor
    """The total uncertainty in nats per token: data and knowledge together."""
    data: Tensor
    """The data uncertainty in nats per token: that on which the draws agree."""
    knowledge: Tensor
    """The knowledge uncertainty in nats per token: the disagreement of the draws."""


@dataclass(frozen=True, kw_only=True)
class TextUncertainty:
    """The uncertainty of texts, `[row, token]`; NaN after the end of a text."""

    tokens: Tensor
    """The tokens that were judged, without the prompt."""
    mask: Tensor
    """Which of them are part of the text: False for the padding after its end."""
    draw_log_probs: Tensor
    """The log-probability that each draw gives each token, `[draw, row, token]`."""
    token_log_prob: Tensor
    """The log of the mean probability of each token."""
    token_entropy: Tensor
    """The entropy of the mean distribution: total uncertainty."""
    token_expected_entropy: Tensor
    """The mean of the draws' entropies: data uncertainty."""
    token_mutual_information: Tensor
    """Their difference, the mutual information of token and draw: knowledge uncertainty."""
    token_disagreement: Tensor
    """The share of draws whose most probable token is not that of the majority."""
    product_of_expectations: SequenceUncertainty
    """Texts judged by the mean distribution at every token."""
    expectation_of_products: SequenceUncertainty
    """Texts judged by the mean over draws of the whole text's probability."""

    @property
    def token_probability(self) -> Tensor:
        """The mean probability of each token."""
        return self.token_log_prob.exp()


@dataclass(frozen=True)
class TokenUncertainty:
    """The uncertainty of one new token per row; NaN in finished rows."""

    tokens: Tensor
    mask: Tensor
    log_prob: Tensor
    entropy: Tensor
    expected_entropy: Tensor
    mutual_information: Tensor
    disagreement: Tensor
    draw_log_probs: Tensor
    """The log-probability that each draw gives the token, `[draw, row]`."""
    weighted_entropy: Tensor
    """The entropy of the distribution in which draws are weighted by the text so far."""
    weighted_expected_entropy: Tensor


class UncertaintyRecord:
    """The uncertainty of texts, accumulated token by token."""

    def __init__(self) -> None:
        self.steps: list[TokenUncertainty] = []
        self._log_weights: Tensor | None = None

    def add(self, log_probs: Tensor, tokens: Tensor, mask: Tensor) -> TokenUncertainty:
        """Adds the next token of every row.

        Args:
            log_probs: The log-probabilities of all tokens by each draw, `[draw, row, token]`.
            tokens: The token that followed, `[row]`.
            mask: The rows whose text had not ended, `[row]`.
        """
        n_draws = log_probs.shape[0]
        if self._log_weights is None:
            self._log_weights = torch.full(log_probs.shape[:2], -math.log(n_draws), device=log_probs.device)
        weights = self._log_weights.log_softmax(0)
        entropies = _entropy(log_probs)
        mean = log_probs.logsumexp(0) - math.log(n_draws)
        weighted = (log_probs + weights[..., None]).logsumexp(0)
        chosen = log_probs.gather(-1, tokens.expand(n_draws, -1)[..., None])[..., 0]
        votes = log_probs.argmax(-1)
        step = {
            "log_prob": mean.gather(-1, tokens[:, None])[:, 0],
            "entropy": _entropy(mean),
            "expected_entropy": entropies.mean(0),
            "mutual_information": (_entropy(mean) - entropies.mean(0)).clamp(min=0),
            "disagreement": 1 - (votes == votes.mode(0).values).float().mean(0),
            "draw_log_probs": chosen,
            "weighted_entropy": _entropy(weighted),
            "weighted_expected_entropy": (weights.exp() * entropies).sum(0),
        }
        masked = {name: value.masked_fill(~mask, math.nan) for name, value in step.items()}
        self._log_weights = self._log_weights + chosen.masked_fill(~mask, 0.0)
        self.steps.append(TokenUncertainty(tokens=tokens, mask=mask, **masked))
        return self.steps[-1]

    def result(self) -> TextUncertainty:
        """The uncertainty of the texts so far."""

        def stack_steps(name: str) -> Tensor:
            return torch.stack([getattr(step, name) for step in self.steps], -1)

        draws, mask = stack_steps("draw_log_probs"), stack_steps("mask")
        texts = draws.nansum(-1)
        return TextUncertainty(
            tokens=stack_steps("tokens"),
            mask=mask,
            draw_log_probs=draws,
            token_log_prob=stack_steps("log_prob"),
            token_entropy=stack_steps("entropy"),
            token_expected_entropy=stack_steps("expected_entropy"),
            token_mutual_information=stack_steps("mutual_information"),
            token_disagreement=stack_steps("disagreement"),
            product_of_expectations=_sequence(
                stack_steps("log_prob").nansum(-1), stack_steps("entropy"), stack_steps("expected_entropy"), mask
            ),
            expectation_of_products=_sequence(
                texts.logsumexp(0) - math.log(len(texts)),
                stack_steps("weighted_entropy"),
                stack_steps("weighted_expected_entropy"),
                mask,
            ),
        )


def _sequence(log_prob: Tensor, total: Tensor, data: Tensor, mask: Tensor) -> SequenceUncertainty:
    length = mask.sum(-1)
    total, data = total.nansum(-1) / length, data.nansum(-1) / length
    return SequenceUncertainty(log_prob, log_prob / length, total, data, (total - data).clamp(min=0))


def _entropy(log_probs: Tensor) -> Tensor:
    """The entropy over the last axis; a token of probability 0 adds nothing."""
    return -torch.where(log_probs > -math.inf, log_probs.exp() * log_probs, 0.0).sum(-1)
