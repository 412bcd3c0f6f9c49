"""The identity of a run: what changes it and what does not."""

import functools

import pytest
import torch
from torch import nn

import dropbayes as db
from dropbayes.training.checkpoints import fingerprint_of
from dropbayes.training.optimization import InverseDecay
from tests.training.toys import network


def test_every_element_of_the_data_counts():
    values = torch.randn(30_000)
    changed = values.clone()
    changed[12_345] = torch.nextafter(changed[12_345], torch.tensor(9.0))
    assert fingerprint_of(values) == fingerprint_of(values.clone())
    assert fingerprint_of(values) != fingerprint_of(changed)
    assert fingerprint_of(values.bfloat16()) != fingerprint_of(values.half())
    assert fingerprint_of(values.reshape(2, -1)) != fingerprint_of(values)


def test_drop_probabilities_activations_and_frozen_parameters_count_and_weights_do_not():
    frozen = network()
    frozen[0].weight.requires_grad_(False)
    tanh = network()
    tanh[1] = nn.Tanh()
    nets = [network(), network(0.6), tanh, frozen]
    assert len({fingerprint_of(net) for net in nets}) == 4
    assert fingerprint_of(network()) == fingerprint_of(network(seed=3)) == fingerprint_of(network().eval())


class Functional(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.p, self.layer = p, nn.Linear(2, 1)

    def forward(self, x):
        return self.layer(nn.functional.dropout(torch.relu(x), self.p, self.training))


class Other(Functional):
    pass


def test_settings_and_classes_of_modules_without_a_repr_count():
    assert len({fingerprint_of(net) for net in (Functional(0.1), Functional(0.6), Other(0.1))}) == 3


def test_schedules_of_one_name_are_told_apart_by_their_code_closure_and_fields():
    def scaled(rate):
        return lambda step: rate / (1 + step)

    schedules = [
        scaled(1.0), scaled(2.0), lambda step: 1.0, lambda step: 0.5, InverseDecay(0.1, 1.0), InverseDecay(0.2, 1.0),
        functools.partial(pow, 2), functools.partial(pow, 3), None,
    ]  # fmt: skip
    assert len({fingerprint_of(schedule) for schedule in schedules}) == len(schedules)
    assert fingerprint_of(scaled(1.0)) == fingerprint_of(scaled(1.0))


@pytest.mark.parametrize(
    "pair",
    [(db.Gaussian(1.0), db.Gaussian(2.0)), (db.Prior(1.0), db.Prior(2.0)), ({"a": 1}, {"a": 2}), ([1, 2], [2, 1])],
)
def test_records_and_collections_are_compared_by_value(pair):
    assert fingerprint_of(pair[0]) != fingerprint_of(pair[1])
