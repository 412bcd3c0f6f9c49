"""The words that kernels make are the published ones."""

import json
import pathlib

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from dropbayes.sampling.kernels.all import dropout
from dropbayes.sampling.kernels.attention import keep_bits
from dropbayes.sampling.masks import Keys, signed_threshold

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PUBLISHED = json.loads((pathlib.Path(__file__).parents[3] / "docs" / "masks.json").read_text())


def coordinates(case):
    keys, row = Keys(int(case["seed"]), case["n_draws"], case["sampler"], case["replicate"]), case["row"]
    return keys, range(case["draw"], case["draw"] + 1), None if row is None else range(row, row + 1)


def kernel_mask(case, drop_prob):
    keys, draws, rows = coordinates(case)
    ones = torch.ones(1, 1, 1, case["units"], device=DEVICE)
    result = dropout(
        ones, keys, case["site"], drop_prob=drop_prob, draws=draws, rows=rows, outer=1, inner=case["units"]
    )
    return result.flatten() > 0


def test_the_kernels_give_the_published_masks():
    for case in PUBLISHED["masks"]:
        assert "".join("01"[kept] for kept in kernel_mask(case, case["drop_prob"]).tolist()) == case["value"]


@pytest.mark.slow
def test_a_word_is_kept_from_its_own_value_down():
    # A drop probability of w / 2³² keeps the word w and of (w + 1) / 2³² drops it: this pins every bit of the word.
    for case in PUBLISHED["words"]:
        word = case["value"][-1]
        assert kernel_mask(case, word / 2**32)[-1]
        assert word == 2**32 - 1 or not kernel_mask(case, (word + 1) / 2**32)[-1]


@pytest.mark.slow
def test_bits_of_eight_draws_are_the_published_masks():
    for case in PUBLISHED["masks"]:
        keys, draws, rows = coordinates(case)
        bits = keep_bits(
            keys, case["site"], drop_prob=case["drop_prob"], draws=draws, rows=rows, lines=4, length=6, device=DEVICE
        )
        assert "".join(str(bit & 1) for bit in bits[0, 0, :, :6].flatten().tolist()) == case["value"]


def test_thresholds_are_the_published_ones():
    for case in PUBLISHED["threshold"]:
        assert signed_threshold(case["drop_prob"]) + 2**31 == case["value"]
