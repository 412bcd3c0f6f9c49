"""Tests of populations as records and as torch networks."""

from dataclasses import replace

import torch
from torch import nn

from dropbayes.population import draws, network, select
from dropbayes.population.records import concatenate
from tests.population.samples import trained_population


def test_a_member_becomes_the_same_torch_network():
    population, tasks = trained_population()
    net = network(population, 3)
    x = tasks[0].x
    inputs = (x - population.x_mean[3]) / population.x_scale[3]
    expected, _ = draws(
        replace(select(population, [3]), drop_prob=torch.zeros(1, 2, dtype=torch.float64)), x, n_draws=1
    )
    output = net.eval()(inputs) * population.y_scale[3] + population.y_mean[3]
    torch.testing.assert_close(output, expected[0, 0])
    assert [m.p for m in net if isinstance(m, nn.Dropout)] == [0.1, 0.1]


def test_parts_of_a_population_make_the_whole_again():
    population, _ = trained_population()
    whole = concatenate([select(population, [0, 1]), select(population, range(2, 6))])
    assert whole.members == population.members
    for name in ("drop_prob", "precision", "x_mean", "y_scale", "diverged"):
        assert torch.equal(getattr(whole, name), getattr(population, name))
    pairs = zip((*whole.weights, *whole.biases), (*population.weights, *population.biases), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)
