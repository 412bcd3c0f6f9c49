"""Generators outside of torch's operations: named in code, watched during a pass, keyed, and put back."""

import random
import threading
import time

import numpy as np
import pytest
import torch
from torch import nn

from dropbayes.tracing.generators import SENTINEL_SEED, HostDraws, keyed_generators, names_generators, state_of
from tests.sampling.zoo import Module

NOTHING = frozenset()
NAMED = frozenset({"random"})


def states():
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()


# Names in code --------------------------------------------------------------------------------------------------------


def helper():
    return random.random()


def through_a_helper():
    return helper()


class Direct(nn.Module):
    def forward(self, x):
        return x * np.random.rand()


class InComprehension(nn.Module):
    def forward(self, x):
        return [x * random.random() for _ in range(2)]


class ByHelper(nn.Module):
    def forward(self, x):
        return x * through_a_helper()


class Seeding(nn.Module):
    def forward(self, x):
        torch.manual_seed(3)
        return x


class Inherits(Direct):
    pass


@pytest.mark.parametrize(
    ("net", "name"),
    [
        (Direct(), "random"),
        (nn.Sequential(Direct()), "random"),
        (Inherits(), "random"),
        (InComprehension(), "random"),
        (ByHelper(), "random"),
        (Seeding(), "manual_seed"),
        (Module(lambda m, x: x * random.gauss(1, 1)), "gauss"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else value,
)
def test_names_are_found_in_the_code_of_modules_and_of_the_functions_they_call(net, name):
    assert name in names_generators(net)


def test_names_are_found_in_hooks():
    net = nn.Linear(2, 2)
    assert names_generators(net) == NOTHING
    net.register_forward_hook(lambda m, args, out: out * random.random())
    assert "random" in names_generators(net)


def test_torchs_own_modules_name_none():
    assert names_generators(nn.Sequential(nn.Dropout(0.5), nn.LSTM(2, 2), nn.RReLU())) == NOTHING


# A pass ---------------------------------------------------------------------------------------------------------------


def test_global_generators_that_moved_are_named_and_restored():
    before = states()
    with HostDraws(NAMED, []) as host:
        random.random(), np.random.rand()
    assert host.moved == ["Python's random", "numpy.random"] and host.unkeyed == []
    assert states() == before


def test_a_pass_that_leaves_a_generator_where_an_earlier_one_left_it_is_seen_to_draw():
    def seeded_pass():
        random.seed(3), np.random.seed(3)
        return random.random() + np.random.rand()

    seeded_pass()
    before = states()
    with HostDraws(NAMED, []) as host:
        seeded_pass()
    assert host.moved == ["Python's random", "numpy.random"] and states() == before


def test_an_error_restores_them_too():
    before = states()
    with pytest.raises(KeyError), HostDraws(NAMED, []) as host:
        random.random()
        raise KeyError
    assert host.moved == ["Python's random"] and states() == before


def test_nothing_is_named_where_nothing_was_drawn():
    with HostDraws(NAMED, []) as host:
        torch.ones(3)
    assert host.moved == host.unkeyed == []


def test_torchs_generator_that_moved_unseen_is_named_and_restored():
    before = states()
    with HostDraws(NAMED, []) as host:
        torch.rand(3)
    assert "torch's generator" in host.unkeyed[0] and states() == before


def test_torchs_generator_seeded_within_the_pass_is_fixed_and_restored():
    before = states()
    with HostDraws(frozenset({"manual_seed"}), []) as host:
        torch.manual_seed(7)
        torch.rand(3)
    assert host.unkeyed == [] and states() == before


def test_a_network_that_names_a_seed_runs_with_a_known_one():
    with HostDraws(frozenset({"manual_seed"}), []):
        assert torch.default_generator.initial_seed() == SENTINEL_SEED


@pytest.mark.parametrize(
    "draw", [random.random, np.random.rand, lambda: torch.rand(1)], ids=["random", "numpy", "torch"]
)
def test_a_busy_other_thread_is_not_taken_for_the_network(draw):
    stop = threading.Event()

    def work():
        while not stop.is_set():
            draw()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        with HostDraws(NOTHING, []) as host:
            time.sleep(0.05)
    finally:
        stop.set()
        thread.join()
    assert host.moved == host.unkeyed == []


def test_a_lone_network_is_watched_even_if_it_names_nothing():
    with HostDraws(NOTHING, []) as host:
        random.random()
    assert host.moved == (["Python's random"] if threading.active_count() == 1 else [])


PRIVATE = [
    (random.Random(3), lambda source: source.random()),
    (np.random.default_rng(3), lambda source: source.random()),
    (np.random.RandomState(3), lambda source: source.rand()),
    (torch.Generator().manual_seed(3), lambda source: torch.rand(1, generator=source)),
]


@pytest.mark.parametrize(("source", "draw"), PRIVATE, ids=lambda value: type(value).__name__)
def test_private_generators_that_moved_are_named(source, draw):
    with HostDraws(NOTHING, [source]) as host:
        pass
    assert host.unkeyed == []
    with HostDraws(NOTHING, [source]) as host:
        draw(source)
    assert host.unkeyed == [f"a {type(source).__name__} of its own"]


@pytest.mark.parametrize(("source", "draw"), PRIVATE, ids=lambda value: type(value).__name__)
def test_a_state_is_equal_until_the_next_draw(source, draw):
    before = state_of(source)
    assert state_of(source) == before
    draw(source)
    assert state_of(source) != before


# Keys -----------------------------------------------------------------------------------------------------------------


def test_keyed_generators_give_the_numbers_of_their_seed_and_are_put_back():
    before, drawn = states(), []
    for seed in (5, 5, 2**40 + 5):
        with keyed_generators(seed):
            drawn.append((random.random(), np.random.rand()))
            torch.rand(2)
    assert drawn[0] == drawn[1] != drawn[2] and states() == before


def test_without_a_seed_only_torchs_generator_is_seeded():
    python = random.getstate()
    with keyed_generators(None):
        assert random.getstate() == python
        assert torch.default_generator.initial_seed() == SENTINEL_SEED


def test_keyed_generators_are_put_back_after_an_error():
    before = states()
    with pytest.raises(KeyError), keyed_generators(3):
        random.random()
        raise KeyError
    assert states() == before


def test_one_thread_at_a_time_borrows_the_generators():
    drawn = {}

    def work(seed):
        for _ in range(50):
            with keyed_generators(seed):
                drawn.setdefault(seed, set()).add((random.random(), np.random.rand()))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(numbers) for numbers in drawn.values()] == [1] * 4
