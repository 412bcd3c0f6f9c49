"""What computes the draws of a block of rows."""

import torch
from torch import nn

from dropbayes.sampling.plan import checked_keys, plan_draws
from dropbayes.sampling.trees import as_inputs
from tests.sampling.zoo import build


def planned(net, x, n_draws=12, **options):
    return plan_draws(net, as_inputs(x), keys=checked_keys(n_draws, 0, "stratified"), masks="shared", **options)


def test_replicates_are_independent_draws():
    net, x = build("dropout2d")
    plan, inputs = planned(net, x), as_inputs(x)
    with plan.running():
        one, two = (p.evaluator(inputs, range(2), 0, range(12)).outputs[0] for p in (plan, plan.replicate(1)))
    assert not torch.equal(one, two)


def test_a_part_of_the_draws_is_that_part_of_all():
    net, x = build("transformer_encoder")
    plan, inputs = planned(net, x), as_inputs(x)
    with plan.running():
        every = plan.evaluator(inputs, range(2), 0, range(12)).outputs[0]
        some = plan.evaluator(inputs, range(2), 0, range(5, 9)).outputs[0]
    torch.testing.assert_close(some, every[5:9])


def test_a_wide_perceptron_leaves_dropped_units_out():
    net = nn.Sequential(nn.Linear(3, 300), nn.ReLU(), nn.Dropout(0.5), nn.Linear(300, 2))
    x = torch.randn(6, 3)
    compact, plain = planned(net, x, exact_rows=False), planned(net, x)
    assert compact.evaluator.name == "direct, compacted" and plain.evaluator.name == "direct"
    inputs = as_inputs(x)
    with plain.running():
        outputs = [p.evaluator(inputs, range(6), 0, range(12)).outputs[0] for p in (compact, plain)]
    torch.testing.assert_close(*outputs)
