"""What stands in for a model: its answers are those of the draws, and a cache that betrays them is refused."""

import inspect
import math

import pytest
import torch

import dropbayes as db
from dropbayes.language.folding import DrawnModel, FoldedDraws
from dropbayes.sampling.masks import Keys
from tests.sampling.sequence_models import VOCABULARY, sequence_model


def drawn(name="gpt2", n_draws=3, at_once=3, together=True):
    chunks = [range(n_draws)[start : start + at_once] for start in range(0, n_draws, at_once)]
    keys, sampling = Keys(0, n_draws), db.Sampling(positions="tied")
    folded = [FoldedDraws(sequence_model(name), keys, chunk, sampling) for chunk in chunks]
    return DrawnModel(folded, together=together)


@torch.no_grad()
def test_the_logits_are_the_log_of_the_mean_distribution():
    ids = torch.randint(3, VOCABULARY, (2, 5))
    stand_in = drawn(at_once=2).model()
    functions = [
        db.function_draw(sequence_model("gpt2"), i, n_draws=3, sampling=db.Sampling(positions="tied")) for i in range(3)
    ]
    each = torch.stack([f({"input_ids": ids, "use_cache": False}).logits[:, -1] for f in functions])
    expected = each.softmax(-1).mean(0).log()
    torch.testing.assert_close(stand_in(input_ids=ids, use_cache=False).logits[:, -1], expected, atol=1e-5, rtol=0)


def test_transformers_sees_the_parameters_of_the_models_own_forward_pass():
    model = sequence_model("gpt2")
    assert inspect.signature(drawn().model().forward) == inspect.signature(model.forward)


@pytest.mark.slow
@torch.no_grad()
def test_a_step_that_is_not_that_of_the_whole_text_is_refused(monkeypatch):
    """A cache that loses what it was told."""
    from transformers.cache_utils import DynamicLayer

    update = DynamicLayer.update

    def forgetful(layer, keys, values, *args, **kwargs):
        if layer.get_seq_length():
            layer.keys = layer.keys * 0.5
        return update(layer, keys, values, *args, **kwargs)

    monkeypatch.setattr(DynamicLayer, "update", forgetful)
    with pytest.raises(ValueError, match="cannot share its cache among draws"):
        db.language.generate(sequence_model("olmo2"), torch.randint(3, VOCABULARY, (1, 5)), n_draws=2, max_new_tokens=3)


@torch.no_grad()
def test_a_draw_alone_is_its_own_mean():
    ids = torch.randint(3, VOCABULARY, (1, 4))
    alone, mean = (drawn(n_draws=1, at_once=1, together=t).model()(input_ids=ids).logits for t in (False, True))
    torch.testing.assert_close(alone, mean)
    assert float(mean.exp().sum()) == pytest.approx(1.0, abs=1e-5) and math.isfinite(float(mean.sum()))
