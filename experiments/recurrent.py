"""Recurrent networks: one mask per sequence against fresh masks at every step, on forecasts of CO2.

From 24 months an LSTM forecasts the next 12. Dropping the same units at every step is a draw of the weights (Gal and
Ghahramani 2016, variational RNN); fresh masks at every step are not. Without dropout, with fresh masks and
with one mask: which forecasts later years best, and how far do the draws disagree?
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from dropbayes.layers import Prior
from dropbayes.layers.recurrent import LSTM
from dropbayes.likelihoods import Gaussian
from dropbayes.predictive import predict
from dropbayes.training import Optimization, fit
from experiments import bands, datasets
from experiments.record import Array, Arrays, Findings, Record, markdown_table

Kind = Literal["none", "naive", "variational"]
NAMES: dict[Kind, str] = {
    "none": "no dropout",
    "naive": "fresh masks at every step",
    "variational": "one mask per sequence",
}
PPM = 5.0
"""The unit of inputs and targets, about the range of a year."""


@dataclass(frozen=True)
class Settings:
    """Not from the paper, which has no recurrent network; drop probabilities as in the authors' language model.

    Attributes:
        kinds: The kinds of dropout to compare, keys of `NAMES`.
        window: The number of months that the network sees.
        horizon: The forecast horizon in months.
        hidden: The number of units of the LSTM.
        drop_prob: The drop probability of recurrent state and output.
        share: The fraction of the windows for training; a sixth of the rest tunes the noise, the others are tested.
        epochs: The number of passes over the windows.
        learning_rate: The learning rate of Adam.
        n_draws: The number of draws of each forecast.
        seeds: The number of runs of each network.
    """

    kinds: tuple[Kind, ...] = tuple(NAMES)
    window: int = 24
    horizon: int = 12
    hidden: int = 128
    drop_prob: float = 0.3
    share: float = 0.5
    epochs: int = 600
    learning_rate: float = 2e-3
    n_draws: int = 200
    seeds: int = 5

    @classmethod
    def quick(cls) -> Settings:
        """A smaller network, fewer epochs."""
        return cls(hidden=32, epochs=80, learning_rate=5e-3, n_draws=100, seeds=2)

    @classmethod
    def tiny(cls) -> Settings:
        """For tests."""
        return cls(
            kinds=("naive", "variational"), window=12, horizon=3, hidden=16, epochs=12, learning_rate=1e-2, n_draws=30,
            seeds=1,
        )  # fmt: skip


class Forecaster(nn.Module):
    """An LSTM over `[row, month, 1]` and a linear layer from its last state to all months ahead.

    Args:
        kind: "variational" for one mask per sequence, "naive" for fresh ones at every step, "none" for no dropout.
        hidden: The number of units of the state.
        horizon: The number of months ahead.
        drop_prob: The drop probability of state and output.
    """

    def __init__(self, kind: Kind, *, hidden: int, horizon: int, drop_prob: float) -> None:
        super().__init__()
        self.kind, self.drop_prob = kind, 0.0 if kind == "none" else drop_prob
        # The only input is not dropped.
        recurrent = self.drop_prob if kind == "variational" else 0.0
        self.lstm = LSTM(1, hidden, drop_prob=0.0, recurrent_drop_prob=recurrent, batch_first=True)
        self.dropout = nn.Dropout(self.drop_prob)
        self.head = nn.Linear(hidden, horizon)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind != "naive":
            return self.head(self.dropout(self.lstm(x)[0][:, -1]))
        state = None
        for month in x.split(1, dim=1):
            output, (h, c) = self.lstm(month, state)
            state = (self.dropout(h), c)
        return self.head(self.dropout(output[:, -1]))


@dataclass(frozen=True)
class Windows:
    """Windows of months less their last value, and the changes that followed, in units of `PPM`."""

    x: Tensor
    y: Tensor
    last_year: Tensor
    """The forecast that the next months change as the same months did a year before."""

    def between(self, start: int, stop: int) -> Windows:
        """The windows from `start` up to `stop`."""
        return Windows(self.x[start:stop], self.y[start:stop], self.last_year[start:stop])


def windows(ppm: Array, window: int, horizon: int) -> Windows:
    """All windows of the series, in order of time.

    Example:
        >>> round(windows(np.arange(60.0), 24, 12).y[0, 0].item() * PPM, 3)
        1.0
    """
    series = torch.tensor(ppm, dtype=torch.float32)
    pieces = series.unfold(0, window + horizon, 1)
    last = pieces[:, window - 1 : window]
    shift = max(12, horizon)
    whole = series.unfold(0, shift + window + horizon, 1)  # windows with a year before them
    back = torch.zeros(len(pieces), horizon)
    offset = len(pieces) - len(whole)
    start = shift + window - 12
    back[offset:] = whole[:, start : start + horizon] - whole[:, start - 1 : start]
    return Windows(((pieces[:, :window] - last) / PPM)[..., None], (pieces[:, window:] - last) / PPM, back / PPM)


def run(settings: Settings, record: Record, *, device: torch.device) -> Findings:
    """Trains every network on the early years and has it forecast the later ones; see the module's docstring."""
    ppm, source = datasets.monthly_co2()
    data = windows(ppm, settings.window, settings.horizon)
    first = round(settings.share * len(data.y))
    # Windows overlap: a gap as long as one keeps later months out of the earlier part.
    gap = settings.window + settings.horizon
    second = first + gap + (len(data.y) - first - gap) // 6
    train, tune, test = data.between(gap, first), data.between(first + gap, second), data.between(second, len(data.y))
    results: dict[Kind, list[Arrays]] = {
        kind: [
            record.stage(
                f"{kind}-{seed}", lambda kind=kind, seed=seed: _stage(settings, kind, seed, train, tune, test, device)
            )
            for seed in range(settings.seeds)
        ]
        for kind in settings.kinds
    }  # fmt: skip
    return _findings(settings, source, results, test)


def _stage(
    settings: Settings, kind: Kind, seed: int, train: Windows, tune: Windows, test: Windows, device: torch.device
) -> Arrays:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = Forecaster(kind, hidden=settings.hidden, horizon=settings.horizon, drop_prob=settings.drop_prob)
    history = fit(
        net,
        train.x,
        train.y,
        likelihood=Gaussian(precision=100.0),
        prior=Prior(length_scale=0.1, applies_to="stored"),
        epochs=settings.epochs,
        batch_size=64,
        device=device,
        seed=seed,
        optimization=Optimization(learning_rate=settings.learning_rate),
    )
    arrays: Arrays = {"loss": np.array(history.loss)}
    for name, data in (("train", train), ("tune", tune), ("test", test)):
        if kind == "none":
            with torch.no_grad():
                mean = net.eval()(data.x)
            std = torch.zeros_like(mean)
        else:
            prediction = predict(net, data.x, n_draws=settings.n_draws)
            mean, std = prediction.mean, prediction.epistemic.sqrt()
        arrays[f"{name}_mean"], arrays[f"{name}_std"] = mean.numpy(), std.numpy()
        arrays[f"{name}_y"] = data.y.numpy()
    return arrays


def _scores(arrays: Arrays) -> dict[str, float]:
    noise = np.mean((arrays["tune_mean"] - arrays["tune_y"]) ** 2) - np.mean(arrays["tune_std"] ** 2)
    precision = 1 / max(float(noise), 1e-4)
    test = bands.gaussian_scores(arrays["test_mean"], arrays["test_std"], arrays["test_y"], precision=precision)
    train_rmse = np.sqrt(np.mean((arrays["train_mean"] - arrays["train_y"]) ** 2))
    return {
        "rmse_train_ppm": float(train_rmse) * PPM,
        "rmse_test_ppm": test["rmse"] * PPM,
        "log_likelihood_test": test["log_likelihood"],
        "coverage_95_test": test["coverage_95"],
        "epistemic_std_test_ppm": float(arrays["test_std"].mean()) * PPM,
    }


def _findings(settings: Settings, source: str, results: dict[Kind, list[Arrays]], test: Windows) -> Findings:
    metrics: dict[str, Any] = {}
    for kind, runs in results.items():
        scores = [_scores(arrays) for arrays in runs]
        metrics[kind] = {name: float(np.mean([s[name] for s in scores])) for name in scores[0]}
    seasonal = float((test.last_year - test.y).square().mean().sqrt()) * PPM
    metrics["last year's change"] = {"rmse_test_ppm": seasonal}
    rows = [
        {
            "network": NAMES[kind],
            "RMSE train (ppm)": metrics[kind]["rmse_train_ppm"],
            "RMSE test (ppm)": metrics[kind]["rmse_test_ppm"],
            "log-likelihood test": metrics[kind]["log_likelihood_test"],
            "95 % coverage": metrics[kind]["coverage_95_test"],
            "deviation of draws (ppm)": metrics[kind]["epistemic_std_test_ppm"],
        }
        for kind in results
    ]
    sentences = [
        f"Data: {source}; {settings.window} months seen, {settings.horizon} forecast, {len(test.y)} windows of later "
        f"years for test; means of {settings.seeds} runs. The noise is tuned on windows between the two. Repeating "
        f"last year's change has a test RMSE of {seasonal:.3f} ppm.",
    ]
    if {"naive", "variational"} <= set(results):
        ratio = metrics["variational"]["epistemic_std_test_ppm"] / metrics["naive"]["epistemic_std_test_ppm"]
        sentences.append(
            f"The draws of one mask per sequence deviate {ratio:.1f} times as far as those of fresh masks."
        )
    return Findings(
        title="Recurrent networks: one mask per sequence",
        sentences=sentences,
        metrics=metrics,
        tables={"Forecasts of later years": markdown_table(rows)},
        figures={"recurrent": lambda: _figure(settings, results)},
    )


def _figure(settings: Settings, results: dict[Kind, list[Arrays]]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.0), layout="constrained")
    axes = figure.subplots(1, len(results) + 1)
    months = np.arange(1, settings.horizon + 1)
    for ax, (kind, runs) in zip(axes, results.items(), strict=False):
        arrays = runs[0]
        mean, std = PPM * arrays["test_mean"][0], PPM * arrays["test_std"][0]
        bands.draw_band(ax, months, mean, std if kind != "none" else None)
        ax.plot(months, PPM * arrays["test_y"][0], color=bands.HIDDEN, lw=1.2, label="what followed")
        ax.set(title=NAMES[kind].capitalize(), xlabel="months ahead", ylim=(-4, 10))
    axes[0].legend(loc="lower center", fontsize=8)
    axes[0].set_ylabel("change of CO$_2$ (ppm)")
    for kind, runs in results.items():
        error = np.mean([np.sqrt(np.mean((a["test_mean"] - a["test_y"]) ** 2, 0)) for a in runs], 0)
        axes[-1].plot(months, PPM * error, "o-", ms=3, label=NAMES[kind])
    axes[-1].set(title="RMSE by months ahead (ppm)", xlabel="months ahead", ylim=(0, None))
    axes[-1].legend(loc="lower right", fontsize=8)
    for ax in axes:
        ax.set_xticks(months[months % 3 == 0])
    return figure
