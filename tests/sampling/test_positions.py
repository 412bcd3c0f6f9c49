"""Masks of sequences: a step that reads a cache has the masks of the whole sequence, tied or by absolute position."""

import inspect

import pytest
import torch
from torch import nn

import dropbayes as db
from dropbayes.sampling import Sampling
from dropbayes.sampling.masks import Keys, Positions, keep_mask
from dropbayes.tracing import PositionAxis, Site
from tests.sampling.sequence_models import (
    DECODERS,
    ENCODER_DECODERS,
    HYBRIDS,
    MODELS,
    STATE_SPACES,
    VOCABULARY,
    sequence_model,
)

FAST = ("gpt2", "mistral", "t5", "mamba2")
PROMPT, LENGTH = 6, 9


def unequal_prompts(side):
    """Prompts of six, four and two tokens, padded to six on one side, and three tokens that follow each."""
    ids = torch.randint(3, VOCABULARY, (3, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for row, length in enumerate((6, 4, 2)):
        mask[row, slice(PROMPT - length) if side == "left" else slice(length, PROMPT)] = 0
    return ids.masked_fill(mask == 0, 0), mask


def arguments(name, ids, mask, start, stop, past):
    """The named arguments of a model for the positions from `start` to `stop`; `past` is the output before them."""
    from transformers.modeling_outputs import BaseModelOutput

    if name in ENCODER_DECODERS:  # a decoder's text has no padding before its end
        decoded = {
            "decoder_input_ids": ids.flip(1).clamp(min=3)[:, start:stop],
            "attention_mask": mask[:, :PROMPT],
            "use_cache": True,
        }
        if past is None:
            return decoded | {"input_ids": ids[:, :PROMPT]}
        encoded = BaseModelOutput(last_hidden_state=past["encoder"])
        return decoded | {"encoder_outputs": encoded, "past_key_values": past["cache"]}
    first = start if name in STATE_SPACES else 0  # which take the mask of the new tokens alone
    given = {"input_ids": ids[:, start:stop], "attention_mask": mask[:, first:stop], "use_cache": True}
    if "position_ids" in inspect.signature(sequence_model(name).forward).parameters:
        given["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)[:, start:stop]
    if past is not None:
        given["cache_params" if name in STATE_SPACES else "past_key_values"] = past["cache"]
    return given


def stepwise(function, name, ids, mask):
    """The logits of a function that reads the prompt, then one token at a time from its cache."""
    past, logits = None, []
    for start, stop in ((0, PROMPT), *((n, n + 1) for n in range(PROMPT, LENGTH))):
        output = function(arguments(name, ids, mask, start, stop, past))
        encoder = past["encoder"] if past else getattr(output, "encoder_last_hidden_state", None)
        cache = output.cache_params if name in STATE_SPACES else output.past_key_values
        past = {"encoder": encoder, "cache": cache}
        logits.append(output.logits)
    return torch.cat(logits, 1)


def skip_if_padding_counts(name, ids, mask):
    """Skip where transformers masks the padding of a batch and not of a row alone, which an inspection refuses."""
    import transformers

    batch, alone = (
        sequence_model(name)(**arguments(name, ids[rows], mask[rows], 0, LENGTH, None)).logits[:1]
        for rows in (slice(1, None), slice(1, 2))
    )
    if not torch.allclose(batch, alone, atol=1e-4):
        pytest.skip(f"{name} of transformers {transformers.__version__} masks the padding of no row that is alone")


@pytest.mark.parametrize(
    ("positions", "side"),
    [
        ("tied", "left"),
        ("per_position", "right"),
        pytest.param("tied", "right", marks=pytest.mark.slow),
        pytest.param("per_position", "left", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in MODELS])
@torch.no_grad()
def test_a_step_from_a_cache_is_that_of_the_whole_sequence(name, positions, side):
    if positions == "per_position" and name in STATE_SPACES:
        pytest.skip("its cache does not know how many positions it holds")
    ids, mask = unequal_prompts(side)
    skip_if_padding_counts(name, ids, mask)
    function = db.function_draw(sequence_model(name), 2, n_draws=5, seed=3, sampling=db.Sampling(positions=positions))
    whole = function(arguments(name, ids, mask, 0, LENGTH, None)).logits
    plain = sequence_model(name)(**arguments(name, ids, mask, 0, LENGTH, None)).logits
    seen = mask.bool() if name not in ENCODER_DECODERS else torch.ones_like(mask, dtype=torch.bool)
    torch.testing.assert_close(stepwise(function, name, ids, mask)[seen], whole[seen], atol=1e-5, rtol=0)
    assert (whole - plain)[seen].abs().max() > 1e-3  # the masks took part


def test_the_architectures_are_of_four_kinds_and_at_least_twenty():
    assert len(MODELS) >= 20
    assert min(map(len, (DECODERS, ENCODER_DECODERS, HYBRIDS, STATE_SPACES))) >= 3


@pytest.mark.slow
@torch.no_grad()
def test_without_positions_a_step_has_other_masks_than_the_whole_sequence():
    ids, mask = unequal_prompts("left")
    function = db.function_draw(sequence_model("gpt2"), 2, n_draws=5, seed=3)
    whole = function(arguments("gpt2", ids, mask, 0, LENGTH, None)).logits
    assert (stepwise(function, "gpt2", ids, mask) - whole)[mask.bool()].abs().max() > 1e-2


@pytest.mark.slow
@torch.no_grad()
def test_a_draw_that_skips_layers_keeps_the_masks_of_the_others():
    """LayerDrop of the encoder: a skipped layer takes its sites along, and the others keep their masks."""
    ids, mask = unequal_prompts("left")
    net = sequence_model("m2m_100")
    functions = [
        db.function_draw(net, index, n_draws=6, seed=3, sampling=db.Sampling(positions="tied")) for index in range(6)
    ]
    for function in functions:
        whole = function(arguments("m2m_100", ids, mask, 0, LENGTH, None)).logits
        torch.testing.assert_close(stepwise(function, "m2m_100", ids, mask), whole, atol=1e-5, rtol=0)


class Reader(nn.Module):
    """Tokens or vectors `[row, position, feature]`, each dropped alone: its output is its mask, times two."""

    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(x)


def test_a_tied_mask_is_the_same_at_every_position_and_another_for_every_unit():
    drawn = db.draws(Reader(), torch.ones(2, 5, 16), n_draws=4, sampling=db.Sampling(positions="tied"))
    assert (drawn == drawn[:, :, :1]).all() and len({tuple(row) for row in drawn[:, 0, 0].tolist()}) > 1
    assert 0 < drawn.mean() < 2


def test_own_masks_differ_by_position_and_do_not_depend_on_the_length():
    long, short = (
        db.draws(Reader(), torch.ones(2, n, 16), n_draws=4, sampling=db.Sampling(positions="per_position"))
        for n in (7, 4)
    )
    assert torch.equal(long[:, :, :4], short)
    assert not torch.equal(long[:, :, 0], long[:, :, 1])


@pytest.mark.parametrize("positions", ["tied", "per_position"])
@pytest.mark.parametrize("sampler", ["stratified", "independent"])
def test_rows_of_their_own_keep_the_share_that_is_dropped(positions, sampler):
    options = {"masks": "row", "sampling": db.Sampling(positions=positions, sampler=sampler)}
    drawn = db.draws(Reader(), torch.ones(6, 5, 40), n_draws=50, **options)
    assert drawn.mean() == pytest.approx(1.0, abs=0.06)
    assert not torch.equal(drawn[:, 0], drawn[:, 1])


@pytest.mark.parametrize("masks", ["shared", "row"])
@pytest.mark.parametrize("positions", ["tied", "per_position"])
def test_a_function_draw_is_the_draw(masks, positions):
    net, x = sequence_model("llama"), {"input_ids": torch.randint(3, VOCABULARY, (3, 6)), "use_cache": False}
    drawn = db.draws(net, x, n_draws=3, masks=masks, sampling=db.Sampling(positions=positions)).logits
    with torch.no_grad():
        function = db.function_draw(net, 1, n_draws=3, masks=masks, sampling=db.Sampling(positions=positions))
        torch.testing.assert_close(function(x).logits, drawn[1], atol=1e-5, rtol=0)


def test_tied_attention_drops_whole_heads():
    """Equal keys and values of one: what attention gives is the head's mask over its keep probability."""
    net = Attention()
    drawn = db.draws(net, torch.ones(2, 5, 8), n_draws=40, sampling=db.Sampling(positions="tied"))
    heads = drawn.reshape(40, 2, 5, 4, 2)
    assert set(heads.round(decimals=4).unique().tolist()) == {0.0, 2.0}
    assert (heads == heads[:, :, :1, :, :1]).all()
    assert heads.mean() == pytest.approx(1.0, abs=0.2)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        heads = (x * self.scale).unflatten(-1, (4, 2)).transpose(1, 2)
        rate = 0.5 if self.training else 0.0
        return (
            nn.functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=rate).transpose(1, 2).flatten(2)
        )


def test_positions_are_checked():
    with pytest.raises(ValueError, match="`positions` must be one of None, 'tied', 'per_position'; got 'free'"):
        Sampling(positions="free")


def test_an_image_has_masks_of_the_network_where_no_axis_grows():
    """A mask whose axes do not change with the length holds no positions: it is one for all of them."""
    site = Site(0, "pool", "dropout", 0.5, (1, 3), name="pool dropout 0")
    made = Positions(True, ()).generate(site, (1, 3), lambda number, shape: torch.ones(shape))
    assert made.shape == (1, 3)


def test_the_newest_entry_of_an_axis_is_the_last_position():
    site = Site(0, "", "attention", 0.5, (2, 1, 6), name="x", positions=(PositionAxis(1, 0), PositionAxis(2, 0)))
    seen = []
    Positions(False, (9,)).generate(site, (2, 1, 6), lambda number, shape, units: seen.append(units))
    assert seen[0].starts == (8, 3)


def test_the_pairs_of_a_mask_by_position_agree_with_any_part_of_it():
    keys, site = (
        Keys(4, 10),
        Site(0, "", "attention", 0.5, (), name="x", positions=(PositionAxis(1, 0), PositionAxis(2, 0))),
    )

    def mask(queries, keys_seen, total):
        def make(number, shape, units):
            return keep_mask(keys, number, drop_prob=0.5, draws=range(3), rows=None, shape=shape, dtype=torch.float32,
                             device=torch.device("cpu"), units=units)  # fmt: skip

        return Positions(False, (total,)).generate(site, (2, queries, keys_seen), make)

    whole = mask(8, 8, 8)
    assert torch.equal(mask(1, 6, 6)[:, :, 0], whole[:, :, 5, :6])  # a step with its cache
    assert torch.equal(mask(1, 3, 6)[:, :, 0], whole[:, :, 5, 3:6])  # a sliding window of three
