"""The global generators are left as they were, and those of the host that were used are named."""

import random

import numpy as np
import torch

from dropbayes.sampling.generators import unchanged_generators


def states():
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()


def test_every_state_is_restored_and_the_hosts_that_moved_are_named():
    before, moved = states(), list[str]()
    with unchanged_generators(moved):
        torch.rand(3), random.random(), np.random.rand()
    assert states() == before and moved == ["Python's random", "numpy.random"]


def test_an_error_restores_them_too():
    before = states()
    try:
        with unchanged_generators():
            random.random()
            raise KeyError
    except KeyError:
        pass
    assert states() == before


def test_nothing_is_named_where_nothing_was_drawn():
    moved: list[str] = []
    with unchanged_generators(moved):
        torch.rand(3)
    assert moved == []
