"""Where a text begins and ends: padding, the decoder's first tokens, end tokens, stop strings and criteria."""

import copy

import pytest
import torch
import transformers

import dropbayes as db
from tests.language.test_generation import lively, prompts

DRAWS = {"n_draws": 3, "seed": 5}
IDS = prompts()["input_ids"].clamp(min=3)


def unending(name="gpt2", **options):
    """What the model writes with no token that ends it."""
    return db.language.generate(lively(name), IDS, max_new_tokens=4, eos_token_id=None, **DRAWS, **options)


def ends_with(token):
    """A stopping criterion."""
    return lambda sequences, scores, **_: sequences[:, -1] == token


@pytest.mark.slow
def test_padding_without_a_mask_is_the_padding_that_transformers_sees():
    ids, options = prompts()["input_ids"], {"max_new_tokens": 3, "eos_token_id": None, **DRAWS}
    for per_draw in (False, True):
        masked = db.language.generate(lively("gpt2"), prompts(), per_draw=per_draw, **options)
        plain = db.language.generate(lively("gpt2"), ids, per_draw=per_draw, **options)
        torch.testing.assert_close(plain.token_log_prob, masked.token_log_prob)
    judged = [db.language.score(lively("gpt2"), given, IDS, **DRAWS) for given in (ids, prompts())]
    torch.testing.assert_close(judged[0].token_log_prob, judged[1].token_log_prob)
    with pytest.raises(ValueError, match="must be padded on the left"):
        db.language.generate(lively("gpt2"), ids.flip(1), **options)


@pytest.mark.parametrize("options", [{}, {"per_draw": True}, {"num_beams": 2, "length_penalty": -3.0}])
def test_a_text_ends_where_a_stopping_criterion_is_met(options):
    stop = int(unending(**options).tokens[..., 0].flatten()[0])
    options = {"stopping_criteria": [ends_with(stop)], "max_new_tokens": 4, **DRAWS, **options}
    result = db.language.generate(lively("gpt2"), IDS, eos_token_id=None, **options)
    is_stop = (result.tokens == stop).long()
    assert torch.equal(result.mask, is_stop.cumsum(-1) - is_stop == 0) and not result.mask.all()
    assert torch.equal(result.token_log_prob.isnan(), ~result.mask)


def test_no_warning_speaks_of_stopping_criteria_that_were_not_passed(monkeypatch):
    warned = []
    monkeypatch.setattr(transformers.generation.utils.logger, "warning", lambda text, *_: warned.append(text))
    db.language.generate(lively("gpt2"), IDS, max_new_tokens=4, eos_token_id=1, num_beams=2, **DRAWS)
    assert not [text for text in warned if "stopping criteria" in text]


@pytest.mark.slow
def test_a_text_ends_at_a_stop_string():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = {chr(ord("a") + i): i for i in range(26)}
    spelling = Tokenizer(models.WordLevel(letters, unk_token="a"))
    spelling.pre_tokenizer, spelling.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    reader = transformers.PreTrainedTokenizerFast(tokenizer_object=spelling, unk_token="a", pad_token="a")
    torch.manual_seed(0)
    shape = {"vocab_size": 26, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16, "pad_token_id": 0}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, bos_token_id=None, eos_token_id=None))
    options = {"tokenizer": reader, "max_new_tokens": 4, "do_sample": True, **DRAWS}
    whole = db.language.generate(model, "cde", **options)
    stopped = db.language.generate(model, "cde", stop_strings=whole.texts[0][:2], **options)
    assert len(whole.texts[0]) == 4 and stopped.texts[0] == whole.texts[0][:2]


@pytest.mark.slow
def test_a_configuration_that_is_given_is_completed_by_the_models():
    model, whole = copy.deepcopy(lively("gpt2")), unending().tokens
    model.generation_config.eos_token_id = int(whole[0, 0])
    given = transformers.GenerationConfig(max_new_tokens=4, return_dict_in_generate=True)
    result = db.language.generate(model, IDS, generation_config=given, **DRAWS)
    assert result.mask[0].sum() == 1
    model.generation_config.cache_implementation = "hybrid"  # of checkpoints with sliding windows
    again = db.language.generate(model, IDS, max_new_tokens=4, **DRAWS)
    assert torch.equal(again.mask, result.mask)


@pytest.mark.slow
def test_an_end_token_that_is_also_the_padding_is_judged_once():
    model, whole = copy.deepcopy(lively("gpt2")), unending().tokens
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = int(whole[0, 0])
    written = db.language.generate(model, IDS, max_new_tokens=4, **DRAWS)
    judged = db.language.score(model, IDS, written.tokens, **DRAWS)
    assert torch.equal(judged.mask, written.mask) and not judged.mask.all()
    inside = db.language.score(lively("gpt2"), IDS, torch.tensor([[5, 0, 7, 0], [5, 6, 0, 0]]), **DRAWS)
    assert inside.mask.sum(-1).tolist() == [3, 2]


@pytest.mark.parametrize("options", [{}, {"per_draw": True}, {"num_beams": 2}])
def test_a_decoder_goes_on_from_the_tokens_it_is_given(options):
    begun = torch.tensor([[1, 8, 9], [1, 8, 9]])
    result = unending("bart", decoder_input_ids=begun, **options)
    named = {"input_ids": IDS, "decoder_input_ids": begun[:, 1:]}  # without the start token, which is put before them
    again = db.language.generate(lively("bart"), named, max_new_tokens=4, eos_token_id=None, **DRAWS, **options)
    assert result.tokens.shape[-1] == 4 and torch.equal(result.tokens, again.tokens)
    assert torch.equal(result.sequences[..., :3], begun.expand_as(result.sequences[..., :3]))
    if not options.get("per_draw"):
        judged = db.language.score(lively("bart"), named, result.tokens, **DRAWS)
        behind = db.language.score(lively("bart"), IDS, torch.cat([begun[:, 1:], result.tokens], 1), **DRAWS)
        torch.testing.assert_close(judged.draw_log_probs, result.draw_log_probs, atol=3e-5, rtol=0)
        torch.testing.assert_close(behind.draw_log_probs[..., 2:], result.draw_log_probs, atol=3e-5, rtol=0)


@pytest.mark.slow
def test_every_row_may_have_a_start_token_of_its_own():
    both = unending("bart", decoder_start_token_id=[4, 5], num_beams=2)
    judged = db.language.score(
        lively("bart"), {"input_ids": IDS, "decoder_input_ids": torch.tensor([[1, 4], [1, 5]])}, both.tokens, **DRAWS
    )
    alone = db.language.generate(
        lively("bart"), IDS[1:], decoder_start_token_id=5, max_new_tokens=4, eos_token_id=None, num_beams=2, **DRAWS
    )
    assert both.sequences[:, 0].tolist() == [4, 5] and judged.tokens.shape == both.tokens.shape
    torch.testing.assert_close(both.token_log_prob[1:], alone.token_log_prob, atol=3e-5, rtol=0)


@pytest.mark.slow
def test_a_model_that_keeps_no_cache_reads_the_whole_text_at_every_step():
    shape = {"vocab_size": 40, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32, "pad_token_id": 0}
    torch.manual_seed(0)
    model = transformers.OpenAIGPTLMHeadModel(transformers.OpenAIGPTConfig(**shape))
    written = db.language.generate(model, prompts(), max_new_tokens=3, **DRAWS)
    judged = db.language.score(model, prompts(), written.tokens, answer_mask=written.mask, **DRAWS)
    torch.testing.assert_close(judged.token_log_prob, written.token_log_prob, atol=3e-5, rtol=0)


def test_guidance_and_prompts_as_adapters_are_refused():
    with pytest.raises(ValueError, match="`guidance_scale` must be 1"):
        given = transformers.GenerationConfig(guidance_scale=1.5)
        db.language.generate(lively("gpt2"), IDS, generation_config=given, **DRAWS)
    peft = pytest.importorskip("peft")
    prefix = peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    with pytest.raises(ValueError, match="must not have prompts as adapters"):
        db.language.generate(peft.get_peft_model(copy.deepcopy(lively("gpt2")), prefix), IDS, **DRAWS)
