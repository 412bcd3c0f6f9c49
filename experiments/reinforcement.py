r"""Reinforcement learning: Thompson sampling through dropout against ε-greedy [GG16, section "Reinforcement Learning"].

Both agents learn action values with two hidden layers of 50 by replay. One explores at random with a falling
probability; the other drops units with probability 0.1 before every weight layer and takes the best action of a single
draw of its network. Every agent has its own world; a few learn together as a stack of networks, each stack in a process
of its own.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import pathlib
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from dropbayes.runtime import files
from dropbayes.runtime.devices import end_with_parent
from dropbayes.runtime.progress import ProgressBar
from experiments.foraging import ACTIONS, N_INPUTS, Worlds
from experiments.record import Array, Arrays, Findings, Record, markdown_table

CPU_ONLY = True  # too small to gain from a device
Policy = Literal["thompson", "epsilon-greedy"]
NAMES: dict[Policy, str] = {"thompson": "Thompson sampling", "epsilon-greedy": "ε-greedy"}
BLOCK = 200
"""Steps whose mean reward is one point of the curves; the paper's 25 batches of burn-in are 5,000 steps."""
WINDOW = 5
"""Blocks of the running mean that is drawn and compared with 1: the last 1,000 steps, as in the demonstration."""


@dataclass(frozen=True)
class Settings:
    """Values from the appendix unless noted.

    Attributes:
        n_agents: The number of agents of each kind; the paper has one.
        stack: The number of agents that learn together; the random numbers of a run depend on it.
        n_steps: The number of steps of each agent; not stated, the paper's plot ends after 1,000 blocks.
        hidden: The number of units in each of the two hidden layers.
        drop_prob: The drop probability before every weight layer of the Thompson agent (main paper, section 5.4).
        discount: The discount factor of future rewards.
        replay: The capacity of the replay; when full, a random experience is replaced (demonstration).
        learning_starts: The number of stored experiences after which learning starts.
        random_steps: The number of first steps, taken at random.
        learning_rate: The learning rate of plain gradient descent.
        weight_decay: The weight decay, divided by the batch size as the gradients are (demonstration's trainer); biases
            have none.
        batch_size: The number of experiences per step.
        epsilon_total: The step at which ε reaches its least value.
        epsilon_burn_in: The step from which ε falls.
        epsilon_least: The least ε.
        openness_factor: The factor on the reward for an open view: 2 in the demonstration the paper builds on, 1 in the
            authors' later file. Only with 2 is the reward of 1 passed when the paper says; it states neither.
        seed: The seed of the first stack.
    """

    n_agents: int = 20
    stack: int = 4
    n_steps: int = 200_000
    hidden: int = 50
    drop_prob: float = 0.1
    discount: float = 0.7
    replay: int = 30_000
    learning_starts: int = 1000
    random_steps: int = 5000
    learning_rate: float = 0.001
    weight_decay: float = 0.001
    batch_size: int = 64
    epsilon_total: int = 200_000
    epsilon_burn_in: int = 3000
    epsilon_least: float = 0.05
    openness_factor: float = 2.0
    seed: int = 0

    @classmethod
    def quick(cls) -> Settings:
        """The first tenth, in which the two policies separate."""
        return cls(n_steps=20_000)

    @classmethod
    def tiny(cls) -> Settings:
        """For tests: a short random phase and larger steps."""
        return cls(
            n_agents=10, stack=5, n_steps=2000, learning_starts=200, random_steps=400, learning_rate=0.01, replay=2000,
            epsilon_burn_in=400, epsilon_total=16_000,
        )  # fmt: skip


def epsilon(age: int, settings: Settings) -> float:
    r"""The chance of a random action [GG16, section "Model Uncertainty in Reinforcement Learning"].

    $\epsilon = \min(1, \max(\epsilon_{min}, 1 - \frac{\text{age} - \text{burn-in}}{\text{total} - \text{burn-in}}))$,
    with the text's burn-in of 3,000 and total of 200,000 steps.

    Example:
        >>> epsilon(101_500, Settings())
        0.5
    """
    progress = (age - settings.epsilon_burn_in) / (settings.epsilon_total - settings.epsilon_burn_in)
    return min(1.0, max(settings.epsilon_least, 1 - progress))


def products(left: Tensor, right: Tensor) -> Tensor:
    """The matrix products of two stacks; on CPU by NumPy, whose loop over small matrices costs less than torch's."""
    if left.is_cuda or len(left) < 8:
        return torch.bmm(left, right)
    return torch.from_numpy(np.matmul(left.numpy(), right.numpy()))


class Agents:
    """Agents of one kind, each with its own network, replay and random numbers, learning together.

    Args:
        n_agents: The number of agents.
        policy: The way they explore.
        settings: The sizes and rates.
        seed: The seed of weights, masks, replay and random actions.
        device: The device to compute on.
    """

    def __init__(
        self, n_agents: int, policy: Policy, settings: Settings, *, seed: int = 0, device: torch.device | str = "cpu"
    ) -> None:
        self.policy, self.settings = policy, settings
        self.device = torch.device(device)
        self.source = torch.Generator(self.device).manual_seed(seed)
        self.widths = (N_INPUTS, settings.hidden, settings.hidden, len(ACTIONS))
        self.weights: list[Tensor] = []
        self.biases: list[Tensor] = []
        for n_in, n_out, bias in zip(self.widths, self.widths[1:], (0.1, 0.1, 0.0), strict=False):
            normal = torch.randn(n_agents, n_in, n_out, generator=self.source, device=self.device)
            self.weights.append(normal / n_in**0.5)
            self.biases.append(torch.full((n_agents, 1, n_out), bias, device=self.device))
        # A row is state, next state, action, reward: one look-up fetches an experience.
        self.memory = torch.zeros(n_agents * settings.replay, 2 * N_INPUTS + 2, device=self.device)
        self.offsets = torch.arange(n_agents, device=self.device)[:, None] * settings.replay
        self.age = self.stored = 0
        self.last: tuple[Tensor, Tensor, Tensor] | None = None

    def __len__(self) -> int:
        return len(self.offsets)

    def masks(self, n_rows: int) -> list[Tensor] | None:
        """Fresh masks before every weight layer, `[agent, row, unit]`; None for networks that do not drop."""
        if self.policy != "thompson":
            return None
        # Four 16-bit words from each 64-bit random number: a unit is dropped when its word lies below the threshold.
        n_units = sum(self.widths[:3])
        n_words = len(self) * n_rows * n_units
        quads = torch.empty((n_words + 3) // 4, dtype=torch.int64, device=self.device)
        words = quads.random_(-(2**63), None, generator=self.source).view(torch.int16)[:n_words]
        keep = torch.empty(n_words, device=self.device)
        torch.ge(words, round(self.settings.drop_prob * 2**16) - 2**15, out=keep)
        keep.mul_(1 / (1 - self.settings.drop_prob))
        sizes = [len(self) * n_rows * width for width in self.widths[:3]]
        return [mask.view(len(self), n_rows, -1) for mask in keep.split(sizes)]

    def values(self, states: Tensor, masks: list[Tensor] | None) -> tuple[Tensor, list[Tensor]]:
        """The action values `[agent, row, action]`, and the input of every weight layer."""
        inputs = []
        x = states
        for layer, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = x if masks is None else x * masks[layer]
            inputs.append(x)
            # For one row a product of stacked matrices costs more in calls than in arithmetic.
            x = (x.mT * weight).sum(1, keepdim=True) if x.shape[1] == 1 else products(x, weight)
            x += bias
            if layer < 2:
                x.relu_()
        return x, inputs

    def choose(self, states: Tensor) -> Tensor:
        """The agents' actions `[agent]` for their states `[agent, input]`."""
        at_random = torch.randint(len(ACTIONS), (len(self),), generator=self.source, device=self.device)
        if self.age < self.settings.random_steps:
            return at_random
        best = self.values(states[:, None], self.masks(1))[0][:, 0].argmax(-1)
        if self.policy == "thompson":
            return best
        explore = torch.rand(len(self), generator=self.source, device=self.device) < epsilon(self.age, self.settings)
        return torch.where(explore, at_random, best)

    def remember(self, states: Tensor, actions: Tensor, rewards: Tensor) -> None:
        """Stores the experience that `states` completes, and keeps the new half of the next one."""
        if self.last is not None:
            before, action, reward = self.last
            if self.stored < self.settings.replay:
                slots = torch.full((len(self), 1), self.stored, device=self.device)
                self.stored += 1
            else:
                slots = self._indices(1)
            row = torch.cat([before, states, action[:, None], reward[:, None]], 1)
            self.memory[(self.offsets + slots)[:, 0]] = row
        self.last = (states, actions, rewards)
        self.age += 1

    def _indices(self, n: int) -> Tensor:
        return torch.randint(self.stored, (len(self), n), generator=self.source, device=self.device)

    def learn(self) -> None:
        r"""One descent step on $\frac1{2M} \sum (Q(s, a) - r - \gamma \max_{a'} Q(s', a'))^2$, if enough is stored.

        The target is a draw of its own, and so are the masks of the values that learn.
        """
        if self.stored <= self.settings.learning_starts:
            return
        size = self.settings.batch_size
        rows = self.memory.index_select(0, (self.offsets + self._indices(size)).flatten()).view(len(self), size, -1)
        states, after, action, reward = rows.split([N_INPUTS, N_INPUTS, 1, 1], -1)
        future = self.values(after, self.masks(size))[0].amax(-1, keepdim=True)
        masks = self.masks(size)
        values, inputs = self.values(states, masks)
        action = action.long()
        error = values.gather(-1, action) - reward - self.settings.discount * future
        upstream = torch.zeros_like(values).scatter_(-1, action, error)
        self._descend(upstream, inputs, scale=1.0 if masks is None else 1 / (1 - self.settings.drop_prob))

    def _descend(self, upstream: Tensor, inputs: list[Tensor], *, scale: float) -> None:
        """Back-propagation written out: `upstream` is the gradient of the summed loss in the action values."""
        rate = self.settings.learning_rate / self.settings.batch_size
        shrink = 1 - rate * self.settings.weight_decay
        for layer in (2, 1, 0):
            below = None
            if layer:
                below = products(upstream, self.weights[layer].mT)
                # Where a unit is dropped or inactive its input is 0; elsewhere the mask is `scale`.
                below = torch.ops.aten.threshold_backward(below, inputs[layer], 0).mul_(scale)
            self.weights[layer].mul_(shrink).sub_(products(inputs[layer].mT, upstream), alpha=rate)
            self.biases[layer].sub_(upstream.sum(1, keepdim=True), alpha=rate)
            if below is not None:
                upstream = below


def tick(worlds: Worlds, agents: Agents) -> Tensor:
    """One step of every agent in its world: see, choose, move and eat, learn; returns the rewards."""
    view = worlds.view()
    states = view.inputs()
    actions = agents.choose(states)
    rewards = worlds.act(actions, view)
    agents.remember(states, actions.float(), rewards)
    agents.learn()
    return rewards


def simulate(
    policy: Policy, settings: Settings, *, device: torch.device | str = "cpu", checkpoint: pathlib.Path | None = None
) -> Array:
    """The mean rewards of every block of steps of one stack, `[agent, block]`; with `checkpoint`, it can be resumed."""
    worlds = Worlds(settings.stack, seed=settings.seed, openness_factor=settings.openness_factor, device=device)
    agents = Agents(settings.stack, policy, settings, seed=settings.seed, device=device)
    n_blocks = settings.n_steps // BLOCK
    stamp = repr((policy, settings))
    curve = _resume(worlds, agents, checkpoint, stamp)
    for block in range(len(curve), n_blocks):
        total = torch.zeros(len(worlds), device=worlds.device)
        for _ in range(BLOCK):
            total += tick(worlds, agents)
        curve.append(total.cpu() / BLOCK)
        if checkpoint is not None and (block + 1) % max(1, n_blocks // 20) == 0:
            _save(worlds, agents, checkpoint, stamp, curve)
    return torch.stack(curve, 1).numpy()


def _save(worlds: Worlds, agents: Agents, path: pathlib.Path, stamp: str, curve: list[Tensor]) -> None:
    state = {}
    for name, owner in (("worlds", worlds), ("agents", agents)):
        values = {k: v for k, v in vars(owner).items() if isinstance(v, (Tensor, int, list, tuple)) or v is None}
        state[name] = {**values, "source": owner.source.get_state()}
    with files.replacement(path) as file:
        torch.save({"stamp": stamp, "curve": curve, **state}, file)


def _resume(worlds: Worlds, agents: Agents, path: pathlib.Path | None, stamp: str) -> list[Tensor]:
    """Restores an interrupted run of the same kind; returns the blocks it had done."""
    if path is None or not path.exists():
        return []
    saved = torch.load(path, map_location=worlds.device, weights_only=True)
    if saved["stamp"] != stamp:
        return []
    for name, owner in (("worlds", worlds), ("agents", agents)):
        owner.source.set_state(saved[name].pop("source").cpu())
        vars(owner).update(saved[name])
    return list(saved["curve"])


def _start_worker() -> None:
    torch.set_num_threads(1)  # there are as many workers as cores
    end_with_parent()


def _stage(policy: Policy, stack: int, settings: Settings, record: Record) -> Array:
    """The rewards of one stack, computed in a process of its own unless a run before left them."""
    name = f"{policy}-{stack}"
    one = replace(settings, seed=settings.seed + stack)

    def compute() -> Arrays:
        rewards = simulate(policy, one, checkpoint=record.checkpoint(name))
        record.checkpoint(name).unlink(missing_ok=True)  # it holds the whole replay
        return {"rewards": rewards}

    return record.stage(name, compute)["rewards"]


def _in_processes(jobs: list[tuple[Policy, int]], settings: Settings, record: Record) -> dict[Any, Array]:
    n_workers = min(os.cpu_count() or 1, len(jobs))
    spawn = multiprocessing.get_context("spawn")
    with (
        concurrent.futures.ProcessPoolExecutor(n_workers, mp_context=spawn, initializer=_start_worker) as pool,
        ProgressBar("agents", len(jobs), unit="stacks") as progress,
    ):
        futures = {pool.submit(_stage, *job, settings, record): job for job in jobs}
        rewards = {}
        for future in concurrent.futures.as_completed(futures):
            rewards[futures[future]] = future.result()
            progress.advance()
    return rewards


def run(settings: Settings, record: Record, *, device: torch.device) -> Findings:
    """Simulates and trains both kinds of agents; see the module's docstring."""
    del device
    if settings.n_agents % settings.stack:
        raise ValueError(f"`n_agents` must be a multiple of `stack`; got {settings.n_agents} and {settings.stack}.")
    n_stacks = settings.n_agents // settings.stack
    jobs = [(policy, stack) for stack in range(n_stacks) for policy in NAMES]
    if record.saved_only:
        rewards = {job: _stage(*job, settings, record) for job in jobs}
    else:
        rewards = _in_processes(jobs, settings, record)
    curves = {p: np.concatenate([rewards[p, stack] for stack in range(n_stacks)]) for p in NAMES}
    return _findings(settings, curves)


def running_mean(rewards: Array) -> Array:
    """The mean over the last `WINDOW` blocks (fewer at the start), `[agent, block]`."""
    sums = np.cumsum(np.pad(rewards, ((0, 0), (1, 0))), 1)
    stop = np.arange(1, rewards.shape[1] + 1)
    start = np.maximum(stop - WINDOW, 0)
    return (sums[:, stop] - sums[:, start]) / (stop - start)


def passing_step(rewards: Array, settings: Settings) -> Array:
    """The step at which each agent's running mean first exceeds 1 after the random phase; not a number if never."""
    above = running_mean(rewards) > 1
    above[:, : settings.random_steps // BLOCK] = False
    first = (above.argmax(1) + 1.0) * BLOCK
    return np.where(above.any(1), first, np.nan)


def _findings(settings: Settings, curves: dict[Policy, Array]) -> Findings:
    metrics: dict[str, Any] = {}
    rows = []
    for policy, rewards in curves.items():
        smooth, passed = running_mean(rewards), passing_step(rewards, settings)
        mean_passes = passing_step(rewards.mean(0, keepdims=True), settings)[0]
        last = rewards[:, -WINDOW:].mean(1)
        metrics[policy] = {
            "final_reward": last.mean(),
            "final_reward_standard_error": last.std(ddof=1) / np.sqrt(len(last)),
            "step_mean_passes_1": mean_passes,
            "median_step_passes_1": np.nanmedian(passed) if np.isfinite(passed).any() else np.nan,
            "share_that_passed_1": np.isfinite(passed).mean(),
            "mean_curve": smooth.mean(0),
        }
        m = metrics[policy]
        rows.append(
            {
                "policy": NAMES[policy],
                "reward, last 1,000 steps": f"{m['final_reward']:.3f} ± {m['final_reward_standard_error']:.3f}",
                "step at which the mean passes 1": _step_text(mean_passes),
                "median over agents that passed": _step_text(m["median_step_passes_1"]),
                "agents that passed": f"{np.isfinite(passed).sum()} of {len(passed)}",
            }
        )
    burn_in = settings.random_steps
    sentences = [
        f"{settings.n_agents} agents of each kind, each in its own world, {settings.n_steps:,} steps, of which the "
        f"first {burn_in:,} are random.",
        *(
            f"{NAMES[policy]}: the mean reward of the agents' last 1,000 steps "
            + (
                f"first exceeds 1 after {(m['step_mean_passes_1'] - burn_in) / BLOCK:.0f} blocks of {BLOCK} steps"
                if np.isfinite(m["step_mean_passes_1"])
                else f"does not exceed 1 within {(settings.n_steps - burn_in) / BLOCK:.0f} blocks of {BLOCK} steps"
            )
            + " beyond the random phase."
            for policy, m in ((policy, metrics[policy]) for policy in curves)
        ),
        "(The paper, one agent each: 25 blocks for Thompson sampling, 175 for ε-greedy.)",
    ]
    return Findings(
        title="Reinforcement learning: Thompson sampling against ε-greedy",
        sentences=sentences,
        metrics=metrics,
        tables={"Rewards": markdown_table(rows)},
        figures={"reinforcement": lambda: _figure(settings, curves)},
    )


def _step_text(step: float) -> str:
    return f"{step:,.0f}" if np.isfinite(step) else "not passed"


def _figure(settings: Settings, curves: dict[Policy, Array]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.6), layout="constrained")
    ax = figure.subplots()
    for (policy, rewards), colour in zip(curves.items(), ("#2b6cb0", "#c53030"), strict=True):
        smooth = running_mean(rewards)
        steps = np.arange(1, smooth.shape[1] + 1) * BLOCK
        mean, error = smooth.mean(0), smooth.std(0, ddof=1) / np.sqrt(len(smooth))
        ax.fill_between(steps, mean - 1.96 * error, mean + 1.96 * error, color=colour, alpha=0.2, lw=0)
        ax.plot(steps, mean, color=colour, label=f"{NAMES[policy]}: mean of {len(smooth)} agents, 95 % interval")
    ax.axvline(settings.random_steps, color="0.5", ls="--", lw=0.8)
    ax.text(settings.random_steps, ax.get_ylim()[1], " end of the random phase", color="0.4", va="top", fontsize=8)
    ax.axhline(1, color="0.7", lw=0.8, zorder=0)
    ax.set(xlabel="step", ylabel="reward, mean of the last 1,000 steps", xlim=(0, settings.n_steps))
    ax.legend(loc="lower right")
    return figure
