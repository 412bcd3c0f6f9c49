"""Tests of where transformers are given dropout: the layers that are named, and draws that a cache does not change."""

import pytest
import torch
import transformers
from torch import nn

import dropbayes as db
from dropbayes.language import adapters, attention_outputs, feed_forward_inputs, heads, last_blocks
from tests.cases import slow_except
from tests.language.tiny_models import SETTINGS, tiny_model, tiny_text

WITHOUT_ATTENTION = {"Mamba", "Mamba2"}
ARCHITECTURES = slow_except(SETTINGS, "Llama", "Mixtral", "Mamba")


def calls(model, x):
    """The modules in the order in which a forward pass calls them."""
    names = []
    hooks = [m.register_forward_pre_hook(lambda m, args, name=name: names.append(name)) for name, m in model.named_modules()]  # fmt: skip
    model(x)
    for hook in hooks:
        hook.remove()
    return names


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_layer_that_is_chosen_is_called(name):
    model = tiny_model(name)
    called = calls(model, tiny_text())
    choices = [last_blocks, lambda net, n=1: heads(net)]
    choices += [] if name in WITHOUT_ATTENTION else [lambda net, n: attention_outputs(net), lambda net, n: feed_forward_inputs(net)]  # fmt: skip
    for choose in choices:
        assert choose(model, 1) <= set(called)


@pytest.mark.parametrize("name", sorted(set(SETTINGS) - WITHOUT_ATTENTION))
def test_the_output_projection_is_the_last_linear_layer_that_an_attention_calls(name):
    model = tiny_model(name)
    called = [
        n for n in calls(model, tiny_text()) if isinstance(model.get_submodule(n), nn.Linear) or n.endswith("c_proj")
    ]
    for output in attention_outputs(model):
        attention = output.rpartition(".")[0]
        assert output == [n for n in called if n.startswith(f"{attention}.")][-1]


def test_sets_of_layers_combine():
    model = tiny_model("Llama")
    chosen = last_blocks(model, 1) & feed_forward_inputs(model)
    assert chosen == {"model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj"}
    assert heads(model) == {"lm_head"} and not heads(model) & last_blocks(model, 2)
    dropped = db.add_dropout(model, 0.1, where=chosen | heads(model), copy=False)
    assert {site.path for site in db.sites(dropped, tiny_text())} == chosen | {"lm_head"}


def test_a_view_has_no_weights_of_its_own_and_the_model_no_dropout():
    model = tiny_model("Qwen2")
    dropped = db.add_dropout(model, 0.1, where=last_blocks(model, 1), copy=False)
    assert all(a is b for a, b in zip(model.parameters(), dropped.parameters(), strict=True))
    assert all(a is b for a, b in zip(model.buffers(), dropped.buffers(), strict=True))
    with pytest.raises(ValueError, match="must have dropout"):
        db.draws(model, tiny_text(), n_draws=2)


def test_blocks_of_an_encoder_and_a_decoder_are_the_decoders():
    config = transformers.T5Config(
        vocab_size=40, d_model=32, d_kv=8, d_ff=48, num_layers=3, num_decoder_layers=2, num_heads=4
    )
    model = transformers.T5ForConditionalGeneration(config)
    assert all(name.startswith("decoder.block.1.") for name in last_blocks(model, 1))
    assert len(attention_outputs(model)) == 3 + 2 * 2
    assert all(name.endswith((".wi", ".wi_0", ".wi_1")) for name in feed_forward_inputs(model))


def test_a_feed_forward_part_no_wider_than_its_block_is_left_by_its_last_layer():
    model = tiny_model("Llama", intermediate_size=32)
    assert {name.rpartition(".")[2] for name in feed_forward_inputs(model)} == {"gate_proj", "up_proj"}


@pytest.mark.parametrize("name", slow_except(SETTINGS, "Llama", "Mamba"))
def test_every_architecture_can_be_drawn_from_with_one_mask_for_all_positions(name):
    model, x = tiny_model(name), tiny_text()
    dropped = db.add_dropout(model, 0.2, where=last_blocks(model, 1), copy=False)
    drawn = db.draws(dropped, {"input_ids": x, "use_cache": False}, n_draws=4).logits
    assert drawn.std(0).mean() > 1e-4
    torch.testing.assert_close(dropped(x).logits, model(x).logits, rtol=0, atol=0)


@pytest.mark.parametrize("name", ARCHITECTURES)
@torch.no_grad()
def test_a_step_that_reads_a_cache_is_that_of_the_whole_text(name):
    model, x = tiny_model(name), tiny_text()
    dropped = db.add_dropout(model, 0.2, where=last_blocks(model, 1) | heads(model), copy=False)
    draw = db.function_draw(dropped, 1, n_draws=4, sampling=db.Sampling(positions="tied"))
    whole = draw({"input_ids": x, "use_cache": False}).logits
    start = draw({"input_ids": x[:, :-1], "use_cache": True})
    cache = "cache_params" if "cache_params" in start else "past_key_values"
    step = draw({"input_ids": x[:, -1:], cache: start[cache], "use_cache": True})
    atol = 1e-5 * max(1.0, float(whole.abs().max()))
    torch.testing.assert_close(torch.cat([start.logits, step.logits], 1), whole, rtol=0, atol=atol)
    assert (whole - model(x).logits).abs().max() > 0.01


def test_bad_input_is_refused():
    model = tiny_model("Llama")
    with pytest.raises(ValueError, match="`n_blocks` must be a whole number, between 1 and 2"):
        last_blocks(model, 3)
    with pytest.raises(ValueError, match="must have a module of attention"):
        attention_outputs(tiny_model("Mamba"))
    with pytest.raises(ValueError, match="must have a list of blocks"):
        last_blocks(nn.Linear(2, 2), 1)
    with pytest.raises(ValueError, match="merge_and_unload"):
        adapters(model)
    with pytest.raises(ValueError, match="`where` must choose a weight layer"):
        db.add_dropout(model, 0.1, where=["model.norm"])
