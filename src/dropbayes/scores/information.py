r"""Entropy, mutual information and variation ratio of class probabilities drawn from a distribution over functions.

Every function reads *probability draws* `[draw, row, class]`: axis 0 holds the draws $\omega_t \sim q(\omega)$, and the
class axis sums to one. With $\bar p = \frac1T \sum_t p_t$ the total uncertainty splits as

$$\underbrace{H[\bar p]}_{\text{predictive}} = \underbrace{\tfrac1T \sum_t H[p_t]}_{\text{expected: aleatoric}}
+ \underbrace{I[y; \omega]}_{\text{mutual information: epistemic}}.$$

Quantities are in nats. NumPy arrays are accepted; tensors are returned.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from dropbayes.runtime.validation import Array, check_count, class_probabilities, random_generator
from dropbayes.scores.averages import draw_mean

OUTCOME_LIMIT = 10_000
"""The maximum number of joint labels to enumerate (batches of 4 for 10 classes, of 13 for 2); more are sampled."""


def _draws(probability_draws: Array) -> Tensor:
    return class_probabilities("probability_draws", probability_draws, axes="[draw, ..., class]")


def entropy(probabilities: Array) -> Tensor:
    r"""The entropy $H[p] = -\sum_c p_c \log p_c$ of class probabilities `[..., class]`, with $0 \log 0 = 0$.

    Examples:
        >>> entropy(torch.tensor([[0.5, 0.5], [1.0, 0.0]]))
        tensor([0.6931, 0.0000])
    """
    return torch.special.entr(class_probabilities("probabilities", probabilities, axes="[..., class]")).sum(-1)


def predictive_entropy(probability_draws: Array) -> Tensor:
    r"""The entropy of the predictive distribution, $H\big[\tfrac1T \sum_t p_t\big]$: total uncertainty, `[row]`.

    Examples:
        >>> predictive_entropy(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]))  # the draws disagree
        tensor([0.6931])
    """
    return torch.special.entr(_draws(probability_draws).mean(0)).sum(-1)


def expected_entropy(probability_draws: Array) -> Tensor:
    r"""The mean entropy of the draws, $\tfrac1T \sum_t H[p_t]$: aleatoric uncertainty, `[row]`.

    Examples:
        >>> expected_entropy(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]))  # yet each is sure
        tensor([0.])
    """
    return torch.special.entr(_draws(probability_draws)).sum(-1).mean(0)


def mutual_information(probability_draws: Array) -> Tensor:
    r"""The mutual information of label and function (BALD), $I[y; \omega] = H[\bar p] - \tfrac1T \sum_t H[p_t]$.

    Computed as the mean divergence $\tfrac1T \sum_t \mathrm{KL}(p_t \,\|\, \bar p)$, the same number without the
    cancellation: it lies between 0 and $\log T$ and keeps its digits when the draws almost agree.

    Examples:
        >>> mutual_information(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]))
        tensor([0.6931])
        >>> mutual_information(torch.tensor([[[0.5, 0.5]], [[0.5, 0.5]]]))  # noisy, but nothing to learn
        tensor([0.])
    """
    draws = _draws(probability_draws)
    mean = draw_mean(draws)
    deviation = draws - mean
    # p log(p / m) - (p - m) has the same sum over draws and classes, and every term is at least 0. log1p keeps the
    # digits where p is close to m; elsewhere (p - m) / m may round to -1, and the difference of logarithms is right.
    # Where a probability is 0 its term is 0; the 1 in its place keeps the gradient finite.
    positive = draws > 0
    draw, average = torch.where(positive, draws, 1), torch.where(positive, mean, 1)
    ratio = (draw - average) / average
    near = ratio.abs() < 0.5
    log_ratio = torch.where(near, torch.where(near, ratio, 0).log1p(), draw.log() - average.log())
    divergence = torch.where(positive, draw * log_ratio, 0) - deviation
    return draw_mean(divergence.clamp_min(0).sum(-1))


def variation_ratio(probability_draws: Array) -> Tensor:
    r"""The fraction of draws that disagree with the modal class, $1 - f_{\max} / T$, at most $1 - 1/C$.

    Examples:
        >>> draws = torch.tensor([[[0.9, 0.1]], [[0.6, 0.4]], [[0.2, 0.8]], [[0.7, 0.3]]])
        >>> variation_ratio(draws)
        tensor([0.2500])
    """
    draws = _draws(probability_draws)
    chosen = draws.argmax(-1)
    return 1 - (chosen == chosen.mode(0).values).sum(0).to(draws.dtype) / len(draws)


@dataclass(frozen=True)
class Outcomes:
    r"""The possible joint labels $\mathbf y$ of a batch of rows, $p(\mathbf y)$ and $p(\omega_t \mid \mathbf y)$.

    A batch grows one row at a time by the chain rule
    $I[\mathbf y, y'; \omega] = I[\mathbf y; \omega] + \mathbb E_{\mathbf y} I[y'; \omega \mid \mathbf y]$:
    `information` is the second term, `with_row` adds the row.
    """

    probability: Tensor  # [outcome]
    draw_weights: Tensor  # [outcome, draw]

    @classmethod
    def of_no_rows(cls, probability_draws: Tensor) -> Self:
        """The single outcome of an empty batch, with probability 1 and equal draw weights."""
        weights = probability_draws.new_ones(1, len(probability_draws), dtype=torch.float64)
        return cls(weights[:, 0], weights / len(probability_draws))

    def information(self, probability_draws: Tensor) -> Tensor:
        r"""The information a further row would add, $\mathbb E_{\mathbf y} I[y'; \omega \mid \mathbf y]$, `[row]`."""
        draws = probability_draws.double()
        n_draws, n_rows, n_classes = draws.shape
        entropy_of_draws = torch.special.entr(draws).sum(-1)
        total = draws.new_zeros(n_rows)
        chunk = max(1, 2**22 // (n_rows * n_classes))  # of the [outcome, row, class] product: 32 MiB in float64
        for probability, weights in zip(self.probability.split(chunk), self.draw_weights.split(chunk), strict=True):
            given = (weights @ draws.reshape(n_draws, -1)).reshape(-1, n_rows, n_classes)
            # Both terms under the same weights: each outcome's information is at least 0, sampled or not.
            total += probability @ (torch.special.entr(given).sum(-1) - weights @ entropy_of_draws)
        return total.clamp_min(0)

    def with_row(self, row_draws: Tensor, *, max_outcomes: int, generator: torch.Generator) -> Self:
        """The outcomes with one more row `[draw, class]`: all of them, or `max_outcomes` sampled if there are more."""
        row_draws = row_draws.double()
        given = self.draw_weights @ row_draws  # p(y' | outcome): [outcome, class]
        joint = (self.probability[:, None] * given).flatten()
        if joint.numel() <= max_outcomes:
            chosen = joint.nonzero().squeeze(1)
            probability = joint[chosen]
        else:
            # Systematic sampling: unbiased for every expectation over outcomes, less noisy than independent samples.
            offset = torch.rand(1, generator=generator, dtype=torch.float64, device="cpu").to(joint.device)
            grid = (torch.arange(max_outcomes, dtype=torch.float64, device=joint.device) + offset) / max_outcomes
            cumulative = joint.cumsum(0)
            chosen = torch.searchsorted(cumulative, grid * cumulative[-1]).clamp_max(joint.numel() - 1)
            probability = joint.new_full((max_outcomes,), 1 / max_outcomes)
        outcome, label = chosen // given.shape[1], chosen % given.shape[1]
        likelihood = self.draw_weights[outcome] * row_draws.T[label]
        return type(self)(probability, likelihood / likelihood.sum(1, keepdim=True))


def joint_mutual_information(probability_draws: Array, *, max_outcomes: int = OUTCOME_LIMIT, seed: int = 0) -> Tensor:
    r"""The mutual information of a whole batch's labels and the function, $I[y_1, \dots, y_B; \omega]$ (BatchBALD).

    $$I[\mathbf y; \omega] = H\Big[\tfrac1T \sum_t \prod_b p_t(y_b)\Big] - \sum_b \tfrac1T \sum_t H[p_t(y_b)]$$

    Redundant rows count once. The product needs draws that are *functions*: take them with `masks="shared"`. The value
    is exact for up to `max_outcomes` joint labels, an unbiased Monte Carlo estimate from as many sampled ones beyond,
    and never above $\log T$: take $T \gg e^{I}$ draws.

    Examples:
        >>> once = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
        >>> twice = once.repeat(1, 2, 1)  # a duplicated row teaches nothing more
        >>> mutual_information(twice).sum(), joint_mutual_information(twice)
        (tensor(1.3863), tensor(0.6931, dtype=torch.float64))
    """
    draws = class_probabilities("probability_draws", probability_draws, axes="[draw, row, class]")
    check_count("max_outcomes", max_outcomes)
    generator = random_generator(seed)
    outcomes = Outcomes.of_no_rows(draws)
    total = draws.new_zeros((), dtype=torch.float64)
    for row in range(draws.shape[1]):
        total = total + outcomes.information(draws[:, row : row + 1])[0]
        outcomes = outcomes.with_row(draws[:, row], max_outcomes=max_outcomes, generator=generator)
    return total
