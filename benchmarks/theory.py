"""The numbers of `docs/theory.md`: what the theory costs, where proposition 1 is good, what the bound chooses.

`python -m benchmarks.theory` prints Markdown tables and writes `benchmarks/results/theory.json`; `costs`, `overlap` or
`choice` as an argument does one of them. Costs are ratios of two times taken alternately in one process, the median of
many.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks import history
from dropbayes.layers import Bernoulli, BernoulliNoise, Concrete, Linear, Mixture, Prior, multiplicative_gaussian
from dropbayes.layers.recurrent import LSTM
from dropbayes.likelihoods import Gaussian, predictive_log_density
from dropbayes.training.objective import negative_elbo

ROWS, UNITS = 256, 1024


def ratio(candidate: Callable[[], object], reference: Callable[[], object], *, repeats: int = 41) -> dict[str, float]:
    """The median of time(candidate) / time(reference) over interleaved pairs, with its quartiles."""
    times: dict[bool, list[float]] = {True: [], False: []}
    for repeat in range(repeats + 3):
        for is_candidate in (True, False) if repeat % 2 else (False, True):  # neither always goes first
            start = time.perf_counter()
            (candidate if is_candidate else reference)()
            if repeat >= 3:  # the first calls warm caches up
                times[is_candidate].append(1e3 * (time.perf_counter() - start))
    ratios = [a / b for a, b in zip(times[True], times[False], strict=True)]
    low, middle_ratio, high = statistics.quantiles(ratios, n=4)
    return {
        "ratio": middle_ratio,
        "lower_quartile": low,
        "upper_quartile": high,
        "candidate_ms": statistics.median(times[True]),
        "reference_ms": statistics.median(times[False]),
    }


def families() -> dict[str, object]:
    kept = torch.randn(UNITS, UNITS)
    locs = torch.stack([kept, 0.1 * kept, torch.zeros_like(kept)])
    return {
        "Bernoulli, σ = 0": Bernoulli(kept, 0.9),
        "Bernoulli, σ = 0.1": Bernoulli(kept, 0.9, std=0.1),
        "N(1, σ²) on weights": multiplicative_gaussian(kept, 0.3),
        "Concrete": Concrete(kept, torch.tensor(-2.0)),
        "mixture of 3": Mixture(torch.full((3,), 1 / 3), locs, torch.full((1, 1, 1), 0.1)),
        "mixture of 3, rank 2": Mixture(
            torch.full((3,), 1 / 3), locs, torch.full((1, 1, 1), 0.1), 0.1 * torch.randn(3, UNITS, UNITS, 2)
        ),
    }


def sampling_costs() -> dict[str, dict[str, float]]:
    """Drawing a 1024 x 1024 matrix against the product of 256 rows with it."""
    x, weight = torch.randn(ROWS, UNITS), torch.randn(UNITS, UNITS)
    costs = {}
    with torch.no_grad():
        for name, q in families().items():
            costs[f"draw W, {name} / x W"] = ratio(q.sample, lambda: x @ weight)  # type: ignore[attr-defined]
        for name, q in families().items():
            product = lambda q=q: q.product(x)  # noqa: E731
            costs[f"x W with a W per row, {name} / x W"] = ratio(product, lambda: x @ weight)
    return costs


def training_step(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Callable[[], None]:
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        (net(x) - y).square().mean().backward()
        optimizer.step()

    return step


def training_costs() -> dict[str, dict[str, float]]:
    """A training step with layers that draw against the same step written with torch's own modules."""
    x, y = torch.randn(ROWS, UNITS), torch.randn(ROWS, 1)
    noise = BernoulliNoise(0.1)
    ours = nn.Sequential(Linear(UNITS, UNITS, noise=noise), nn.ReLU(), Linear(UNITS, 1, noise=noise))
    theirs = nn.Sequential(nn.Dropout(0.1), nn.Linear(UNITS, UNITS), nn.ReLU(), nn.Dropout(0.1), nn.Linear(UNITS, 1))
    small_x = torch.randn(ROWS, 8)
    small = nn.Sequential(Linear(8, 50, noise=noise), nn.ReLU(), Linear(50, 1, noise=noise))
    plain = nn.Sequential(nn.Dropout(0.1), nn.Linear(8, 50), nn.ReLU(), nn.Dropout(0.1), nn.Linear(50, 1))
    sequences = torch.randn(32, 35, 128)

    def elbo_step(net: nn.Module, x: torch.Tensor) -> Callable[[], None]:
        def step() -> None:
            net.zero_grad()
            loss = negative_elbo(net, net(x), y, likelihood=Gaussian(1.0), prior=Prior(), n_data=1000)
            loss.backward()

        return step

    def loss_step(net: nn.Module, x: torch.Tensor) -> Callable[[], None]:
        def step() -> None:
            net.zero_grad()
            (net(x) - y).square().mean().backward()

        return step

    def recurrent_step(net: nn.Module) -> Callable[[], None]:
        def step() -> None:
            net.zero_grad()
            net(sequences)[0].square().mean().backward()

        return step

    return {
        "training step, layers.Linear / nn.Dropout + nn.Linear (1024)": ratio(
            training_step(ours, x, y), training_step(theirs, x, y)
        ),
        "training step, layers.Linear / nn.Dropout + nn.Linear (8-50-1)": ratio(
            training_step(small, small_x, y), training_step(plain, small_x, y), repeats=401
        ),
        "gradient of negative_elbo / of the squared error alone (1024)": ratio(
            elbo_step(theirs, x), loss_step(theirs, x)
        ),
        "gradient of negative_elbo / of the squared error alone (8-50-1)": ratio(
            elbo_step(plain, small_x), loss_step(plain, small_x), repeats=401
        ),
        "training step, recurrent.LSTM / nn.LSTM without dropout (128, 35 steps, 32 rows)": ratio(
            recurrent_step(LSTM(128, 128, batch_first=True)), recurrent_step(nn.LSTM(128, 128, batch_first=True))
        ),
    }


# --- where proposition 1 is good -------------------------------------------------------------------------------------


def overlap(distance: np.ndarray, keep_prob: float) -> np.ndarray:
    """H(z | w) of two Gaussians this many deviations apart, as a share of H(z); exact in the tails too."""
    z, step = np.linspace(-45.0, 45.0, 9001, retstep=True)
    density = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi) * step
    logit = math.log(keep_prob / (1 - keep_prob))
    d = distance[:, None]
    if_kept = np.logaddexp(0, -(logit + d**2 / 2 + d * z)) @ density
    if_dropped = np.logaddexp(0, logit - d**2 / 2 + d * z) @ density
    entropy = -(keep_prob * math.log(keep_prob) + (1 - keep_prob) * math.log(1 - keep_prob))
    return (keep_prob * if_kept + (1 - keep_prob) * if_dropped) / entropy


def overlaps(keep_prob: float = 0.9) -> dict[str, dict[str, float]]:
    """The expected share for m ~ N(0, I_K), an integral over the chi distribution of its length."""
    distance, step = np.linspace(1e-9, 70.0, 4001, retstep=True)
    share = overlap(distance, keep_prob)
    table: dict[str, dict[str, float]] = {}
    for std in (0.05, 0.1, 0.2, 0.5, 1.0):
        radius = std * distance
        table[str(std)] = {}
        for columns in (1, 4, 16, 64, 256):
            log_chi = (1 - columns / 2) * math.log(2) - math.lgamma(columns / 2) - radius**2 / 2
            density = np.exp(log_chi + (columns - 1) * np.log(radius)) * std * step
            density[0] /= 2
            table[str(std)][str(columns)] = float(share @ density)
    return table


# --- choosing by the bound -------------------------------------------------------------------------------------------


def curve(n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 1, generator=generator) * 4 - 2
    return x, torch.sin(2 * x) + 0.3 * x + 0.2 * torch.randn(n, 1, generator=generator)


def trained(drop_prob: float, length_scale: float, width: int) -> tuple[float, float]:
    """The bound per row and the held-out log-likelihood per row of one network; τ and σ are learned."""
    x, y = curve(60, 0)
    torch.manual_seed(0)
    noise = BernoulliNoise(drop_prob, std=0.05, learn_std=True)
    net = nn.Sequential(Linear(1, width, noise=noise), nn.ReLU(), Linear(width, 1, noise=noise))
    log_tau = nn.Parameter(torch.tensor(1.0))
    prior = Prior(length_scale=length_scale, bias_length_scale=1.0, hidden_length_scale="fan_in")
    optimizer = torch.optim.Adam([*net.parameters(), log_tau], lr=0.02)

    def loss(n_draws: int) -> torch.Tensor:
        output = net(x.repeat(n_draws, 1)).unflatten(0, (n_draws, -1))
        likelihood = Gaussian(log_tau.exp())
        return negative_elbo(net, output, y, likelihood=likelihood, prior=prior, n_data=len(x))

    for _ in range(600):
        optimizer.zero_grad()
        loss(4).backward()
        optimizer.step()
    new_x, new_y = curve(1000, 1)
    with torch.no_grad():
        bound = -loss(400).item()
        sampled = net(new_x.repeat(200, 1)).unflatten(0, (200, -1))
        held_out = predictive_log_density(Gaussian(log_tau.exp()), sampled, new_y).mean().item()
    return bound, held_out


def choices() -> list[dict[str, float]]:
    rows = []
    for drop_prob, length_scale, width in itertools.product((0.01, 0.05, 0.2), (0.3, 1.0), (10, 40)):
        bound, held_out = trained(drop_prob, length_scale, width)
        rows.append(
            {"drop_prob": drop_prob, "length_scale": length_scale, "width": width, "bound": bound, "held_out": held_out}
        )
    return rows


# --- tables ----------------------------------------------------------------------------------------------------------


def print_costs(costs: dict[str, dict[str, float]]) -> None:
    print("| what | ratio | quartiles | ms | reference ms |\n|---|---|---|---|---|")
    for name, cost in costs.items():
        quartiles = f"{cost['lower_quartile']:.2f} to {cost['upper_quartile']:.2f}"
        print(
            f"| {name} | {cost['ratio']:.2f} | {quartiles} | {cost['candidate_ms']:.2f} | {cost['reference_ms']:.2f} |"
        )


def print_overlaps(table: dict[str, dict[str, float]]) -> None:
    print("\n| σ | K = 1 | 4 | 16 | 64 | 256 |\n|---|---|---|---|---|---|")
    for std, row in table.items():
        print(f"| {std} | {' | '.join(f'{value:.2g}' for value in row.values())} |")


def print_choices(rows: list[dict[str, float]]) -> None:
    print("\n| drop_prob | l | width | bound per row | held-out log-likelihood per row |\n|---|---|---|---|---|")
    for row in sorted(rows, key=lambda row: -row["bound"]):
        print("| {drop_prob:g} | {length_scale:g} | {width} | {bound:.3f} | {held_out:.3f} |".format(**row))
    ranks = [np.argsort(np.argsort([row[key] for row in rows])) for key in ("bound", "held_out")]
    print(f"\nRank correlation {np.corrcoef(*ranks)[0, 1]:.2f}; held-out rows of the bound's choice "
          f"{max(rows, key=lambda row: row['bound'])['held_out']:.3f}, of the best {max(row['held_out'] for row in rows):.3f}")  # fmt: skip


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    wanted = set(sys.argv[1:]) or {"costs", "overlap", "choice"}
    past = history.RESULTS / "theory.json"
    figures: dict[str, Any] = json.loads(past.read_text()) if past.exists() else {}
    figures.pop("about", None)
    if "costs" in wanted:
        figures["costs"] = sampling_costs() | training_costs()
        print_costs(figures["costs"])
    if "overlap" in wanted:
        figures["overlap"] = overlaps()
        print_overlaps(figures["overlap"])
    if "choice" in wanted:
        figures["choice"] = choices()
        print_choices(figures["choice"])
    history.write("theory", figures)


if __name__ == "__main__":
    main()
