"""Training speed and memory: populations against one network after another, and the growth of `fit`.

    python -m benchmarks.training                 # CPU
    python -m benchmarks.training --device cuda

Prints a Markdown table and writes benchmarks/results/training_cpu.json or training_cuda.json.
Competitors are timed alternately in one process; a figure is a median.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

from benchmarks import history
from dropbayes.likelihoods import Gaussian
from dropbayes.population import Member, Task, randomness, train
from dropbayes.population.heads import HEADS
from dropbayes.population.program import Program
from dropbayes.population.standardisation import stacked_table
from dropbayes.runtime.devices import tensor_cores
from dropbayes.training import fit

CHUNK = randomness.STEPS_PER_CHUNK
RUN_EPOCHS = 100


def seconds(action: Callable[[], object], device: str) -> float:
    """The wall-clock time of one call, the device's queue emptied."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    action()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def interleaved(actions: dict[str, Callable[[], object]], repeats: int, device: str) -> dict[str, float]:
    """The median time of each action, run in turn."""
    for action in actions.values():
        action()
    times: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(repeats):
        for name, action in actions.items():
            times[name].append(seconds(action, device))
    return {name: statistics.median(values) for name, values in times.items()}


def small_network(n_features: int) -> nn.Sequential:
    """The network of the UCI experiments: dropout before both layers."""
    return nn.Sequential(nn.Dropout(0.05), nn.Linear(n_features, 50), nn.ReLU(), nn.Dropout(0.05), nn.Linear(50, 1))


def eager_epochs(x: torch.Tensor, y: torch.Tensor, n_networks: int, batch_size: int) -> None:
    """One epoch of each network, one network after another, as a user would write it."""
    for _ in range(n_networks):
        net = small_network(x.shape[1])
        optimizer = torch.optim.Adam(net.parameters())
        order = torch.randperm(len(x))
        for start in range(0, len(x), batch_size):
            chosen = order[start : start + batch_size]
            optimizer.zero_grad()
            loss = 0.5 * (net(x[chosen]) - y[chosen]).square().mean()
            loss.backward()
            optimizer.step()


def population_on_cpu(n_networks: int = 240, n_rows: int = 900, repeats: int = 5) -> list[dict[str, object]]:
    """240 networks 8-50-1, N = 900: one epoch of all."""
    x, y = torch.randn(n_rows, 8), torch.randn(n_rows, 1)
    part = 8  # of the sequential loop, scaled up: every network costs the same
    rows: list[dict[str, object]] = []
    for batch_size in (32, 128):
        members = [Member(epochs=1, seed=s) for s in range(n_networks)]

        def all_at_once(members: list[Member] = members, batch_size: int = batch_size) -> None:
            train([Task(x, y)], members, batch_size=batch_size, device="cpu")

        # A run of many epochs pays its preparation once: the marginal epoch is (5 epochs − 1 epoch) / 4.
        longer = [Member(epochs=5, seed=s) for s in range(n_networks)]
        times = interleaved(
            {
                "sequential": lambda batch_size=batch_size: eager_epochs(x, y, part, batch_size),
                "population": all_at_once,
                "five": lambda members=longer, batch_size=batch_size: train(
                    [Task(x, y)], members, batch_size=batch_size, device="cpu"
                ),
            },
            repeats,
            "cpu",
        )
        sequential, epoch = times["sequential"] * n_networks / part, (times["five"] - times["population"]) / 4
        rows.append(
            {
                "case": f"{n_networks} networks 8-50-1, N={n_rows}, batch {batch_size}, an epoch of all",
                "one after another (s)": sequential,
                "population (s)": epoch,
                "ratio": sequential / epoch,
                "ratio with preparation": sequential / times["population"],
            }
        )
    return rows


def graphed_step(x: torch.Tensor, y: torch.Tensor) -> Callable[[], object]:
    """One step of one network as a CUDA graph: the best that one network after another can do."""
    net = small_network(x.shape[1]).cuda()
    optimizer = torch.optim.Adam(net.parameters(), fused=True, capturable=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        loss = 0.5 * (net(x) - y).square().mean()
        loss.backward()
        optimizer.step()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def population_on_cuda(batch_size: int = 128, n_rows: int = 900) -> list[dict[str, object]]:
    """Networks 13-50-1 at batch 128: microseconds per network-step, and against CUDA graphs one after another."""
    x, y = torch.randn(n_rows, 13), torch.randn(n_rows, 1)
    replay = graphed_step(x[:batch_size].cuda(), y[:batch_size].cuda())

    def alone() -> None:
        for _ in range(1000):
            replay()

    one = interleaved({"alone": alone}, 5, "cuda")["alone"] / 1000
    rows: list[dict[str, object]] = [
        {
            "case": "1 network 13-50-1, CUDA graph, fused Adam",
            "step (us)": one * 1e6,
            "per network-step (us)": one * 1e6,
        }
    ]
    for n_networks in (1, 240, 2400):
        members = [Member(epochs=1, seed=s) for s in range(n_networks)]
        table = stacked_table([Task(x, y)], HEADS["gaussian"], torch.float32, start=None, n_classes=None)
        head, cuda = HEADS["gaussian"], torch.device("cuda")
        program = Program(table, members, (50,), head, "relu", batch_size, "constant", False, cuda, torch.float32)
        with tensor_cores(cuda):

            def steps(program: Program = program) -> None:
                for number in range(8):
                    program.run(number * CHUNK, (number + 1) * CHUNK)

            step = interleaved({"steps": steps}, 5, "cuda")["steps"] / (8 * CHUNK)
        whole = seconds(
            lambda n=n_networks: train(
                [Task(x, y)],
                [Member(epochs=RUN_EPOCHS, seed=s) for s in range(n)],
                batch_size=batch_size,
                device="cuda",
            ),
            "cuda",
        )
        n_steps = RUN_EPOCHS * randomness.steps_per_epoch(n_rows, batch_size)
        rows.append(
            {
                "case": f"population of {n_networks} networks 13-50-1, batch {batch_size}",
                "step (us)": step * 1e6,
                "per network-step (us)": step * 1e6 / n_networks,
                "ratio to one after another with CUDA graphs": one * n_networks / step,
                f"whole run of {RUN_EPOCHS} epochs with preparation (s)": whole,
                "ratio of the whole run": one * n_networks * n_steps / whole,
            }
        )
    return rows


def single_on_cuda() -> list[dict[str, object]]:
    """`fit` of the CO2 network (five layers of 1024, all 272 rows at each step), whose steps are one CUDA graph."""
    x, y = torch.randn(272, 1), torch.randn(272, 1)

    def run(epochs: int) -> None:
        widths = [1, 1024, 1024, 1024, 1024, 1024]
        layers: list[nn.Module] = []
        for n_in, n_out in itertools.pairwise(widths):
            layers += [nn.Linear(n_in, n_out), nn.ReLU(), nn.Dropout(0.1)]
        net = nn.Sequential(*layers, nn.Linear(1024, 1))
        fit(net, x, y, likelihood=Gaussian(precision=10.0), epochs=epochs, batch_size=272, device="cuda")

    times = interleaved({str(epochs): lambda epochs=epochs: run(epochs) for epochs in (100, 400)}, 3, "cuda")
    return [{"case": "fit of 1-1024x5-1, 272 rows", "step (us)": (times["400"] - times["100"]) / 300 * 1e6}]


GROWTH = """
import json, resource, sys, time
import numpy as np
n_rows, n_features, epochs = map(int, sys.argv[1:])
from dropbayes.estimators import DropoutRegressor
source = np.random.default_rng(0)
x = source.normal(size=(n_rows, n_features))
y = np.sin(x[:, 0]) + x[:, 1] * x[:, 2] + 0.1 * source.normal(size=n_rows)
start = time.perf_counter()
model = DropoutRegressor(drop_prob=0.005, weight_decay=1e-6, n_steps=1, min_epochs=epochs, n_networks=1, batch_size=256,
                         n_folds=1, random_state=0, device="cpu").fit(x, y)
seconds = time.perf_counter() - start
print(json.dumps({"rows": n_rows, "features": n_features, "epochs": epochs, "fit (s)": seconds,
                  "peak memory (GB)": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
                  "R2 on its rows": float(model.score(x[:10000], y[:10000]))}))
"""


def growth() -> list[dict[str, object]]:
    """Time and peak memory of `DropoutRegressor.fit` (no candidates, one network) in processes of their own."""
    cases = [(50_000, 20, 2), (100_000, 20, 2), (200_000, 20, 2), (200_000, 20, 4), (1_000_000, 20, 1)]
    rows = []
    for case in cases:
        done = subprocess.run(
            [sys.executable, "-c", GROWTH, *map(str, case)], capture_output=True, text=True, check=True
        )
        rows.append({"case": "DropoutRegressor.fit", **json.loads(done.stdout)})
    return rows


def table_of(rows: list[dict[str, object]]) -> str:
    """The rows as one Markdown table."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    shown = [
        [f"{row[c]:.4g}" if isinstance(row.get(c), float) else str(row.get(c, "")) for c in columns] for row in rows
    ]
    return "\n".join("| " + " | ".join(line) + " |" for line in [columns, ["---"] * len(columns), *shown])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    if arguments.device == "cuda":
        sections = {"population": population_on_cuda(), "one network": single_on_cuda()}
        hardware = torch.cuda.get_device_name()
    else:
        sections = {"population": population_on_cpu(repeats=arguments.repeats), "growth": growth()}
        hardware = f"{platform.machine()}, {torch.get_num_threads()} threads"
    history.write(f"training_{arguments.device}", sections)
    for name, rows in sections.items():
        print(f"\n### {name} ({hardware}, torch {torch.__version__})\n\n{table_of(rows)}")


if __name__ == "__main__":
    main()
