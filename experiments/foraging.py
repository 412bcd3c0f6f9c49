r"""The worlds of the reinforcement learning experiment, simulated in parallel: walls, food, poison and nine eyes.

The authors' demonstration (after Karpathy's) as tensors with a world axis: a box of 700 x 500 with two rooms, 30 items
of food and poison, and an agent on two wheels that sees 85 far along nine rays. Angles turn clockwise from the y axis.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["ACTIONS", "N_INPUTS", "Worlds"]

WIDTH, HEIGHT = 700.0, 500.0
N_ITEMS, MARGIN = 30, 20.0
ITEM_RADIUS = AGENT_RADIUS = 10.0
FOOD_REWARD, POISON_REWARD = 5.0, -6.0
OLD_AGE, REMOVAL_EVERY, REMOVAL_CHANCE = 5000, 100, 0.1
ARRIVAL_EVERY, ARRIVAL_CHANCE = 10, 0.25
EYE_ANGLES = tuple((k - 3) * 0.25 for k in range(9))  # not symmetric, as in the authors' files
SIGHT = 85.0
WALL, FOOD, POISON = range(3)
N_INPUTS = 3 * len(EYE_ANGLES)

ACTIONS = ((1.0, 1.0), (0.8, 1.0), (1.0, 0.8), (0.5, 0.0), (0.0, 0.5))
"""The turns of the two wheels, in radians."""
FORWARD, FORWARD_BONUS, CLEAR_VIEW = 0, 0.1, 0.75


def _box(x: float, y: float, width: float, height: float) -> list[tuple[float, float, float, float]]:
    """The four sides of a box as segments, the left one last."""
    right, bottom = x + width, y + height
    return [(x, y, right, y), (right, y, right, bottom), (right, bottom, x, bottom), (x, bottom, x, y)]


WALLS = _box(10, 10, WIDTH - 20, HEIGHT - 20) + _box(100, 100, 200, 300)[:3] + _box(400, 100, 200, 300)[:3]
"""The outer box and two rooms open to the left, as segments."""


def crossing(start: Tensor, end: Tensor, walls: Tensor) -> Tensor:
    """The fraction of the way from `start` to `end` at which each wall is crossed, infinite if not: `[..., wall]`.

    Args:
        start: Points `[..., 2]`.
        end: Points `[..., 2]`.
        walls: Segments `[wall, 4]`.

    Example:
        >>> wall = torch.tensor([[5.0, -1.0, 5.0, 1.0]])
        >>> crossing(torch.tensor([0.0, 0.0]), torch.tensor([10.0, 0.0]), wall).item()
        0.5
    """
    along_x, along_y = (end - start).unsqueeze(-2).unbind(-1)
    wall_x, wall_y = (walls[:, 2:] - walls[:, :2]).unbind(-1)
    from_x, from_y = (start.unsqueeze(-2) - walls[:, :2]).unbind(-1)
    area = wall_y * along_x - wall_x * along_y
    share = (wall_x * from_y - wall_y * from_x) / area
    place = (along_x * from_y - along_y * from_x) / area
    is_hit = (share > 0) & (share < 1) & (place > 0) & (place < 1)  # parallel: not a number, not met
    return torch.where(is_hit, share, math.inf)


@dataclass(frozen=True)
class View:
    """The view of the eyes: distances (`SIGHT` for nothing) and kinds (-1 for nothing), `[world, eye]`."""

    distance: Tensor
    kind: Tensor

    def inputs(self) -> Tensor:
        """The agent's 27 inputs: 1, except the slot of what an eye sees, which has its distance as a share of sight."""
        slots = self.kind[..., None] == torch.arange(3, device=self.kind.device)
        return torch.where(slots, (self.distance / SIGHT)[..., None], 1.0).flatten(1)

    def openness(self) -> Tensor:
        """The mean over eyes of the free share of sight, where only walls count."""
        return torch.where(self.kind == WALL, self.distance / SIGHT, 1.0).mean(1)


class Worlds:
    """Independent worlds with an agent each.

    Args:
        n_worlds: The number of worlds.
        seed: The seed of items and random events.
        openness_factor: The factor on the openness of the view in the reward, which is at most 1: 2 in the
            demonstration the paper builds on, 1 in the authors' later file.
        device: The device to compute on.
    """

    def __init__(
        self, n_worlds: int, *, seed: int = 0, openness_factor: float = 2.0, device: torch.device | str = "cpu"
    ) -> None:
        self.device = torch.device(device)
        self.openness_factor = openness_factor
        self.source = torch.Generator(self.device).manual_seed(seed)
        self.walls = torch.tensor(WALLS, device=self.device)
        self.turns = torch.tensor(ACTIONS, device=self.device)
        self.eyes = torch.tensor(EYE_ANGLES, device=self.device)
        self.clock = 0
        self.position = torch.full((n_worlds, 2), 50.0, device=self.device)
        self.angle = torch.zeros(n_worlds, device=self.device)
        self.items = self._random_positions(n_worlds, N_ITEMS)
        self.poison = self._chance(n_worlds, N_ITEMS) < 0.5
        self.present = torch.ones(n_worlds, N_ITEMS, dtype=torch.bool, device=self.device)
        self.born = torch.zeros(n_worlds, N_ITEMS, dtype=torch.long, device=self.device)

    def __len__(self) -> int:
        return len(self.angle)

    def _chance(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.source, device=self.device)

    def _random_positions(self, *shape: int) -> Tensor:
        span = torch.tensor([WIDTH - 2 * MARGIN, HEIGHT - 2 * MARGIN], device=self.device)
        return MARGIN + span * self._chance(*shape, 2)

    def view(self) -> View:
        """The current view: along each ray the nearest wall or item."""
        angles = self.angle[:, None] + self.eyes
        ray = torch.stack([angles.sin(), angles.cos()], -1)  # [world, eye, 2]
        start = self.position[:, None]
        wall = crossing(start, start + SIGHT * ray, self.walls).amin(-1) * SIGHT
        offset = (self.items - start).mT.contiguous()  # [world, 2, item]
        along = torch.bmm(ray, offset)
        across = torch.bmm(torch.stack([-ray[..., 1], ray[..., 0]], -1), offset)
        seen = (across.abs() <= ITEM_RADIUS) & (along > 0) & (along < SIGHT) & self.present[:, None]
        item, index = torch.where(seen, along, math.inf).min(-1)
        kind = torch.where(self.poison.gather(1, index), POISON, FOOD)
        nearest = torch.minimum(item, wall)
        kind = torch.where(nearest.isinf(), -1, torch.where(item < wall, kind, WALL))
        return View(nearest.clamp(max=SIGHT), kind)

    def act(self, actions: Tensor, view: View) -> Tensor:
        """Moves every agent, lets it eat, renews items; returns the rewards `[world]`.

        Args:
            actions: The indices into `ACTIONS`, `[world]`.
            view: The view on which the agents acted; the reward depends on it.
        """
        self.clock += 1
        self._move(self.turns[actions])
        eaten = self._eat()
        self._renew()
        openness = (self.openness_factor * view.openness()).clamp(max=1.0)
        bonus = FORWARD_BONUS * openness * ((actions == FORWARD) & (openness > CLEAR_VIEW))
        return openness + bonus + eaten

    def _move(self, turns: Tensor) -> None:
        """The mean of the centre turned about each wheel; a step across a wall is undone, the turn is not."""
        first, second = turns.unbind(-1)
        # The wheels sit half a radius to either side; turned clockwise, (0, r) at a becomes r (sin a, cos a).
        across = self.angle + math.pi / 2
        step = [f(across - first) - f(across + second) for f in (torch.sin, torch.cos)]
        moved = self.position + 0.25 * AGENT_RADIUS * torch.stack(step, -1)
        blocked = crossing(self.position, moved, self.walls).amin(-1).isfinite()
        moved = torch.where(blocked[:, None], self.position, moved)
        self.position = torch.stack([moved[:, 0].clamp(0, WIDTH), moved[:, 1].clamp(0, HEIGHT)], -1)
        self.angle = (self.angle - first + second) % (2 * math.pi)

    def _eat(self) -> Tensor:
        """Takes the items the agents touch with no wall between; returns their rewards, `[world]`."""
        distance = (self.items - self.position[:, None]).square().sum(-1)
        near = (distance < (ITEM_RADIUS + AGENT_RADIUS) ** 2) & self.present
        worth = torch.zeros_like(self.angle)
        world, item = near.nonzero(as_tuple=True)
        if len(world):
            open_way = crossing(self.position[world], self.items[world, item], self.walls).amin(-1).isinf()
            world, item = world[open_way], item[open_way]
            self.present[world, item] = False
            value = torch.where(self.poison[world, item], POISON_REWARD, FOOD_REWARD)
            worth.index_add_(0, world, value)
        return worth

    def _renew(self) -> None:
        """Removes some old items, adds one to some worlds that lack one."""
        if self.clock % REMOVAL_EVERY == 0:
            old = (self.clock - self.born > OLD_AGE) & (self._chance(*self.present.shape) < REMOVAL_CHANCE)
            self.present &= ~old
        if self.clock % ARRIVAL_EVERY == 0:
            arrives = ~self.present.all(1) & (self._chance(len(self)) < ARRIVAL_CHANCE)
            free = self.present.int().argmin(1)
            positions, poison = self._random_positions(len(self)), self._chance(len(self)) < 0.5
            world = arrives.nonzero()[:, 0]
            self.items[world, free[world]] = positions[world]
            self.poison[world, free[world]] = poison[world]
            self.born[world, free[world]] = self.clock
            self.present[world, free[world]] = True
