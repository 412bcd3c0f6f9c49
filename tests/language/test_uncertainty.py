"""The uncertainty of texts, against sums over all texts of a tiny vocabulary."""

import itertools
import math

import pytest
import torch

from dropbayes.language.uncertainty import TokenUncertainty
from dropbayes.scores.information import expected_entropy, mutual_information, predictive_entropy, variation_ratio

T, B, V = 4, 3, 5


def distributions(n_tokens, seed=0):
    logits = 2 * torch.randn(T, B, n_tokens, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return logits.log_softmax(-1)


def judged(log_probs, tokens, mask=None):
    mask = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
    steps = []
    for place in range(tokens.shape[1]):
        before = steps[-1] if steps else None
        steps.append(TokenUncertainty.of(log_probs[:, :, place], tokens[:, place], mask[:, place], before))
    return TokenUncertainty.joined(steps, torch.stack, -1).texts()


def some_tokens(n_tokens):
    return torch.randint(0, V, (B, n_tokens), generator=torch.Generator().manual_seed(1))


def test_token_quantities_are_those_of_the_module_on_information():
    log_probs, tokens = distributions(3), some_tokens(3)
    result, probabilities = judged(log_probs, tokens), log_probs.exp()
    torch.testing.assert_close(result.token_entropy, predictive_entropy(probabilities))
    torch.testing.assert_close(result.token_expected_entropy, expected_entropy(probabilities))
    torch.testing.assert_close(result.token_mutual_information, mutual_information(probabilities))
    torch.testing.assert_close(result.token_disagreement.double(), variation_ratio(probabilities))


def test_the_product_of_expectations_multiplies_means_and_the_expectation_of_products_averages_texts():
    log_probs, tokens = distributions(4), some_tokens(4)
    result = judged(log_probs, tokens)
    chosen = log_probs.gather(-1, tokens.expand(T, B, 4)[..., None])[..., 0].exp()
    torch.testing.assert_close(result.product_of_expectations.log_prob, chosen.mean(0).prod(-1).log())
    torch.testing.assert_close(result.expectation_of_products.log_prob, chosen.prod(-1).mean(0).log())
    torch.testing.assert_close(result.expectation_of_products.normalised_log_prob, chosen.prod(-1).mean(0).log() / 4)


def test_one_token_is_the_same_either_way():
    result = judged(distributions(1), some_tokens(1))
    for quantity in ("log_prob", "total", "data", "knowledge"):
        one, other = (
            getattr(way, quantity) for way in (result.product_of_expectations, result.expectation_of_products)
        )
        torch.testing.assert_close(one, other)


def test_knowledge_of_the_whole_text_by_the_chain_rule_is_the_mutual_information_of_text_and_draw():
    """With weights updated by the text so far, the expectation over texts of the sum over tokens is I(text; draw)."""
    generator = torch.Generator().manual_seed(3)
    first = torch.randn(T, V, generator=generator, dtype=torch.float64).log_softmax(-1)
    second = torch.randn(T, V, V, generator=generator, dtype=torch.float64).log_softmax(-1)  # after each first token
    joint = (first[:, :, None] + second).exp().flatten(1)
    expected = mutual_information(joint)
    total = 0.0
    for a, b in itertools.product(range(V), repeat=2):
        log_probs = torch.stack([first, second[:, a]], 1)[:, None]
        result = judged(log_probs, torch.tensor([[a, b]]))
        total += joint[:, a * V + b].mean() * 2 * result.expectation_of_products.knowledge[0]
    assert float(total) == pytest.approx(float(expected), rel=1e-6)


def test_the_text_after_its_end_counts_for_nothing():
    log_probs, tokens = distributions(5), some_tokens(5)
    mask = torch.arange(5) < torch.tensor([[5], [3], [1]])
    whole, short = judged(log_probs, tokens, mask), judged(log_probs[:, 1:2, :3], tokens[1:2, :3])
    for way in ("product_of_expectations", "expectation_of_products"):
        for quantity in ("log_prob", "normalised_log_prob", "total", "data", "knowledge"):
            torch.testing.assert_close(
                getattr(getattr(whole, way), quantity)[1:2], getattr(getattr(short, way), quantity)
            )
    assert whole.token_entropy.isnan().equal(~mask)


def test_a_token_of_probability_zero_adds_nothing_to_the_entropy():
    log_probs = torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0]]).log()[:, None, None]
    result = judged(log_probs, torch.tensor([[0]]))
    assert float(result.token_entropy) == pytest.approx(math.log(2))
    assert float(result.token_mutual_information) == 0
