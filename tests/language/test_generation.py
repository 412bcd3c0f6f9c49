"""Text under many draws: the loop over function draws without a cache is the oracle of every way of decoding."""

import copy
import functools

import pytest
import torch
import transformers

import dropbayes as db
from tests.sampling.sequence_models import ENCODER_DECODERS, VOCABULARY, sequence_model

FAST = (("gpt2", "tied"), ("gpt2", "per_position"), ("bart", "tied"))
NAMES = ("gpt2", "bart", "llama", "mistral", "t5", "jamba", "qwen3_next", "m2m_100", "mixtral", "gemma3")
NEW = 3


@functools.cache
def lively(name):
    """The model with weights large enough that texts vary."""
    model = copy.deepcopy(sequence_model(name))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.dim() > 1 and name != "t5" else 1)
    return model


def prompts(n_rows=2):
    """Prompts of five and three tokens, padded on the left."""
    ids = torch.randint(3, VOCABULARY, (n_rows, 5), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[1:, :2] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


def distributions(name, given, new, *, n_draws, seed=0, positions="tied", draws=None):
    """The log-probabilities of the token after `new`, by each draw or some in turn, read at once without a cache."""
    model = lively(name)
    if name in ENCODER_DECODERS:
        start = torch.full((len(new), 1), 1)
        x = {**given, "decoder_input_ids": torch.cat([start, new], 1), "use_cache": False}
    else:
        mask = torch.cat([given["attention_mask"], torch.ones_like(new)], 1)
        x = {"input_ids": torch.cat([given["input_ids"], new], 1), "attention_mask": mask, "use_cache": False}
        x["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
        x = {key: value for key, value in x.items() if key != "position_ids" or "mamba" not in name}
    functions = [
        db.function_draw(model, i, n_draws=n_draws, seed=seed, sampling=db.Sampling(positions=positions))
        for i in draws or range(n_draws)
    ]
    with torch.no_grad():
        return torch.stack([function(x).logits[:, -1].log_softmax(-1) for function in functions])


def greedy_loop(name, given, **draws):
    """Greedy decoding under the mean of the draws, written out, and what each draw said at every step."""
    new, seen = torch.empty(len(given["input_ids"]), 0, dtype=torch.long), []
    for _ in range(NEW):
        seen.append(distributions(name, given, new, **draws))
        new = torch.cat([new, seen[-1].exp().mean(0).argmax(-1)[:, None]], 1)
    return new, torch.stack(seen, 2)  # [draw, row, token, vocabulary]


OPTIONS = {"max_new_tokens": NEW, "eos_token_id": None}


@pytest.mark.parametrize(
    ("name", "positions"),
    [
        pytest.param(name, positions, marks=() if (name, positions) in FAST else pytest.mark.slow)
        for name in NAMES
        for positions in ("tied", "per_position")
    ],
)
def test_greedy_text_is_that_of_the_loop_over_function_draws(name, positions):
    result = db.language.generate(
        lively(name), prompts(), n_draws=3, seed=5, sampling=db.Sampling(positions=positions), **OPTIONS
    )
    new, seen = greedy_loop(name, prompts(), n_draws=3, seed=5, positions=positions)
    assert torch.equal(result.tokens, new)
    probabilities = seen.exp()
    mean = probabilities.mean(0)
    entropy = -(mean * mean.log()).sum(-1)
    expected = -(probabilities * seen).sum(-1).mean(0)
    torch.testing.assert_close(result.token_entropy, entropy, atol=2e-5, rtol=0)
    torch.testing.assert_close(result.token_mutual_information, entropy - expected, atol=2e-5, rtol=0)
    torch.testing.assert_close(result.token_probability, mean.gather(-1, new[..., None])[..., 0], atol=1e-5, rtol=0)
    assert result.token_mutual_information.max() > 1e-4


def test_draws_in_chunks_and_all_at_once_give_the_same_text_and_numbers():
    whole = db.language.generate(lively("gpt2"), prompts(), n_draws=5, **OPTIONS)
    chunks = db.language.generate(lively("gpt2"), prompts(), n_draws=5, draws_at_once=2, **OPTIONS)
    assert torch.equal(whole.sequences, chunks.sequences)
    torch.testing.assert_close(whole.token_entropy, chunks.token_entropy, atol=1e-5, rtol=0)
    assert whole.cache_bytes == chunks.cache_bytes


@pytest.mark.parametrize("name", ["gpt2", pytest.param("bart", marks=pytest.mark.slow)])
def test_a_beam_search_from_the_cache_is_that_without_one(name):
    cached, plain = (
        db.language.generate(lively(name), prompts(), n_draws=4, num_beams=3, draws_at_once=3, use_cache=use, **OPTIONS)
        for use in (True, False)
    )
    assert torch.equal(cached.sequences, plain.sequences)
    greedy = db.language.generate(lively(name), prompts(), n_draws=4, **OPTIONS)
    assert (cached.product_of_expectations.log_prob >= greedy.product_of_expectations.log_prob - 1e-4).all()


def test_each_draw_writes_the_text_of_its_function():
    result = db.language.generate(lively("gpt2"), prompts(), n_draws=3, per_draw=True, draws_at_once=2, **OPTIONS)
    given = prompts()
    for draw in range(3):
        new, said = torch.empty(2, 0, dtype=torch.long), []
        for _ in range(NEW):
            said.append(distributions("gpt2", given, new, n_draws=3, draws=[draw])[0])
            new = torch.cat([new, said[-1].argmax(-1)[:, None]], 1)
        assert torch.equal(result.tokens[draw], new)
        log_probs = torch.stack(said, 1).gather(-1, new[..., None])[..., 0]
        torch.testing.assert_close(result.log_prob[draw], log_probs.sum(-1), atol=1e-4, rtol=0)
    assert not torch.equal(result.tokens[0], result.tokens[1])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "bart"])
def test_each_draw_searches_with_beams_of_its_own(name):
    cached, plain = (
        db.language.generate(lively(name), prompts(), n_draws=3, per_draw=True, num_beams=2, use_cache=use, **OPTIONS)
        for use in (True, False)
    )
    assert torch.equal(cached.sequences, plain.sequences)
    torch.testing.assert_close(cached.token_log_prob, plain.token_log_prob, atol=1e-4, rtol=0)


@pytest.mark.slow
def test_several_texts_are_sampled_for_each_prompt():
    options = {"n_draws": 2, "do_sample": True, "num_return_sequences": 3, **OPTIONS}
    result = db.language.generate(lively("gpt2"), prompts(), **options)
    given = {name: value.repeat_interleave(3, 0) for name, value in prompts().items()}
    judged = db.language.score(lively("gpt2"), given, result.tokens, n_draws=2, answer_mask=result.mask)
    torch.testing.assert_close(judged.token_entropy, result.token_entropy, atol=3e-5, rtol=0)


def test_sampling_is_fixed_by_the_seed_and_leaves_torchs_generator_alone():
    model = lively("gpt2")
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    one, same, other = (
        db.language.generate(model, prompts(), n_draws=2, seed=seed, do_sample=True, **OPTIONS) for seed in (1, 1, 2)
    )
    assert torch.equal(one.sequences, same.sequences) and not torch.equal(one.sequences, other.sequences)
    assert torch.equal(before, torch.random.get_rng_state())


def test_tokens_come_one_at_a_time_with_their_uncertainty():
    steps = []
    result = db.language.generate(lively("gpt2"), prompts(), n_draws=2, on_token=steps.append, **OPTIONS)
    assert torch.equal(torch.stack([step.tokens for step in steps], 1), result.tokens)
    torch.testing.assert_close(torch.stack([s.mutual_information for s in steps], 1), result.token_mutual_information)


def test_what_follows_the_end_of_a_text_is_not_judged():
    free = db.language.generate(lively("gpt2"), prompts(), n_draws=2, **OPTIONS)
    end = int(free.tokens[0, 1])
    result = db.language.generate(
        lively("gpt2"), prompts(), n_draws=2, max_new_tokens=NEW, eos_token_id=end, pad_token_id=0
    )
    first = int((free.tokens[0] == end).nonzero()[0])
    assert result.mask[0].tolist() == [place <= first for place in range(result.mask.shape[1])]
    assert result.token_entropy[0, first + 1 :].isnan().all()
    expected = free.token_log_prob[0, : first + 1].sum()
    torch.testing.assert_close(result.product_of_expectations.log_prob[0], expected)


def with_dropout_in_the_last_block():
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
    ends = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **ends, embd_pdrop=0.0)).eval()
    for block in model.transformer.h[:-1]:
        block.attn.attn_dropout.p = block.attn.resid_dropout.p = block.mlp.dropout.p = 0.0
    return model


@pytest.mark.slow
def test_blocks_before_the_first_site_run_and_are_cached_once_for_all_draws():
    model, rows = with_dropout_in_the_last_block(), {"first": [], "last": []}
    plain = db.language.generate(model, prompts(), n_draws=6, max_new_tokens=4)
    for name, block in {"first": model.transformer.h[0].ln_1, "last": model.transformer.h[2].ln_1}.items():
        block.register_forward_hook(lambda module, args, out, seen=rows[name]: seen.append(len(args[0])))
    counted = db.language.generate(model, prompts(), n_draws=6, max_new_tokens=4)
    assert torch.equal(counted.sequences, plain.sequences)
    assert rows["first"][-3:] == [2] * 3 and rows["last"][-3:] == [12] * 3
    one_draw = 2 * 2 * 8 * 32 * 4  # keys and values of two rows, eight positions, 32 features, four bytes
    assert counted.cache_bytes == (1 + 1 + 6) * one_draw


@pytest.mark.slow
def test_a_shared_prefix_changes_nothing_for_texts_of_single_draws():
    model = with_dropout_in_the_last_block()
    shared, alone = (
        db.language.generate(model, prompts(), n_draws=3, per_draw=True, draws_at_once=at_once, max_new_tokens=4)
        for at_once in (3, 1)
    )
    assert torch.equal(shared.sequences, alone.sequences)
    torch.testing.assert_close(shared.token_log_prob, alone.token_log_prob, atol=1e-5, rtol=0)


def test_adapters_are_drawn_from():
    peft = pytest.importorskip("peft")
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    ends = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **ends, intermediate_size=48)).eval()
    lora = peft.LoraConfig(lora_dropout=0.3, r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(base, lora).eval()
    result = db.language.generate(model, prompts(), n_draws=3, max_new_tokens=3)
    assert result.token_mutual_information.min() > 0
    mask = torch.cat([prompts()["attention_mask"], torch.ones(2, 2, dtype=torch.long)], 1)
    x = {"input_ids": result.sequences[:, :-1], "attention_mask": mask, "use_cache": False}
    x["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    draw = db.function_draw(model, 2, n_draws=3, sampling=db.Sampling(positions="tied"))
    said = draw(x).logits[:, -1].log_softmax(-1).gather(-1, result.tokens[:, -1:])[:, 0]
    torch.testing.assert_close(result.draw_log_probs[2, :, -1], said.detach(), atol=1e-5, rtol=0)


@pytest.mark.slow
def test_half_precision_is_judged_by_its_own_rounding():
    model = copy.deepcopy(sequence_model("llama")).to(torch.bfloat16)
    result = db.language.generate(model, prompts(), n_draws=2, **OPTIONS)
    assert result.token_entropy.isfinite().all() and result.draw_log_probs.dtype == torch.float32


def test_the_model_is_left_as_it_was():
    model = lively("gpt2")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    flags = [module.training for module in model.modules()]
    forward = model.forward
    db.language.generate(model, prompts(), n_draws=2, **OPTIONS)
    assert flags == [module.training for module in model.modules()] and model.forward == forward
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_draws": 0}, "`n_draws` must be a whole number, at least 1"),
        ({"draws_at_once": 0}, "`draws_at_once` must be a whole number, at least 1"),
        ({"past_key_values": object()}, "`past_key_values` cannot be passed here"),
        ({"cache_implementation": "static"}, "`cache_implementation` must be the default"),
        ({"on_token": print, "num_beams": 2}, "`on_token` needs tokens one at a time"),
    ],
)
def test_an_argument_that_cannot_be_followed_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        db.language.generate(lively("gpt2"), prompts(), **{"n_draws": 2, "max_new_tokens": 2, **arguments})


def test_a_model_without_dropout_is_refused():
    import transformers

    config = transformers.LlamaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    with pytest.raises(ValueError, match="must have dropout to be a distribution over functions"):
        db.language.generate(transformers.LlamaForCausalLM(config), prompts(1), max_new_tokens=2, pad_token_id=0)


def test_texts_padded_on_the_right_are_refused():
    given = prompts()
    given["attention_mask"] = given["attention_mask"].flip(1)
    with pytest.raises(ValueError, match="must be padded on the left"):
        db.language.generate(lively("gpt2"), given, n_draws=2, max_new_tokens=2)


def test_several_texts_without_a_padding_token_are_padded_with_the_end_token():
    model = copy.deepcopy(lively("gpt2"))
    model.generation_config.pad_token_id, ids = None, prompts()["input_ids"].clamp(min=3)
    end = int(db.language.generate(model, ids, n_draws=2, max_new_tokens=1, eos_token_id=None).tokens[0, 0])
    model.generation_config.eos_token_id = end
    written = db.language.generate(model, ids, n_draws=2, max_new_tokens=3)
    assert written.tokens[0].tolist() == [end] * 3 and written.mask[0].tolist() == [True, False, False]
    assert torch.equal(db.language.score(model, ids, written.tokens, n_draws=2).mask, written.mask)


def test_text_needs_a_tokenizer():
    with pytest.raises(TypeError, match="`inputs` of text needs the model's tokenizer"):
        db.language.generate(lively("gpt2"), "Once upon a time")


@pytest.mark.parametrize(
    ("function", "more"), [(db.language.generate, ()), (db.language.score, (torch.tensor([[3]]),))]
)
def test_sampling_is_a_record(function, more):
    with pytest.raises(TypeError, match=r"`sampling` must be a dropbayes.Sampling; got None"):
        function(lively("gpt2"), prompts(1), *more, sampling=None)


@pytest.mark.slow
def test_positions_with_axes_for_images_are_those_of_the_text():
    sizes = {"hidden_size": 16, "intermediate_size": 16}
    text = {"vocab_size": VOCABULARY, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    text |= {"head_dim": 8, "attention_dropout": 0.2, "pad_token_id": 0}
    text["rope_parameters"] = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}
    vision = {"depth": 1, "num_heads": 2, "out_hidden_size": 16, "deepstack_visual_indexes": [0]}
    config = transformers.Qwen3VLConfig(text_config=sizes | text, vision_config=sizes | vision)
    torch.manual_seed(0)
    model = transformers.Qwen3VLForConditionalGeneration(config).eval()
    ids = torch.tensor([[5, 6, 7, 8], [0, 0, 9, 10]])
    given = {"input_ids": ids, "attention_mask": (ids > 0).long()}
    together = db.language.generate(model, given, n_draws=2, **OPTIONS)
    alone = db.language.score(model, ids[1:, 2:], together.tokens[1:], answer_mask=together.mask[1:], n_draws=2)
    torch.testing.assert_close(together.draw_log_probs[:, 1:], alone.draw_log_probs, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_the_encoder_of_experts_runs_once():
    layers = {
        f"{part}_{name}": size
        for part in ("encoder", "decoder")
        for name, size in (
            ("layers", 1),
            ("attention_heads", 2),
            ("ffn_dim", 16),
            ("layerdrop", 0.0),
            ("sparse_step", 0),
        )
    }
    sizes = {"vocab_size": VOCABULARY, "d_model": 16, "num_experts": 2, "pad_token_id": 0, "decoder_start_token_id": 1}
    torch.manual_seed(0)
    model = transformers.NllbMoeForConditionalGeneration(transformers.NllbMoeConfig(**sizes, **layers)).eval()
    generated = db.language.generate(model, torch.tensor([[5, 6, 7]]), n_draws=2, **OPTIONS)
    options = {"answer_mask": generated.mask, "n_draws": 2}
    judged = db.language.score(model, torch.tensor([[5, 6, 7]]), generated.tokens, **options)
    torch.testing.assert_close(generated.draw_log_probs, judged.draw_log_probs, atol=1e-5, rtol=0)
