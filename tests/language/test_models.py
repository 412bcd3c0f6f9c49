"""Models that cannot be drawn from are refused, one reason each."""

import pytest
import torch
import transformers
from torch import nn

from dropbayes.language.folding import generating_module
from dropbayes.language.scoring import checked_language_model, checked_options
from tests.sampling.sequence_models import sequence_model


def test_a_language_model_is_taken_as_it_is():
    model = sequence_model("gpt2")
    assert checked_language_model(model) is model


def test_what_is_no_model_of_transformers_is_refused():
    with pytest.raises(TypeError, match="must be a language model of transformers; got Linear"):
        checked_language_model(nn.Linear(2, 2))


def test_an_encoder_is_refused():
    config = transformers.BertConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    with pytest.raises(ValueError, match="must generate text; BertModel has no language-model head"):
        checked_language_model(transformers.BertModel(config))


def test_a_model_without_a_head_is_refused():
    with pytest.raises(ValueError, match="must generate text; GPT2Model has no language-model head"):
        checked_language_model(sequence_model("gpt2").transformer)


def test_a_compiled_model_is_refused():
    with pytest.raises(ValueError, match="must not be compiled"):
        checked_language_model(torch.compile(sequence_model("gpt2")))


def test_a_quantised_model_is_refused(monkeypatch):
    model = sequence_model("llama")
    monkeypatch.setattr(model, "is_quantized", True, raising=False)
    with pytest.raises(ValueError, match="must not be quantised"):
        checked_language_model(model)


def test_a_model_inside_another_module_is_found():
    class Wrapper(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

    assert generating_module(Wrapper(sequence_model("gpt2"))) is sequence_model("gpt2")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache_implementation": "quantized"}, "a cache that draws cannot share"),
        ({"prompt_lookup_num_tokens": 3}, "the options select assisted_generation"),
        ({"return_dict_in_generate": True}, "`return_dict_in_generate` cannot be passed here"),
    ],
)
def test_options_that_draws_cannot_follow_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        checked_options(sequence_model("gpt2"), options)


def test_options_do_not_change_the_model():
    model = sequence_model("gpt2")
    assert checked_options(model, {"num_beams": 4}).num_beams == 4
    assert model.generation_config.num_beams != 4


def test_a_model_of_speech_is_refused_with_what_to_do_instead():
    sizes = {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
    heads = {"encoder_attention_heads": 1, "decoder_attention_heads": 1, "vocab_size": 9, "pad_token_id": 0}
    model = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**sizes, **heads))
    with pytest.raises(ValueError, match=r"`model` must read token ids; this one reads `input_features`.*each_draw"):
        checked_language_model(model)
