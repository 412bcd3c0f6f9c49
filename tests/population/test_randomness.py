"""Tests of the random words, thresholds and batches."""

import math

import torch

from dropbayes.population import (
    randomness,
)


def test_every_row_is_seen_once_in_an_epoch():
    positions, counts = randomness.batches(0, 8, [20, 13], 20)
    assert sorted(positions[:3, 0].flatten().tolist()) == [*range(20), *[20] * 4]
    assert counts[:3, 0].tolist() == [8, 8, 4]
    assert sorted(p for p in positions[:2, 1].flatten().tolist() if p < 20) == list(range(13))


def test_words_are_uniform_and_thresholds_give_the_exact_probability():
    words = randomness.words((400_000,), randomness.generator(1)).double()
    assert abs(words.mean() + 0.5) < 4 * 65536 / math.sqrt(12 * 400_000)
    for bit in range(16):  # each of the 16 bits is fair
        share = ((words.long() + 32768) >> bit & 1).double().mean()
        assert abs(share - 0.5) < 4.5 * 0.5 / math.sqrt(400_000)
    drop_prob = torch.tensor([0.005, 0.1, 1 / 3], dtype=torch.float64)
    dither = (torch.arange(100_000, dtype=torch.float64)[:, None] + 0.5) / 100_000
    exact = (randomness.thresholds(drop_prob, dither).double() + 32768).mean(0) / 65536
    torch.testing.assert_close(exact, drop_prob, rtol=0, atol=1e-9)
