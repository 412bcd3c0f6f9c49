"""Predictive means and deviations along one variable: from networks and from a Gaussian process, scored and drawn."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dropbayes.predictive import predict
from experiments.datasets import Series
from experiments.record import Array, Arrays, Record

__all__ = ["draw_band", "gaussian_scores", "network_bands", "process_bands", "process_stage"]

# Blue for predictions, red for observations and green for hidden values, as in the paper.
PREDICTED, OBSERVED, HIDDEN = "#2b6cb0", "#c53030", "#2f855a"


def network_bands(net: nn.Module, positions: dict[str, Tensor], *, n_draws: int, device: torch.device) -> Arrays:
    """Mean and epistemic deviation of the network's draws at each set of inputs, and the output of averaged weights."""
    net = net.to(device)
    arrays: Arrays = {}
    for name, x in positions.items():
        prediction = predict(net, x.to(device), n_draws=n_draws)
        with torch.no_grad():
            averaged = net.eval()(x.to(device))
        for kind, value in (
            ("mean", prediction.mean), ("std", prediction.epistemic.sqrt()), ("averaged", averaged),
        ):  # fmt: skip
            arrays[f"{name}_{kind}"] = value[:, 0].cpu().numpy()
    return arrays


def process_stage(data: Series, positions: dict[str, Tensor], record: Record) -> Arrays:
    """The bands of the Gaussian process, fast enough that `--figures-only` computes them too."""
    key = (len(positions["grid"]), data.source)
    compute = functools.partial(process_bands, data.x, data.y, positions)
    return replace(record, saved_only=False).stage("process", compute, key=key)


def process_bands(x: Tensor, y: Tensor, positions: dict[str, Tensor], *, seed: int = 0) -> Arrays:
    """Mean and deviation, noise left out, of a Gaussian process with the squared exponential covariance, tuned."""
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel

    kernel = ConstantKernel(1.0, (1e-2, 1e2)) * RBF(0.1, (1e-2, 1e1)) + WhiteKernel(0.1, (1e-4, 1e1))
    process = GaussianProcessRegressor(kernel, n_restarts_optimizer=2, random_state=seed)
    process.fit(x.double().numpy(), y[:, 0].double().numpy())
    noise = process.kernel_.k2.noise_level
    arrays: Arrays = {"precision": np.array(1 / noise), "length_scale": np.array(process.kernel_.k1.k2.length_scale)}
    for name, at in positions.items():
        mean, std = process.predict(at.double().numpy(), return_std=True)
        arrays[f"{name}_mean"], arrays[f"{name}_std"] = mean, np.sqrt(np.maximum(std**2 - noise, 0))
    return arrays


def gaussian_scores(mean: Array, std: Array, y: Array, *, precision: float) -> dict[str, float]:
    r"""RMSE, log-likelihood and 95 % coverage of $\mathcal N(\text{mean}, \text{std}^2 + \tau^{-1})$ against outcomes.

    Example:
        >>> scores = gaussian_scores(np.zeros(2), np.zeros(2), np.array([0.0, 3.0]), precision=1.0)
        >>> scores["coverage_95"]
        0.5
    """
    variance = std.astype(float) ** 2 + 1 / precision
    error = y.astype(float) - mean
    density = -0.5 * (np.log(2 * np.pi * variance) + error**2 / variance)
    return {
        "rmse": float(np.sqrt(np.mean(error**2))),
        "log_likelihood": float(density.mean()),
        "coverage_95": float(np.mean(np.abs(error) <= 1.96 * np.sqrt(variance))),
        "mean_std": float(np.sqrt(variance).mean()),
    }


def draw_band(ax: Any, x: Array, mean: Array, std: Array | None = None, *, label: str = "prediction") -> None:
    """Draws a mean and shades of half a deviation each, up to two, on `ax`."""
    if std is not None:
        for width in (2.0, 1.5, 1.0, 0.5):
            ax.fill_between(x, mean - width * std, mean + width * std, color=PREDICTED, alpha=0.13, lw=0)
    ax.plot(x, mean, color=PREDICTED, lw=1.2, label=label)
