"""Streamed statistics against their definitions, whatever the chunks."""

import pytest
import torch

from dropbayes.sampling.streaming import LogMean, Mean, Moments


def chunks(total, size):
    return [range(start, min(start + size, total)) for start in range(0, total, size)]


@pytest.mark.parametrize("size", [1, 7, 128, 300])
def test_moments_are_those_of_all_draws_bitwise_for_every_chunking(size):
    draws = torch.randn(300, 4, 2) * 3 + 1e4
    reference, streamed = Moments(), Moments()
    reference.add(draws)
    for chunk in chunks(300, size):
        streamed.add(draws[chunk.start : chunk.stop])
    reference.finish(), streamed.finish()
    assert torch.equal(reference.mean, streamed.mean)
    assert torch.equal(reference.variance, streamed.variance)
    torch.testing.assert_close(streamed.mean, draws.double().mean(0), rtol=1e-12, atol=0)
    torch.testing.assert_close(streamed.variance, draws.double().var(0, correction=0), rtol=1e-9, atol=0)


@pytest.mark.parametrize("n_elements", [1, 2, 5, 64])
def test_moments_of_float64_draws_have_the_same_bits_alone_and_among_others(n_elements):
    draws = torch.randn(100, 200, dtype=torch.float64)
    whole, part = Moments(), Moments()
    whole.add(draws), part.add(draws[:, -n_elements:])
    whole.finish(), part.finish()
    assert torch.equal(part.mean, whole.mean[-n_elements:])
    assert torch.equal(part.variance, whole.variance[-n_elements:])


def test_moments_of_float64_draws_have_the_same_bits_in_any_layout():
    draws = torch.randn(100, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).exp()
    rows_first = draws.t().contiguous().t()  # as where a perceptron has one output
    one, other = Moments(), Moments()
    one.add(draws), other.add(rows_first)
    one.finish(), other.finish()
    assert torch.equal(one.mean, other.mean) and torch.equal(one.variance, other.variance)


def test_variance_survives_a_large_mean():
    # Sums of squares would lose every digit here.
    draws = torch.randn(500, 3, dtype=torch.float64) + 1e9
    moments = Moments()
    for part in draws.split(11):
        moments.add(part)
    moments.finish()
    torch.testing.assert_close(moments.variance, draws.var(0, correction=0), rtol=1e-6, atol=0)


@pytest.mark.parametrize("size", [1, 9, 200])
def test_mean_and_log_mean_are_those_of_all_draws(size):
    values = torch.randn(200, 5) * 400  # exp overflows and underflows
    mean, log_mean = Mean(), LogMean()
    for chunk in chunks(200, size):
        mean.add(values[chunk.start : chunk.stop])
        log_mean.add(values[chunk.start : chunk.stop])
    mean.finish(), log_mean.finish()
    torch.testing.assert_close(mean.value, values.double().mean(0))
    expected = values.double().logsumexp(0) - torch.log(torch.tensor(200.0, dtype=torch.float64))
    torch.testing.assert_close(log_mean.value, expected)
