"""Tests of networks with low-rank adapters: their dropout is a site, and their draws are adapters."""

import functools
import json

import pytest
import torch
from safetensors.torch import load_file

import dropbayes as db
from dropbayes.language import adapters, export_adapters
from tests.cases import slow_except
from tests.language.tiny_models import tiny_model, tiny_text

peft = pytest.importorskip("peft")
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def adapted(name="Llama", lora_dropout=0.3, **settings):
    """A tiny model with random adapters."""
    options = {"target_modules": ["q_proj", "down_proj"], **settings}
    torch.manual_seed(1)
    config = peft.LoraConfig(
        r=4, lora_alpha=16, lora_dropout=lora_dropout, init_lora_weights=False, task_type="CAUSAL_LM", **options
    )
    return peft.get_peft_model(tiny_model(name), config).eval()


def text(rows=2, length=6):
    return {"input_ids": tiny_text(rows, length), "use_cache": False}


@functools.cache
def inspected(use_dora=False):
    """An adapted model that tests share and leave as it is: what is known of its passes is found once."""
    return adapted(use_dora=use_dora)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    model = inspected()
    return model, export_adapters(model, tmp_path_factory.mktemp("draws"), n_draws=4, seed=2)


def loaded(folders, name="Llama"):
    """PEFT's own model over a fresh base with all the adapters, `0`, `1`, ..."""
    model = peft.PeftModel.from_pretrained(tiny_model(name), folders[0], adapter_name="0")
    for index, folder in enumerate(folders[1:], start=1):
        model.load_adapter(folder, adapter_name=str(index))
    return model.eval()


@pytest.mark.parametrize("use_dora", [False, True])
def test_the_dropout_of_an_adapter_is_a_site(use_dora):
    model = inspected(use_dora)
    sites = db.sites(model, text())
    assert [site.path.split(".")[-4:-2] for site in sites] == 2 * [["self_attn", "q_proj"], ["mlp", "down_proj"]]
    assert {site.drop_prob for site in sites} == {0.3}
    drawn = db.draws(model, text(), n_draws=3, seed=1, sampling=db.Sampling(positions="tied")).logits
    draw = db.function_draw(model, 2, n_draws=3, seed=1, sampling=db.Sampling(positions="tied"))
    torch.testing.assert_close(draw(text()).logits, drawn[2])


@pytest.mark.parametrize("use_dora", slow_except([False, True], False))
def test_adapters_trained_without_dropout_can_be_given_one(use_dora):
    model = adapted(lora_dropout=0.0, use_dora=use_dora)
    dropped = db.add_dropout(model, 0.2, where=adapters(model), copy=False)
    sites = db.sites(dropped, text())
    assert len(sites) == 4 and {site.drop_prob for site in sites} == {0.2}
    assert all(".lora_dropout." in site.path for site in sites) and sites[0].shape[1] == 1  # one mask for all positions
    torch.testing.assert_close(dropped(**text()).logits, model(**text()).logits)
    again = db.add_dropout(dropped, 0.4, where=adapters(model), copy=False)
    assert {site.drop_prob for site in db.sites(again, text())} == {0.4}
    assert list(dropped.state_dict()) == list(model.state_dict())


def test_an_exported_draw_is_the_draw(exported):
    model, folders = exported
    drawn = db.draws(model, text(), n_draws=4, seed=2, sampling=db.Sampling(positions="tied")).logits
    server = loaded(folders)
    for index in range(4):
        server.set_adapter(str(index))
        torch.testing.assert_close(server(**text()).logits, drawn[index], rtol=0, atol=1e-5)
    assert (drawn[0] - drawn[1]).abs().max() > 0.1


def test_the_matrix_of_a_draw_is_that_of_the_adapter_with_columns_dropped_and_scaled(exported):
    model, folders = exported
    name = "base_model.model.model.layers.0.mlp.down_proj.lora_A"
    ratios = [load_file(folder / "adapter_model.safetensors")[f"{name}.weight"] / model.get_submodule(f"{name}.default").weight for folder in folders]  # fmt: skip
    assert all(torch.allclose(ratio, ratio[:1].expand_as(ratio)) for ratio in ratios)
    kept = torch.stack([ratio[0] for ratio in ratios])
    assert set(kept.detach().mul(0.7).round(decimals=4).unique().tolist()) == {0.0, 1.0}
    assert kept.eq(0).double().mean() == pytest.approx(0.3, abs=0.1)


def test_pefts_mixed_batch_generates_the_tokens_of_every_draw(exported):
    model, folders = exported
    prompt = tiny_text(1, 5)
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    tokens = loaded(folders).generate(prompt.expand(4, -1), adapter_names=list("0123"), **options)
    for index in range(4):
        draw, ids = db.function_draw(model, index, n_draws=4, seed=2, sampling=db.Sampling(positions="tied")), prompt
        for _ in range(6):
            logits = draw({"input_ids": ids, "use_cache": False}).logits
            ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
        assert tokens[index].tolist() == ids[0].tolist()
    assert len({tuple(row) for row in tokens.tolist()}) > 1


def test_the_files_are_pefts_own(exported):
    model, folders = exported
    configuration = json.loads((folders[1] / "adapter_config.json").read_text())
    assert configuration["peft_type"] == "LORA" and configuration["lora_dropout"] == 0.0 and configuration["r"] == 4
    assert sorted(path.name for path in folders[1].parent.iterdir()) == [f"draw-{index}" for index in range(4)]
    assert model.peft_config["default"].lora_dropout == 0.3  # the model is as it was
    assert load_file(folders[0] / "adapter_model.safetensors").keys() == peft.get_peft_model_state_dict(model).keys()


@pytest.mark.slow
def test_adapters_of_experts_for_which_peft_has_no_dropout_can_be_dropped_and_exported(tmp_path):
    with pytest.raises(ValueError, match="does not work with lora_dropout"):
        adapted("Mixtral", target_modules=["q_proj"], target_parameters=EXPERTS)
    model = adapted("Mixtral", 0.0, target_modules=["q_proj"], target_parameters=EXPERTS)
    dropped = db.add_dropout(model, 0.3, where=adapters(model), copy=False)
    assert [site.shape for site in db.sites(dropped, text())][1:3] == [(4, 48), (4, 32)]  # a mask for each expert
    drawn = db.draws(dropped, text(), n_draws=2, seed=5, sampling=db.Sampling(positions="tied")).logits
    for index, folder in enumerate(export_adapters(dropped, tmp_path, n_draws=2, seed=5)):
        alone = peft.PeftModel.from_pretrained(tiny_model("Mixtral"), folder).eval()
        torch.testing.assert_close(alone(**text()).logits, drawn[index], rtol=0, atol=1e-4)


def test_merged_adapters_are_refused_with_the_reason(tmp_path):
    model = adapted()
    model.merge_adapter()
    for use in (adapters, lambda net: export_adapters(net, tmp_path)):
        with pytest.raises(ValueError, match="merged into its weight, which is then constant"):
            use(model)
    with pytest.raises(TypeError, match="with adapters; merge_and_unload removes them"):
        export_adapters(adapted().merge_and_unload(), tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_no_adapter_can_hold_is_refused_and_nothing_is_written(tmp_path):
    with pytest.raises(ValueError, match="must be plain LoRA"):
        export_adapters(inspected(use_dora=True), tmp_path)
    model = adapted()
    with pytest.raises(ValueError, match=r"must be random in its adapters alone; .*lm_head"):
        export_adapters(db.add_dropout(model, 0.1, where=["base_model.model.lm_head"], x=text()), tmp_path)
    with pytest.raises(ValueError, match="must have dropout"):
        export_adapters(adapted(lora_dropout=0.0), tmp_path / "none")
    assert not list(tmp_path.rglob("adapter*"))


def test_no_draws_at_all_are_refused(exported, tmp_path):
    with pytest.raises(ValueError, match="`n_draws` must be a whole number, at least 1; got 0"):
        db.language.export_adapters(exported[0], tmp_path, n_draws=0)


def test_no_draw_is_replaced(exported):
    model, folders = exported
    before = (folders[0] / "adapter_model.safetensors").read_bytes()
    with pytest.raises(FileExistsError, match="must not hold draws already"):
        export_adapters(model, folders[0].parent, n_draws=2)
    assert (folders[0] / "adapter_model.safetensors").read_bytes() == before
