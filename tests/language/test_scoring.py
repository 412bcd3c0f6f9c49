"""Texts that exist are judged as those that were generated."""

import copy

import pytest
import torch
import transformers

import dropbayes as db
from tests.language.test_generation import OPTIONS, lively, prompts
from tests.sampling.sequence_models import VOCABULARY


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
        ("a text", TypeError, "`answer` of text needs the model's tokenizer"),
        (torch.ones(2, 3), TypeError, r"`answer` must be token ids .row, token.; got \(2, 3\) of torch.float32"),
        (torch.ones(3, 2, dtype=torch.long), ValueError, "`answer` must have a row for each of the 2 prompts; got 3"),
    ],
)
def test_a_bad_answer_is_named(answer, error, message):
    with pytest.raises(error, match=message):
        db.language.score(lively("gpt2"), prompts(), answer, n_draws=2)


# Texts ----------------------------------------------------------------------------------------------------------------


def tokenizer():
    """Word `w7` is token 7; `w0` is padding."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", unk_token="w0")


def test_texts_are_what_their_tokens_are():
    model, texts = lively("gpt2"), ["w5 w6 w7", "w8"]
    ids = torch.tensor([[5, 6, 7], [0, 0, 8]])
    given = {"input_ids": ids, "attention_mask": (ids > 0).long()}
    by_text, by_token = (
        db.language.generate(model, x, n_draws=3, tokenizer=reader, **OPTIONS)
        for x, reader in ((texts, tokenizer()), (given, None))
    )
    assert torch.equal(by_text.tokens, by_token.tokens) and by_token.texts is None
    assert by_text.texts[0] == " ".join(f"w{t}" for t in by_text.tokens[0].tolist() if t)
    judged = db.language.score(model, texts, ["w9 w10", "w11"], n_draws=3, tokenizer=tokenizer())
    answer = torch.tensor([[9, 10], [11, 0]])
    expected = db.language.score(model, given, answer, answer_mask=answer > 0, n_draws=3)
    torch.testing.assert_close(judged.token_log_prob, expected.token_log_prob, equal_nan=True)
    assert judged.texts == ["w9 w10", "w11"]


@pytest.mark.parametrize("name", ["gpt2", "bart"])
def test_a_text_beside_a_longer_one_is_the_text_alone(name):
    model, options = lively(name), {"n_draws": 3, "tokenizer": tokenizer()}
    together = db.language.score(model, ["w5 w6 w7 w9 w12", "w8 w4"], ["w10 w11", "w13 w7"], **options)
    alone = db.language.score(model, ["w8 w4"], ["w13 w7"], **options)
    torch.testing.assert_close(together.draw_log_probs[:, 1:], alone.draw_log_probs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("mask", [[1, 0, 1], [0, 1, 1], [1, 1]])
def test_an_answer_with_gaps_is_refused(mask):
    with pytest.raises(ValueError, match="`answer_mask` must be 1, then 0 after each end"):
        db.language.score(
            lively("gpt2"), torch.ones(1, 3).long(), torch.ones(1, 3).long(), answer_mask=torch.tensor([mask])
        )


def test_texts_without_a_tokenizer_or_that_are_none_are_refused():
    with pytest.raises(TypeError, match="`inputs` of text needs the model's tokenizer"):
        db.language.generate(lively("gpt2"), "w5 w6", n_draws=2, **OPTIONS)
    with pytest.raises(TypeError, match="`inputs` must be texts or token ids"):
        db.language.generate(lively("gpt2"), [1, 2], n_draws=2, tokenizer=tokenizer(), **OPTIONS)


def test_results_are_tables():
    pytest.importorskip("pandas")
    model, reader = lively("gpt2"), tokenizer()
    result = db.language.generate(model, ["w5 w6 w7", "w8"], n_draws=3, tokenizer=reader, **OPTIONS)
    table = result.to_pandas()
    assert table["log_prob"].tolist() == pytest.approx(result.product_of_expectations.log_prob.tolist())
    assert table["text"].tolist() == result.texts and "knowledge" in str(result)
    texts = db.language.generate(model, "w5 w6", n_draws=3, per_draw=True, tokenizer=reader, **OPTIONS)
    assert texts.to_pandas()["draw"].tolist() == [0, 1, 2] and "3 draws of 1 texts" in texts._repr_html_()


def test_a_prompt_padded_on_the_right_is_refused_since_its_padding_would_predict_the_answer():
    given = prompts()
    given["attention_mask"] = given["attention_mask"].flip(1)
    with pytest.raises(ValueError, match="`prompt` must be padded on the left"):
        db.language.score(lively("gpt2"), given, torch.ones(2, 2, dtype=torch.long), n_draws=2)


def test_an_answer_mask_may_be_a_list():
    model, given, answer = lively("gpt2"), prompts(), torch.full((2, 3), 5)
    mask = [[1, 1, 0], [1, 1, 1]]
    found = db.language.score(model, given, answer, n_draws=2, answer_mask=mask)
    assert found.mask.tolist() == torch.tensor(mask).bool().tolist()
    with pytest.raises(TypeError, match="`answer_mask` must be a tensor or an array of numbers"):
        db.language.score(model, given, answer, n_draws=2, answer_mask="mask")


@pytest.mark.parametrize("options", [{}, {"do_sample": True}, {"num_beams": 2}, {"per_draw": True}])
def test_logits_that_are_no_numbers_are_refused_and_not_read_as_certainty(options):
    model = copy.deepcopy(lively("gpt2"))
    torch.nn.init.constant_(model.transformer.ln_f.weight, float("nan"))
    with pytest.raises(ValueError, match="`model` gave NaN or infinite logits"):
        db.language.generate(model, prompts(), n_draws=2, max_new_tokens=2, **options)
    with pytest.raises(ValueError, match="`model` gave NaN or infinite logits"):
        db.language.score(model, prompts(), torch.full((2, 3), 5), n_draws=2)


def test_an_attention_mask_may_be_a_list():
    given, answer = prompts(), torch.full((2, 3), 5)
    given["input_ids"] = given["input_ids"].masked_fill(given["attention_mask"] == 0, 7)
    listed = {**given, "attention_mask": given["attention_mask"].tolist()}
    expected, found = (db.language.score(lively("gpt2"), x, answer, n_draws=2) for x in (given, listed))
    assert torch.equal(found.draw_log_probs, expected.draw_log_probs)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ("", r"`inputs` must be token ids, whole numbers .row, token. with at least one of each; got \(1, 0\)"),
        (["w5 w6", ""], "`inputs` must have a token in every row"),
        ({"input_ids": torch.ones(2, 4).long(), "attention_mask": torch.ones(2, 3)}, "a mask of their shape; got"),
    ],
)
@pytest.mark.parametrize("name", ["gpt2", "bart"])
def test_a_prompt_without_a_token_or_with_the_mask_of_another_is_refused(name, texts, message):
    with pytest.raises(ValueError, match=message):
        db.language.generate(lively(name), texts, n_draws=2, tokenizer=tokenizer(), max_new_tokens=2)


def test_a_token_beyond_the_vocabulary_is_named_with_its_size():
    model, beyond = lively("gpt2"), torch.full((2, 3), VOCABULARY)
    for judge in (lambda: db.language.score(model, prompts(), beyond), lambda: db.language.generate(model, beyond)):
        with pytest.raises(IndexError, match=rf"`net` must look up entries 0 to {VOCABULARY - 1} of an embedding; got"):
            judge()


# Models that read more than the text ----------------------------------------------------------------------------------


def test_padding_that_a_model_reads_as_text_is_refused():
    config = copy.deepcopy(lively("bart").config)
    config.decoder_layers = 1
    model = transformers.BartForCausalLM(config).eval()  # its positions count padding
    with pytest.raises(ValueError, match=r"`inputs` must not be padded, as row 1 is.*texts of one length at a time"):
        db.language.generate(model, prompts(), n_draws=2, **OPTIONS)
    alone = {name: value[:1] for name, value in prompts().items()}
    assert db.language.generate(model, alone, n_draws=2, **OPTIONS).tokens.shape == (1, 3)


def test_a_model_that_reads_the_tokens_after_is_refused():
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(vocab_size=VOCABULARY, initializer_range=0.5, **sizes)
    torch.manual_seed(0)
    model = transformers.BertLMHeadModel(config).eval()
    with pytest.raises(ValueError, match=r"`model` must predict a token from those before it.*is_decoder=True"):
        db.language.score(model, prompts(), torch.full((2, 2), 5), n_draws=2)


@pytest.mark.slow
@torch.no_grad()
def test_a_model_counts_positions_in_its_own_way():
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.RobertaConfig(vocab_size=VOCABULARY, initializer_range=0.5, is_decoder=True, **sizes)
    torch.manual_seed(0)
    model, ids = transformers.RobertaForCausalLM(config).eval(), torch.tensor([[5, 6, 7], [8, 9, 10]])
    generated = db.language.generate(model, ids, n_draws=2, **OPTIONS)
    judged = db.language.score(model, ids, generated.tokens, answer_mask=generated.mask, n_draws=2)
    tied, whole = db.Sampling(positions="tied"), torch.cat([ids, generated.tokens], 1)
    functions = [db.function_draw(model, draw, n_draws=2, sampling=tied) for draw in range(2)]
    logits = torch.stack([function({"input_ids": whole, "use_cache": False}).logits for function in functions])
    tokens = generated.tokens.expand(2, -1, -1)[..., None]
    expected = logits[:, :, 2:-1].log_softmax(-1).gather(-1, tokens)[..., 0]  # positions begin at 2
    torch.testing.assert_close(judged.draw_log_probs, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(generated.draw_log_probs, expected, atol=1e-5, rtol=0)
