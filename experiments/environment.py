"""The foraging world as a Gymnasium environment."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
import torch

from experiments import foraging

__all__ = ["Foraging"]

Observation = npt.NDArray[np.float32]


class Foraging(gymnasium.Env[Observation, np.int64]):
    """One agent among food, poison and walls; an episode never ends by itself.

    An observation has three numbers for each of nine eyes, 1 except for what the eye sees (wall, food, poison), whose
    slot has its distance as a share of sight. The five actions turn the two wheels.

    Args:
        max_steps: The number of steps after which the episode is truncated; None for no limit.

    Example:
        >>> env = Foraging()
        >>> observation, _ = env.reset(seed=0)
        >>> observation.shape
        (27,)
    """

    def __init__(self, *, max_steps: int | None = None) -> None:
        self.observation_space = gymnasium.spaces.Box(0.0, 1.0, (foraging.N_INPUTS,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(len(foraging.ACTIONS))
        self.max_steps = max_steps
        self._world = foraging.Worlds(1)
        self._view = self._world.view()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """A new world and its first observation; `options` is not used."""
        super().reset(seed=seed, options=options)
        self._world = foraging.Worlds(1, seed=int(self.np_random.integers(2**31)))
        self._view = self._world.view()
        return self._observation(), {}

    def step(self, action: np.int64) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """The agent's next observation, its reward, and whether `max_steps` are over."""
        if not self.action_space.contains(action):
            raise ValueError(f"`action` must be a whole number from 0 to {len(foraging.ACTIONS) - 1}; got {action!r}.")
        reward = self._world.act(torch.tensor([int(action)]), self._view)
        self._view = self._world.view()
        over = self.max_steps is not None and self._world.clock >= self.max_steps
        return self._observation(), float(reward), False, over, {}

    def _observation(self) -> Observation:
        return self._view.inputs()[0].numpy()
