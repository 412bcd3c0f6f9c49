"""Draws folded into a batch are the function draws, side by side."""

import pytest
import torch

import dropbayes as db
from dropbayes.language.folding import FoldedDraws, n_rows_of
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


def test_a_mask_without_rows_cannot_be_folded():
    x = {"input_ids": torch.randint(3, VOCABULARY, (2, 5)), "decoder_input_ids": torch.ones(2, 2, dtype=torch.long)}
    assert not folded("m2m_100", range(1)).is_foldable(x, 2)
    assert folded("bart", range(1)).is_foldable(x, 2)


def test_rows_are_counted_where_the_text_grows():
    ids = torch.ones(2, 5)
    assert n_rows_of({"input_ids": torch.ones(3, 2), "past_key_values": None}) == 3
    assert n_rows_of({"input_ids": None, "decoder_input_ids": ids}) == 2
