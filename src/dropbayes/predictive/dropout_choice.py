r"""The choice of a drop probability for a network that was trained without dropout."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils._pytree import PyTree

from dropbayes.layers.conversion import add_dropout
from dropbayes.likelihoods import Likelihood
from dropbayes.predictive.evaluation import checked_targets, evaluation_tensor, score_draws
from dropbayes.runtime.formatting import Printed, Table
from dropbayes.sampling import Sampling, draws, output_tensor
from dropbayes.scores.averages import standard_error


@dataclass(frozen=True)
class DropoutChoice(Printed):
    """The drop probability for a network trained without dropout; prints as a table.

    Attributes:
        drop_prob: The largest drop probability that costs at most the tolerance; 0 if none does.
        helps: Whether it improves the held-out log-likelihood over no dropout by more than the standard error.
        log_likelihood: The held-out log-likelihood of the choice.
        plain_log_likelihood: The held-out log-likelihood of the network without dropout.
        tried: The log-likelihood by drop probability.
        network: A copy of the network with the chosen dropout, which shares its weights for a text; the network itself
            if nothing was chosen.
    """

    drop_prob: float
    helps: bool
    log_likelihood: float
    plain_log_likelihood: float
    tried: dict[float, float]
    network: nn.Module

    def table(self) -> Table:
        """The drop probabilities that were tried, and the choice."""
        tried = {"without dropout": self.plain_log_likelihood}
        tried |= {f"drop_prob {p:g}": value for p, value in self.tried.items()}
        note = f"chosen: {self.drop_prob}, {'better' if self.helps else 'no better'} than no dropout"
        if not self.drop_prob:
            note = "no drop probability keeps the held-out log-likelihood within the tolerance"
        rows = [(name, f"{value: .4f}") for name, value in tried.items()]
        return Table("held-out log-likelihood", rows, align="<>", notes=[note])


def choose_dropout(
    net: nn.Module,
    x: PyTree,
    y: Tensor | None = None,
    *,
    tolerance: float = 0.01,
    where: Callable[[str, nn.Module], bool] | Collection[str] | None = None,
    likelihood: Likelihood | None = None,
    drop_probs: Sequence[float] = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3),
    n_draws: int = 50,
    seed: int = 0,
) -> DropoutChoice:
    r"""The largest drop probability within a tolerance of held-out log-likelihood, without retraining the network.

    Dropout is inserted before every weight layer (`add_dropout`) without further training. The largest probability that
    costs at most the tolerance against the plain network is chosen: the widest distribution over functions consistent
    with the rows. If even the smallest costs more, the choice is 0. `tune_dropout` fits one rate per layer.

    Without `y` the network is a causal language model and `x` a text: each token is the outcome of those before it,
    with one mask for all positions of a sequence, and the tolerance is in nats per token.

    Args:
        net: A trained network.
        x: The inputs of held-out rows; for a language model token ids `[row, position]`, or a dict with
            `input_ids` and `attention_mask`.
        y: Their outcomes; None for a text.
        tolerance: The largest acceptable loss of log-likelihood, in nats per row (per token of a text).
        where: The weight layers that may be given dropout; see `add_dropout`.
        likelihood: The observation model; see `check`.
        drop_probs: The probabilities to try, in increasing order.
        n_draws: The number of draws T.
        seed: The seed of the draws.
    """
    if not tolerance >= 0:
        raise ValueError(f"`tolerance` must be zero or more nats per row; got {tolerance!r}.")
    if not drop_probs or not all(0 < p < 1 for p in drop_probs):
        raise ValueError(f"`drop_probs` must hold probabilities in (0, 1); got {list(drop_probs)}.")
    is_text = y is None
    inputs = text_inputs(x) if is_text else x
    function = NextTokens if is_text else lambda network: network
    plain = evaluation_tensor(function(net), inputs)
    targets, judged = (plain, None) if y is None else checked_targets(y, plain, likelihood)

    def density(sampled: Tensor) -> Tensor:
        return text_densities(sampled, inputs) if is_text else score_draws(sampled, targets, judged)[0]

    base, scores = density(plain[None]), dict[float, Tensor]()
    sampling = Sampling(positions="tied" if is_text else None)
    for p in sorted(drop_probs):
        candidate = function(add_dropout(net, p, where=where, copy=False))
        sampled = draws(candidate, inputs, n_draws=n_draws, seed=seed, masks="row", sampling=sampling)
        scores[p] = density(output_tensor(sampled))
    tried = {p: float(values.mean()) for p, values in scores.items()}
    allowed = [p for p, value in tried.items() if value >= float(base.mean()) - tolerance]
    chosen = max(allowed, default=0.0)
    network = add_dropout(net, chosen, where=where, copy=not is_text) if chosen else net
    best = scores.get(chosen, base)
    gain = best - base
    helps = bool(chosen) and bool(gain.mean() > standard_error(gain))
    return DropoutChoice(chosen, helps, float(best.mean()), float(base.mean()), tried, network)


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
                "`net` must be a causal language model, with logits [row, position, token] for every position; without "
                "outcomes `y`, choose_dropout takes `x` as a text."
            )
        log_probabilities = logits[:, :-1].float().log_softmax(-1)
        return log_probabilities.gather(-1, input_ids[:, 1:, None])[..., 0]


def text_densities(sampled: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    """The log-likelihood in nats of each text under draws of its tokens' log-probabilities, excluding padding.

    Scaled so that the mean over rows is the mean over tokens.
    """
    ids, mask = inputs["input_ids"], inputs.get("attention_mask")
    counted = (torch.ones_like(ids) if mask is None else mask)[:, 1:].double()
    if mask is not None:
        counted = counted * mask[:, :-1]  # the first token after padding has no context
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
