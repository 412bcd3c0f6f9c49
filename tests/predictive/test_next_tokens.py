"""Tests of a text as held-out rows: what each token's probability is, and how they are averaged."""

import math

import pytest
import torch
from torch import nn

from dropbayes.predictive.next_tokens import NextTokens, text_densities, text_inputs


class Counting(nn.Module):
    """The next token is the present one plus one, with probability 3/4."""

    def forward(self, input_ids):
        probabilities = torch.full((*input_ids.shape, 5), 0.25 / 4)
        return probabilities.scatter(-1, ((input_ids + 1) % 5)[..., None], 0.75).log()


def test_every_token_has_the_probability_that_those_before_give_it():
    log_probabilities = NextTokens(Counting())(torch.tensor([[0, 1, 2, 0]]))
    torch.testing.assert_close(log_probabilities.exp(), torch.tensor([[0.75, 0.75, 0.0625]]))


def test_probabilities_are_averaged_over_draws_and_logs_over_tokens():
    inputs = {"input_ids": torch.ones(2, 3, dtype=torch.long)}
    draws = torch.tensor([[[0.2, 0.4], [0.6, 0.8]], [[0.4, 0.4], [0.2, 0.4]]]).log()
    expected = (math.log(0.3) + math.log(0.4) + math.log(0.4) + math.log(0.6)) / 4
    assert float(text_densities(draws, inputs).mean()) == pytest.approx(expected)


def test_rows_count_by_their_tokens():
    mask = torch.tensor([[1, 1, 1], [0, 1, 1]])
    inputs = text_inputs({"input_ids": torch.ones(2, 3, dtype=torch.long), "attention_mask": mask})
    logs = torch.tensor([[[-1.0, -2.0], [-50.0, -6.0]]])  # the second row's first token follows padding
    assert float(text_densities(logs, inputs).mean()) == pytest.approx(-9 / 3)


def test_a_text_of_padding_is_refused():
    with pytest.raises(ValueError, match="two tokens at least"):
        text_densities(
            torch.zeros(1, 1, 2), {"input_ids": torch.zeros(1, 3).long(), "attention_mask": torch.tensor([[0, 1, 0]])}
        )
