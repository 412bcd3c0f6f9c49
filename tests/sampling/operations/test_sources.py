"""The protocol of a source: what it is asked for, and what it is not."""

import torch
from torch import nn

from dropbayes.sampling.operations import Interception, scaled_product
from tests.sampling.operations.fixed_source import FixedSource, run_with_fixed_source


def test_deterministic_operations_pass_through():
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.LayerNorm(4))
    x = torch.randn(2, 3)
    out, source = run_with_fixed_source(net, x)
    assert torch.equal(out, net(x)) and source.kinds == []


def test_a_source_sees_every_operation_with_its_result():
    class Watching(FixedSource):
        def after(self, func, args, kwargs, result):
            results.append(result)

    results = []
    with Interception(Watching()):
        product = torch.ones(2) * 3
    assert any(result is product for result in results)


def test_the_scale_is_that_of_the_kept_units():
    x, keep = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 0.0])
    assert scaled_product(x, keep, 0.75).tolist() == [4, 0]
    assert scaled_product(x, 0 * keep, 1.0).tolist() == [0, 0]
