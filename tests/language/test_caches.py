"""Caches with rows of several draws."""

import pytest
import torch

from dropbayes.language.caches import cache_bytes, first_rows, layers_of, reorder, spread, tensors_of
from tests.sampling.sequence_models import sequence_model


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
    for layer, old in zip(layers_of(cache), layers_of(before), strict=True):
        for one, other in zip(tensors_of(layer), tensors_of(old), strict=True):
            assert torch.equal(one, other[[2, 0, 0, 5, 3, 3]])


def test_a_layer_that_draws_share_has_its_rows_once():
    cache, before = filled(3), filled(3)
    reorder(cache, torch.tensor([2, 0, 0]), n_draws=2)
    assert torch.equal(cache.layers[0].keys, before.layers[0].keys[[2, 0, 0]])


def test_shared_rows_are_spread_over_the_draws():
    cache, before = filled(2), filled(2)
    spread(cache, 2, n_draws=3)
    assert torch.equal(cache.layers[1].values, before.layers[1].values.repeat(3, 1, 1, 1))


def test_the_first_draws_rows_are_a_copy():
    cache = filled(4)
    first = first_rows(cache, 2)
    first.layers[0].keys.zero_()
    assert first.layers[0].keys.shape[0] == 2 and cache.layers[0].keys.abs().sum() > 0


def test_bytes_are_those_of_keys_and_values():
    assert cache_bytes(filled(3)) == 2 * 2 * 3 * 4 * 32 * 4  # layers, keys and values, rows, positions, features, bytes
