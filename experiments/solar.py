r"""Interpolation: solar irradiance with five missing segments [GG16, section "Regression Tasks -- Interpolation"].

A Gaussian process and ReLU networks fill the gaps. The appendix has five hidden layers, the authors' files four, and
their learning rates and decays are ten times apart; both are run. The paper observes that both models interpolate the
data and that MC dropout is over-confident: the errors at the observed points, and the coverage and width of the
intervals in the gaps, say how far that is so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from experiments import bands, datasets, descent
from experiments.descent import Network
from experiments.record import Array, Arrays, Findings, Record, markdown_table

VARIANTS = {
    "appendix": Network(5, 1024, "relu", 0.1, learning_rate=5e-3, weight_decay=5e-7),
    "files": Network(4, 1024, "relu", 0.1, learning_rate=5e-2, weight_decay=5e-6),
}
"""The network of the appendix's text and that of the authors' released files."""
PROCESS = "Gaussian process, squared exponential"
INTERPOLATES = 2.0
"""A network interpolates if its error at the observed points is at most this many times the process's."""


@dataclass(frozen=True)
class Settings:
    """Values from the paper unless noted.

    Attributes:
        variants: The sources of the network and its rates, keys of `VARIANTS`: the appendix, the authors' files.
        width: The number of units in each hidden layer.
        n_steps: The number of descent steps, each on all rows.
        n_draws: The number of draws of each prediction.
        n_grid: The number of points on the figure's axis.
        seed: The seed of weights and masks.
    """

    variants: tuple[str, ...] = tuple(VARIANTS)
    width: int = 1024
    n_steps: int = 1_000_000
    n_draws: int = 1000
    n_grid: int = 1500
    seed: int = 0

    @classmethod
    def quick(cls) -> Settings:
        """Narrow networks and few steps."""
        return cls(width=64, n_steps=12_000, n_grid=750)

    @classmethod
    def tiny(cls) -> Settings:
        """For tests."""
        return cls(variants=("files",), width=32, n_steps=1500, n_draws=100, n_grid=60)


def run(settings: Settings, record: Record, *, device: torch.device) -> Findings:
    """Trains, predicts and scores; see the module's docstring."""
    data = datasets.solar_irradiance()
    grid = torch.linspace(float(data.x.min()), float(data.x.max()), settings.n_grid)[:, None]
    positions = {"grid": grid, "seen": data.x, "hidden": data.x_hidden}
    results = {PROCESS: bands.process_stage(data, positions, record)}
    for name in settings.variants:
        network = replace(VARIANTS[name], width=settings.width)
        results[f"MC dropout, {network.hidden_layers} hidden layers, rates of the {name}"] = descent.network_stage(
            name, network, data, positions, settings, record, device=device
        )
    return _findings(data, results, grid[:, 0].numpy())


def _scores(data: datasets.Series, arrays: Arrays) -> dict[str, Any]:
    """Scores in the gaps and outside them; the noise is what the model shows, or learned, on the observed points."""
    y_seen, y_hidden = data.y[:, 0].numpy(), data.y_hidden[:, 0].numpy()
    fit = float(np.mean((arrays["seen_mean"] - y_seen) ** 2))
    precision = float(arrays["precision"]) if "precision" in arrays else 1 / fit
    inside = bands.gaussian_scores(arrays["hidden_mean"], arrays["hidden_std"], y_hidden, precision=precision)
    outside = bands.gaussian_scores(arrays["seen_mean"], arrays["seen_std"], y_seen, precision=precision)
    model_alone = np.abs(arrays["hidden_mean"] - y_hidden) <= 1.96 * arrays["hidden_std"]
    return {
        "gaps": inside,
        "observed": outside,
        "epistemic_std_gaps": float(arrays["hidden_std"].mean()),
        "epistemic_std_observed": float(arrays["seen_std"].mean()),
        "coverage_95_without_noise_gaps": float(model_alone.mean()),
        "width_95_gaps": 2 * 1.96 * inside["mean_std"],
    }


def _findings(data: datasets.Series, results: dict[str, Arrays], grid: Array) -> Findings:
    metrics = {name: _scores(data, arrays) for name, arrays in results.items()}
    for name, arrays in results.items():
        if "seconds" in arrays:
            metrics[name]["training_seconds"] = float(arrays["seconds"])
    rows = [
        {
            "model": name,
            "RMSE observed": scores["observed"]["rmse"],
            "RMSE gaps": scores["gaps"]["rmse"],
            "log-likelihood gaps": scores["gaps"]["log_likelihood"],
            "95 % coverage observed": scores["observed"]["coverage_95"],
            "95 % coverage gaps": scores["gaps"]["coverage_95"],
            "95 % width gaps": scores["width_95_gaps"],
            "... model deviation alone": scores["coverage_95_without_noise_gaps"],
            "deviation observed": scores["epistemic_std_observed"],
            "deviation gaps": scores["epistemic_std_gaps"],
        }
        for name, scores in metrics.items()
    ]
    sentences = [
        f"Data: {data.source}; {len(data.y)} points observed, {len(data.y_hidden)} in the missing segments. "
        "An interval is ±1.96 deviations; the noise in it is what the model shows on the observed points (the process "
        "learns its own), except where the model's deviation stands alone.",
        *(
            f"{name}: the deviation in the gaps is {s['epistemic_std_gaps'] / s['epistemic_std_observed']:.2f} times "
            f"that at the observed points, and it alone covers {100 * s['coverage_95_without_noise_gaps']:.0f} % of "
            "the missing values."
            for name, s in metrics.items()
        ),
        *(_fit_sentence(name, s, metrics[PROCESS]) for name, s in metrics.items() if name != PROCESS),
    ]
    return Findings(
        title="Interpolation: solar irradiance",
        sentences=sentences,
        metrics=metrics,
        tables={"In and out of the missing segments": markdown_table(rows)},
        figures={"solar": lambda: _figure(data, results, grid)},
    )


def _fit_sentence(name: str, scores: dict[str, Any], process: dict[str, Any]) -> str:
    """Whether the paper's "both models interpolate the data well" holds for a network."""
    error, reference = scores["observed"]["rmse"], process["observed"]["rmse"]
    verdict = "interpolates the data" if error <= INTERPOLATES * reference else "under-fits"
    return (
        f"{name}: {verdict}, with an RMSE of {error:.3f} at the observed points, where the process has {reference:.3f}."
    )


def _segments(data: datasets.Series) -> list[tuple[Array, Array]]:
    """The missing segments, each as inputs and values."""
    x, y = data.x_hidden[:, 0].numpy(), data.y_hidden[:, 0].numpy()
    breaks = np.flatnonzero(np.diff(x) > 2 * np.diff(x).min()) + 1
    return list(zip(np.split(x, breaks), np.split(y, breaks), strict=True))


def _figure(data: datasets.Series, results: dict[str, Arrays], grid: Array) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 2.3 * len(results)), layout="constrained")
    axes = figure.subplots(len(results), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    segments = _segments(data)
    for ax, (name, arrays) in zip(axes, results.items(), strict=True):
        bands.draw_band(ax, grid, arrays["grid_mean"], arrays["grid_std"])
        ax.plot(data.x[:, 0], data.y[:, 0], ".", color=bands.OBSERVED, ms=2.5, label="observed")
        for number, (x, y) in enumerate(segments):
            ax.plot(x, y, ".-", color=bands.HIDDEN, lw=0.8, ms=2.5, label="missing" if number == 0 else None)
            for edge in (x[0], x[-1]):
                ax.axvline(edge, color="0.4", lw=0.7, ls="--")
        ax.set(title=name, xlim=(grid[0], grid[-1]))
    axes[0].legend(loc="upper center", ncols=3)
    axes[-1].set_xlabel("year, standardised")
    figure.supylabel("irradiance, standardised", fontsize=9)
    return figure
