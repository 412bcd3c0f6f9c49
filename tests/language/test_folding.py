"""Draws folded into a batch are the function draws, side by side."""

import pytest
import torch
import transformers

import dropbayes as db
from dropbayes.language.folding import FoldedDraws, cache_bytes, first_rows, held_tensors, reorder, spread, text_shape
from dropbayes.sampling.masks import Keys
from tests.sampling.sequence_models import VOCABULARY, sequence_model


def folded(name, draws, n_draws=6):
    return FoldedDraws(sequence_model(name), Keys(2, n_draws), draws, db.Sampling(positions="tied"))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@torch.no_grad()
def test_rows_of_every_draw_lie_side_by_side(name):
    x = {"input_ids": torch.randint(3, VOCABULARY, (2, 5)), "use_cache": False}
    logits = folded(name, range(1, 4))(x, 2).logits.unflatten(0, (3, 2))
    for place, draw in enumerate(range(1, 4)):
        function = db.function_draw(
            sequence_model(name), draw, n_draws=6, seed=2, sampling=db.Sampling(positions="tied")
        )
        torch.testing.assert_close(logits[place], function(x).logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["Mpt", "Bloom"])
@torch.no_grad()
def test_a_bias_of_heads_is_not_taken_for_rows(name):
    sizes = {"vocab_size": VOCABULARY, "n_layers": 2, "n_heads": 4, "n_layer": 2, "n_head": 4, "d_model": 32}
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**sizes, hidden_size=32)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    model = db.add_dropout(model, 0.2, where=db.language.last_blocks(model, 1))
    draws, x = range(4), {"input_ids": torch.tensor([[5, 6, 7]]), "use_cache": False}
    tied = db.Sampling(positions="tied")
    logits = FoldedDraws(model, Keys(2, 4), draws, tied)(x, 1).logits  # as many rows in all as heads
    functions = [db.function_draw(model, draw, n_draws=4, seed=2, sampling=tied) for draw in draws]
    torch.testing.assert_close(logits, torch.cat([function(x).logits for function in functions]), atol=1e-5, rtol=0)


@pytest.mark.slow
def test_a_mask_without_rows_cannot_be_folded():
    x = {"input_ids": torch.randint(3, VOCABULARY, (2, 5)), "decoder_input_ids": torch.ones(2, 2, dtype=torch.long)}
    assert not folded("m2m_100", range(1)).is_foldable(x, 2)
    assert folded("bart", range(1)).is_foldable(x, 2)


def test_the_text_is_the_one_that_grows():
    ids = torch.ones(2, 5)
    assert text_shape({"input_ids": torch.ones(3, 2), "past_key_values": None}) == (3, 2)
    assert text_shape({"input_ids": None, "decoder_input_ids": ids}) == (2, 5)


def filled(n_rows, name="gpt2"):
    ids = torch.arange(3, 3 + n_rows)[:, None].repeat(1, 4)
    with torch.no_grad():
        if name == "bart":
            return sequence_model(name)(input_ids=ids, decoder_input_ids=ids, use_cache=True).past_key_values
        return sequence_model(name)(ids, use_cache=True).past_key_values


@pytest.mark.parametrize("name", ["gpt2", "bart", "jamba"])
def test_every_draw_takes_the_rows_it_is_told(name):
    cache, before = filled(6, name), filled(6, name)
    reorder(cache, torch.tensor([2, 0, 0]), n_draws=2)
    for one, other in zip(held_tensors(cache), held_tensors(before), strict=True):
        assert torch.equal(one, other[[2, 0, 0, 5, 3, 3]])


def test_a_layer_that_draws_share_has_its_rows_once():
    cache, before = filled(3), filled(3)
    reorder(cache, torch.tensor([2, 0, 0]), n_draws=2)
    assert torch.equal(cache.layers[0].keys, before.layers[0].keys[[2, 0, 0]])


def test_shared_rows_are_spread_over_the_draws():
    cache, before = filled(2), filled(2)
    spread(cache, 2, n_draws=3)
    assert torch.equal(cache.layers[1].values, before.layers[1].values.repeat(3, 1, 1, 1))


def test_rows_are_taken_of_every_tensor_in_a_cache():
    cache = filled(2)
    cache.layers[0].compressed = {"keys": torch.arange(6.0).reshape(2, 3)}  # which no method of the layer knows
    cache.beside = [torch.arange(4.0).reshape(2, 2), torch.arange(2)]
    rows = cache.layers[0].compressed["keys"]
    reorder(cache, torch.tensor([1, 0]), n_draws=1)
    spread(cache, 2, n_draws=3)
    assert torch.equal(cache.layers[0].compressed["keys"], rows[[1, 0, 1, 0, 1, 0]])
    assert torch.equal(cache.beside[0], torch.tensor([[2.0, 3.0], [0.0, 1.0]]).repeat(3, 1))
    assert torch.equal(cache.beside[1], torch.arange(2))  # no rows
    assert torch.equal(first_rows(cache, 2).layers[0].compressed["keys"], rows[[1, 0]])


def test_a_state_outside_the_cache_is_refused_with_what_to_do_instead():
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 48}
    config = transformers.RecurrentGemmaConfig(**sizes, num_attention_heads=4, eos_token_id=None, pad_token_id=0)
    torch.manual_seed(0)
    model = transformers.RecurrentGemmaForCausalLM(config).eval()  # recurrent layers alone: their state is their own
    model = db.add_dropout(model, 0.2, where=db.language.last_blocks(model, 1))
    options = {"n_draws": 2, "max_new_tokens": 3}
    with pytest.raises(ValueError, match=r"keeps a state outside its cache.*Pass use_cache=False"):
        db.language.generate(model, torch.tensor([[5, 6, 7]]), **options)
    assert db.language.generate(model, torch.tensor([[5, 6, 7]]), use_cache=False, **options).tokens.shape == (1, 3)


def test_the_first_draws_rows_are_a_copy():
    cache = filled(4)
    first = first_rows(cache, 2)
    first.layers[0].keys.zero_()
    assert first.layers[0].keys.shape[0] == 2 and cache.layers[0].keys.abs().sum() > 0


def test_bytes_are_those_of_keys_and_values():
    assert cache_bytes(filled(3)) == 2 * 2 * 3 * 4 * 32 * 4  # layers, keys and values, rows, positions, features, bytes
