"""Throughput of the reinforcement learning experiment: many agents in their worlds together against one at a time.

    python -m benchmarks.reinforcement

One at a time: an agent of each kind in its own world, one after another. Together: half Thompson sampling, half
ε-greedy, the two halves in a thread each. The two are timed alternately in one process; a figure is a median. Prints a
Markdown table and writes benchmarks/results/reinforcement.json.
"""

from __future__ import annotations

import concurrent.futures
import os
import statistics
import time
from collections.abc import Callable

import torch

from benchmarks import history
from experiments.foraging import Worlds
from experiments.reinforcement import NAMES, Agents, Settings, tick

AGENTS = (40, 200, 400)
REPEATS = 9
TICKS_ALONE, TICKS_TOGETHER = 40, 8
# Learning from the start, and a replay as large as the experiment's: its look-ups are part of the cost.
SETTINGS = Settings(learning_starts=100, random_steps=100)


def living(n_agents: int) -> list[tuple[Worlds, Agents]]:
    """`n_agents` of each kind, past the steps in which they do not learn."""
    pairs = [(Worlds(n_agents), Agents(n_agents, policy, SETTINGS)) for policy in NAMES]
    for pair in pairs:
        ticks(pair, 110)
        pair[1].stored = SETTINGS.replay  # as late in the experiment
    return pairs


def ticks(pair: tuple[Worlds, Agents], n: int) -> None:
    for _ in range(n):
        tick(*pair)


def seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def together(pairs: list[tuple[Worlds, Agents]], pool: concurrent.futures.Executor) -> None:
    list(pool.map(lambda pair: ticks(pair, TICKS_TOGETHER), pairs))


def alone(pairs: list[tuple[Worlds, Agents]]) -> None:
    for pair in pairs:
        ticks(pair, TICKS_ALONE)


def main() -> None:
    torch.set_num_threads(1)  # the threads are ours
    one = living(1)
    many = {n: living(n // 2) for n in AGENTS}
    times: dict[int, list[float]] = {n: [] for n in (1, *AGENTS)}
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for _ in range(REPEATS):
            times[1].append(seconds(lambda: alone(one)) / (2 * TICKS_ALONE))
            for n, pairs in many.items():
                times[n].append(seconds(lambda pairs=pairs: together(pairs, pool)) / (TICKS_TOGETHER * n))
    median = {n: statistics.median(values) for n, values in times.items()}
    rows = {n: {"agent_steps_per_second": 1 / t, "times_one_at_a_time": median[1] / t} for n, t in median.items()}
    print("| agents together | agent-steps a second | times one at a time |\n|---|---|---|")
    for n, row in rows.items():
        print(f"| {n} | {row['agent_steps_per_second']:,.0f} | {row['times_one_at_a_time']:.1f} |")
    history.write("reinforcement", {"cores": os.cpu_count(), "rows": rows})


if __name__ == "__main__":
    main()
