"""Texts that exist are judged as those that were generated."""

import pytest
import torch

import dropbayes as db
from tests.language.test_generation import OPTIONS, lively, prompts


@pytest.mark.parametrize("name", ["gpt2", "bart"])
def test_a_text_that_exists_is_judged_as_the_one_that_was_generated(name):
    generated = db.language.generate(lively(name), prompts(), n_draws=4, seed=3, do_sample=True, **OPTIONS)
    options = {"n_draws": 4, "seed": 3, "answer_mask": generated.mask}
    judged = db.language.score(lively(name), prompts(), generated.tokens, draws_at_once=3, **options)
    for quantity in ("token_log_prob", "token_entropy", "token_mutual_information", "draw_log_probs"):
        torch.testing.assert_close(getattr(judged, quantity), getattr(generated, quantity), atol=3e-5, rtol=0)
    for way in ("product_of_expectations", "expectation_of_products"):
        torch.testing.assert_close(getattr(judged, way).log_prob, getattr(generated, way).log_prob, atol=1e-4, rtol=0)


def test_an_argument_that_a_judged_text_would_lose_is_refused():
    with pytest.raises(ValueError, match="got \\['token_type_ids'\\] as well"):
        given = {**prompts(), "token_type_ids": torch.zeros(2, 5, dtype=torch.long)}
        db.language.score(lively("gpt2"), given, torch.ones(2, 2, dtype=torch.long), n_draws=2)


def test_padding_after_an_answer_is_not_judged():
    answer = torch.tensor([[5, 6, 7], [8, 0, 0]])
    judged = db.language.score(lively("gpt2"), prompts(), answer, n_draws=2)
    alone = db.language.score(lively("gpt2"), {k: v[1:] for k, v in prompts().items()}, answer[1:, :1], n_draws=2)
    assert judged.mask.tolist() == [[True] * 3, [True, False, False]]
    torch.testing.assert_close(judged.token_entropy[1:, :1], alone.token_entropy, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        ("a text", TypeError, "`answer` must be token ids"),
        (torch.ones(3, 2, dtype=torch.long), ValueError, "`answer` must have a row for each of the 2 prompts; got 3"),
    ],
)
def test_a_bad_answer_is_named(answer, error, message):
    with pytest.raises(error, match=message):
        db.language.score(lively("gpt2"), prompts(), answer, n_draws=2)
