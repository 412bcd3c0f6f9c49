"""The global generators are left as they were, and those of the host that were used are named."""

import random
import sys
import tempfile
import uuid

import numpy as np
import torch
from torch import nn

from dropbayes.sampling.generators import PrivateDraws, unchanged_generators


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


def private_draws(draw, *modules):
    private = PrivateDraws(modules)
    sys.setprofile(private.note)
    try:
        draw()
    finally:
        sys.setprofile(None)
        private.finish()
    return private.names


def test_private_generators_are_told_from_the_global_ones():
    module = nn.Identity()
    module.source, module.others = np.random.default_rng(3), [np.random.RandomState(3)]
    assert private_draws(random.random, module) == private_draws(np.random.rand, module) == []
    assert private_draws(module.source.random, module) == ["a numpy.random.Generator of its own"]
    assert private_draws(module.others[0].rand, module) == ["a numpy.random.RandomState of its own"]
    assert module.source.random() == np.random.default_rng(3).random()


def test_a_generator_seeded_within_the_pass_does_not_count():
    assert private_draws(lambda: random.Random(3).random()) == []
    assert private_draws(lambda: random.Random().random()) == ["a random.Random of its own"]


def test_names_of_temporary_files_and_objects_are_no_draws():
    assert private_draws(uuid.uuid4) == private_draws(lambda: tempfile.TemporaryFile().close()) == []
