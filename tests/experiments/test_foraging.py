"""The world of the agents."""

import math

import pytest
import torch

from experiments import foraging


def one_world(*, items=(), poison=(), position=(50.0, 250.0), angle=0.0):
    """A world with the given items alone, the agent where it is said to be."""
    world = foraging.Worlds(1, openness_factor=1.0)
    world.present[:] = False
    for slot, (place, bad) in enumerate(zip(items, poison, strict=True)):
        world.items[0, slot] = torch.tensor(place)
        world.poison[0, slot], world.present[0, slot] = bad, True
    world.position[0] = torch.tensor(position)
    world.angle[0] = angle
    return world


def test_eyes_see_the_nearest_thing_on_their_ray():
    # Eye 3 looks along the heading, here +y. Food stands 40 ahead, poison 60 behind it on the same ray.
    world = one_world(items=[(50.0, 290.0), (50.0, 310.0)], poison=[False, True])
    view = world.view()
    assert view.kind[0, 3] == foraging.FOOD
    assert view.distance[0, 3].item() == pytest.approx(40.0)
    inputs = view.inputs()[0].view(9, 3)
    assert inputs[3].tolist() == pytest.approx([1.0, 40 / 85, 1.0])
    # Heading -x: the outer wall at x = 10 is 40 away.
    world = one_world(angle=-math.pi / 2)
    view = world.view()
    assert view.kind[0, 3] == foraging.WALL
    assert view.distance[0, 3].item() == pytest.approx(40.0, abs=1e-4)
    assert view.openness().item() < 1


def test_walls_hide_items():
    # The right side of the left room stands at x = 300.
    world = one_world(items=[(310.0, 250.0)], poison=[False], position=(280.0, 250.0), angle=math.pi / 2)
    assert world.view().kind[0, 3] == foraging.WALL
    far_side = one_world(items=[(310.0, 250.0)], poison=[False], position=(293.0, 250.0), angle=math.pi / 2)
    assert far_side._eat().item() == 0.0


def test_equal_wheels_go_straight_and_unequal_ones_turn():
    world = one_world()
    world.act(torch.tensor([0]), world.view())
    # The mean of two turns by 1 radian about wheels 5 to either side moves 5 sin 1 ahead.
    assert world.position[0].tolist() == pytest.approx([50.0, 250.0 + 5 * math.sin(1)], abs=1e-4)
    assert world.angle.item() == pytest.approx(0.0)
    world = one_world(angle=1.0)
    world.act(torch.tensor([1]), world.view())
    assert world.angle.item() == pytest.approx(1.2)


def test_a_step_across_a_wall_is_undone_but_not_its_turn():
    world = one_world(position=(12.0, 250.0), angle=-math.pi / 2)
    world.act(torch.tensor([1]), world.view())
    assert world.position[0].tolist() == pytest.approx([12.0, 250.0])
    assert world.angle.item() == pytest.approx(2 * math.pi - math.pi / 2 + 0.2, abs=1e-5)


@pytest.mark.parametrize(("bad", "worth"), [(False, 5.0), (True, -6.0)])
def test_rewards_are_openness_and_bonus_and_what_was_eaten(bad, worth):
    world = one_world(items=[(50.0, 262.0)], poison=[bad])
    view = world.view()
    openness = view.openness().item()
    reward = world.act(torch.tensor([0]), view).item()
    bonus = 0.1 * openness if openness > 0.75 else 0.0
    assert reward == pytest.approx(openness + bonus + worth, abs=1e-5)
    assert not world.present[0, 0]


def test_doubled_openness_is_at_most_one():
    reward = []
    for factor in (1.0, 2.0):
        world = one_world(angle=-math.pi / 2)  # before a wall
        world.openness_factor = factor
        view = world.view()
        reward.append(world.act(torch.tensor([3]), view).item())
    assert reward[1] == pytest.approx(min(1.0, 2 * reward[0]))


def test_worlds_together_are_worlds_alone():
    together = foraging.Worlds(3, seed=1)
    alone = []
    for k in range(3):
        world = foraging.Worlds(1)
        for name in ("position", "angle", "items", "poison", "present", "born"):
            setattr(world, name, getattr(together, name)[k : k + 1].clone())
        alone.append(world)
    for step in range(8):
        actions = torch.tensor([step % 5, (step + 1) % 5, 0])
        reward = together.act(actions, together.view())
        singly = torch.cat([w.act(actions[k : k + 1], w.view()) for k, w in enumerate(alone)])
        torch.testing.assert_close(reward, singly)
