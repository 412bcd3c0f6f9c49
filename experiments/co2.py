r"""Extrapolation: atmospheric CO2 beyond the observed years [GG16, section "Regression Tasks -- Extrapolation"].

Four networks with dropout, one of them also with averaged weights, and a Gaussian process predict 13 held-out
years. The figure should show: averaged weights are certain of a wrong answer, the deviation of ReLU draws grows with
the distance from the data, that of TanH draws stays bounded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from experiments import bands, datasets, descent
from experiments.descent import Network
from experiments.record import Array, Arrays, Findings, Record, markdown_table

LEAST_EXPLAINED = 0.9
"""The fraction of the observed variance below which a network has not learned the yearly cycle."""
QUERY_END = 3.7237
"""The last of the paper's query points, in units of the standardised month."""

# Base rate, decay and policy of each network: the authors' files (relu-5 also [GG16, "Detailed Experiment Set-up"]).
# "5 layers" counts weight layers: four hidden ones.
PAPER = {
    "relu-5": Network(4, 1024, "relu", 0.1, learning_rate=1e-2, weight_decay=1e-6),
    "relu-4": Network(3, 1024, "relu", 0.1, learning_rate=1e-2, weight_decay=1e-6, gamma=1e-5, power=0.1),
    "tanh-0.1": Network(4, 1024, "tanh", 0.1, learning_rate=5e-3, weight_decay=5e-7),
    "tanh-0.2": Network(4, 1024, "tanh", 0.2, learning_rate=1e-2, weight_decay=0.0),
}
NAMES = {
    "relu-5": "ReLU, 5 layers",
    "relu-4": "ReLU, 4 layers",
    "tanh-0.1": "TanH, dropout 0.1",
    "tanh-0.2": "TanH, dropout 0.2",
}


@dataclass(frozen=True)
class Settings:
    """Values from the paper unless noted.

    Attributes:
        networks: The names of the networks to train, keys of `PAPER`.
        width: The number of units in each hidden layer.
        n_steps: The number of descent steps, each on all rows.
        rate_factor: The factor on the base learning rates; narrower networks tolerate more than 1.
        n_draws: The number of draws of each prediction.
        precision: The noise precision that the text states for its weight decay.
        n_grid: The number of points on the figure's axis.
        seed: The seed of weights and masks.
    """

    networks: tuple[str, ...] = tuple(PAPER)
    width: int = 1024
    n_steps: int = 1_000_000
    rate_factor: float = 1.0
    n_draws: int = 1000
    precision: float = 1e5
    n_grid: int = 1500
    seed: int = 0

    @classmethod
    def quick(cls) -> Settings:
        """Narrow networks and few, larger steps: too few for the yearly cycle, enough for what lies beyond the data."""
        return cls(width=64, n_steps=6000, rate_factor=5.0, n_grid=600)

    @classmethod
    def tiny(cls) -> Settings:
        """For tests."""
        return cls(networks=("relu-5", "tanh-0.1"), width=32, n_steps=800, rate_factor=5.0, n_draws=100, n_grid=60)

    def network(self, name: str) -> Network:
        """The network of this name at these settings' size."""
        paper = PAPER[name]
        return replace(paper, width=self.width, learning_rate=paper.learning_rate * self.rate_factor)


def run(settings: Settings, record: Record, *, device: torch.device) -> Findings:
    """Trains, predicts and scores; see the module's docstring."""
    data = datasets.atmospheric_co2()
    grid = torch.linspace(float(data.x.min()), QUERY_END, settings.n_grid)[:, None]
    positions = {"grid": grid, "seen": data.x, "hidden": data.x_hidden}
    results = {
        name: descent.network_stage(name, settings.network(name), data, positions, settings, record, device=device)
        for name in settings.networks
    }
    process = bands.process_stage(data, positions, record)
    return _findings(settings, data, results, process, grid[:, 0].numpy())


def _scores(settings: Settings, data: datasets.Series, arrays: Arrays, *, averaged: bool = False) -> dict[str, Any]:
    """Scores on the years that followed, with the text's precision and with the one the observed years suggest."""
    kind = "averaged" if averaged else "mean"
    y_seen, y_hidden = data.y[:, 0].numpy(), data.y_hidden[:, 0].numpy()
    seen, hidden = arrays[f"seen_{kind}"], arrays[f"hidden_{kind}"]
    std = np.zeros_like(hidden) if averaged else arrays["hidden_std"]
    fit_error = float(np.sqrt(np.mean((seen - y_seen) ** 2)))
    precision = float(arrays["precision"]) if "precision" in arrays else fit_error**-2
    third = len(hidden) // 3
    return {
        "rmse_observed": fit_error,
        **bands.gaussian_scores(hidden, std, y_hidden, precision=precision),
        "log_likelihood_paper_precision": bands.gaussian_scores(
            hidden, std, y_hidden, precision=settings.precision
        )["log_likelihood"],
        "epistemic_std_observed": 0.0 if averaged else float(arrays["seen_std"].mean()),
        "epistemic_std_first_third": 0.0 if averaged else float(std[:third].mean()),
        "epistemic_std_last_third": 0.0 if averaged else float(std[-third:].mean()),
    }  # fmt: skip


def _findings(
    settings: Settings, data: datasets.Series, results: dict[str, Arrays], process: Arrays, grid: Array
) -> Findings:
    metrics: dict[str, Any] = {name: _scores(settings, data, arrays) for name, arrays in results.items()}
    for name, arrays in results.items():
        metrics[name]["training_seconds"] = float(arrays["seconds"])
        metrics[name]["microseconds_per_step"] = float(arrays["seconds"]) / settings.n_steps * 1e6
    first = next(iter(results))
    metrics["averaged weights"] = _scores(settings, data, results[first], averaged=True)
    metrics["process"] = _scores(settings, data, process)
    sentences = [
        f"Data: {data.source}; {len(data.y)} months observed, {len(data.y_hidden)} months after them to forecast, in "
        "units of the residual's deviation (2.13 ppm). Deviations are over draws of the network, without noise; the "
        "log-likelihood and coverage add the noise each model shows on the observed months.",
        _growth_sentence(metrics),
        *_underfit_sentences(metrics),
    ]
    return Findings(
        title="Extrapolation: CO2 at Mauna Loa",
        sentences=sentences,
        metrics=metrics,
        tables={"The years that followed": _table(metrics)},
        figures={"co2": lambda: _figure(data, results, process, grid)},
    )


def _table(metrics: dict[str, Any]) -> str:
    first = next(iter(metrics))
    rows = [
        {
            "model": {**NAMES, "process": "GP, squared exponential"}.get(name, f"{NAMES[first]}, averaged weights"),
            "RMSE observed": scores["rmse_observed"],
            "RMSE after": scores["rmse"],
            "log-likelihood after": scores["log_likelihood"],
            "95 % coverage": scores["coverage_95"],
            "deviation observed": scores["epistemic_std_observed"],
            "... first years after": scores["epistemic_std_first_third"],
            "... last years after": scores["epistemic_std_last_third"],
            "training (s)": f"{scores['training_seconds']:.0f}" if "training_seconds" in scores else "",
        }
        for name, scores in metrics.items()
    ]
    return markdown_table(rows)


def _growth_sentence(metrics: dict[str, Any]) -> str:
    growth = {
        NAMES[name]: scores["epistemic_std_last_third"] / scores["epistemic_std_observed"]
        for name, scores in metrics.items()
        if name in NAMES
    }
    listed = ", ".join(f"{factor:.1f} times ({name})" for name, factor in growth.items())
    return f"From the observed months to the last third of the years after, the deviation of the draws grows {listed}."


def _underfit_sentences(metrics: dict[str, Any]) -> list[str]:
    """What a network too small or trained too briefly has not learned: the series has a deviation of 1."""
    explained = {NAMES[name]: 1 - m["rmse_observed"] ** 2 for name, m in metrics.items() if name in NAMES}
    short = [f"{100 * share:.0f} % ({name})" for name, share in explained.items() if share < LEAST_EXPLAINED]
    if not short:
        return []
    return [
        "Too few steps to learn the yearly cycle: of the variance of the observed months the networks explain "
        f"{', '.join(short)}. The paper's size (without --quick) explains 94 % and more; --figures-only draws a run of "
        "that size, whose arrays are kept."
    ]


def _figure(data: datasets.Series, results: dict[str, Arrays], process: Arrays, grid: Array) -> Any:
    from matplotlib.figure import Figure

    first = next(iter(results))
    panels: list[tuple[str, Array, Array | None]] = [
        (f"Standard dropout: {NAMES[first]}, averaged weights", results[first]["grid_averaged"], None),
        ("Gaussian process, squared exponential", process["grid_mean"], process["grid_std"]),
    ]
    panels += [(f"MC dropout: {NAMES[name]}", a["grid_mean"], a["grid_std"]) for name, a in results.items()]
    rows = (len(panels) + 1) // 2
    figure = Figure(figsize=(10, 2.3 * rows), layout="constrained")
    axes = figure.subplots(rows, 2, sharex=True, sharey=True).flat
    end = float(data.x.max())
    for ax, (title, mean, std) in zip(axes, panels, strict=False):
        bands.draw_band(ax, grid, mean, std)
        ax.plot(data.x[:, 0], data.y[:, 0], color=bands.OBSERVED, lw=0.8, label="observed")
        ax.plot(data.x_hidden[:, 0], data.y_hidden[:, 0], color=bands.HIDDEN, lw=0.8, label="what followed")
        ax.axvline(end, color="0.4", lw=0.8, ls="--")
        ax.set(title=title, xlim=(grid[0], grid[-1]), ylim=(-5, 9))
    for ax in list(axes)[len(panels) :]:
        ax.set_visible(False)
    figure.axes[0].legend(loc="upper left")
    figure.supxlabel("month, standardised", fontsize=9)
    figure.supylabel("CO$_2$ less its linear trend, in deviations", fontsize=9)
    return figure
