"""Tests of the heads: gradients against those of the likelihoods by autograd, units, refusals."""

import pytest
import torch

from dropbayes.population.heads import HEADS, head_of
from tests.population.samples import log_likelihood

F64 = torch.float64


def targets(name, source):
    if name == "categorical":
        return torch.randint(0, 4, (3, 5, 1), generator=source)
    return torch.randn(3, 5, 2, dtype=F64, generator=source)


@pytest.mark.parametrize("name", HEADS)
def test_the_gradient_is_that_of_the_negative_log_likelihood(name):
    source = torch.Generator().manual_seed(0)
    y = targets(name, source)
    output = torch.randn(3, 5, 4, dtype=F64, generator=source)[
        ..., : HEADS[name].per_output * (4 if name == "categorical" else 2)
    ]
    output = output.clone().requires_grad_()
    (expected,) = torch.autograd.grad(-log_likelihood(name, output, y).sum(), output)
    torch.testing.assert_close(HEADS[name].loss_gradient(output.detach(), y), expected)


@pytest.mark.parametrize("name", ["gaussian", "heteroscedastic"])
def test_means_and_variances_scale_with_the_units_of_y(name):
    source = torch.Generator().manual_seed(2)
    output = torch.randn(3, 5, 2 * HEADS[name].per_output, dtype=F64, generator=source)
    mean, variance = HEADS[name].in_units(output, torch.tensor(0.0), torch.tensor(1.0), torch.tensor(0.5, dtype=F64))
    shifted, scaled = HEADS[name].in_units(output, torch.tensor(7.0), torch.tensor(10.0), torch.tensor(50.0, dtype=F64))
    torch.testing.assert_close(shifted, 7 + 10 * mean)
    torch.testing.assert_close(scaled, 100 * variance)


@pytest.mark.parametrize("y", [torch.eye(3), torch.tensor([0.0, 1.0]), torch.tensor([0, -1]), torch.tensor([True])])
def test_what_is_no_class_number_is_refused(y):
    with pytest.raises(ValueError, match="`y` must hold class numbers"):
        HEADS["categorical"].columns(y)


def test_missing_targets_are_refused():
    with pytest.raises(ValueError, match="`y` must be finite"):
        HEADS["gaussian"].columns(torch.tensor([1.0, float("nan")]))


def test_an_unknown_likelihood_is_refused():
    with pytest.raises(ValueError, match="`likelihood` must be one of"):
        head_of("poisson")
