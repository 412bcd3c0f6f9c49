"""Mauna Loa: a dropout network fitted to atmospheric CO2, and how sure it is past the data.

`make demo` runs this. The series comes with statsmodels: nothing is downloaded.
"""

from __future__ import annotations

import pathlib
import sys
import time

import numpy as np
import torch
from torch import nn

import dropbayes as db

OUT = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "out")
TRAINED_UNTIL, DRAWS = 1985.0, 400
DROP_PROB, LENGTH_SCALE, PRECISION = 0.1, 0.1, 60.0
STEPS = 4000


def monthly_co2() -> tuple[np.ndarray, np.ndarray]:
    """The decimal years and the CO2 concentrations (ppm) of the months on record."""
    from statsmodels.datasets import co2

    series = co2.load_pandas().data["co2"].resample("MS").mean().dropna()
    years = series.index.year + (series.index.month - 0.5) / 12
    return years.to_numpy(), series.to_numpy()


def features(years: torch.Tensor, centre: float, scale: float) -> torch.Tensor:
    """The trend and the season of each month: time itself, and its place in the year on a circle."""
    angle = 2 * torch.pi * years
    return torch.stack(
        [(years - centre) / scale, angle.sin(), angle.cos(), (2 * angle).sin(), (2 * angle).cos()], 1
    ).float()


def fitted(x: torch.Tensor, y: torch.Tensor) -> nn.Module:
    """A dropout network trained on the paper's objective: squared error and the weight decay that the prior implies."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(x.shape[1], 100), nn.ReLU(), nn.Dropout(DROP_PROB), nn.Linear(100, 100), nn.ReLU(),
        nn.Dropout(DROP_PROB), nn.Linear(100, 1),
    )  # fmt: skip
    prior = db.Prior(length_scale=LENGTH_SCALE)
    groups = db.parameter_groups(net, precision=PRECISION, prior=prior, n_data=len(x))
    optimiser = torch.optim.Adam(groups, lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, STEPS)
    for _ in range(STEPS):
        batch = torch.randint(len(x), (64,))
        loss = 0.5 * (net(x[batch]) - y[batch]).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    return net.eval()


def main() -> None:
    start = time.perf_counter()
    torch.set_num_threads(1)  # small products: threads would only wait for each other
    years, ppm = monthly_co2()
    seen = years < TRAINED_UNTIL
    slope, intercept = np.polyfit(years[seen], ppm[seen], 1)
    residual = ppm - (slope * years + intercept)
    centre, scale, spread = years[seen].mean(), years[seen].std(), residual[seen].std()
    x = features(torch.tensor(years), centre, scale)
    y = torch.from_numpy(residual / spread).float()[:, None]
    print(f"Fitting a dropout network to {seen.sum()} months of CO2, {years[0]:.0f} to {TRAINED_UNTIL:.0f} ...")
    net = fitted(x[seen], y[seen])

    horizon = torch.linspace(float(years[0]), 2015.0, 1400, dtype=torch.float64)
    grid = features(horizon, centre, scale)
    likelihood = db.Gaussian(precision=PRECISION)
    prediction = db.predict(net, grid, n_draws=DRAWS, likelihood=likelihood)
    samples = db.draws(net, grid, n_draws=DRAWS)[:6, :, 0]
    print(db.sites(net, grid[:1]))
    print(f"\nPredicted from {prediction.n_draws} draws ({prediction.method}). In ppm:\n")
    print("  year    mean      std   epistemic  aleatoric")
    trend = slope * horizon.numpy() + intercept
    for year in (1970, 1984, 1990, 1995, 2001, 2010, 2015):
        place = int(np.argmin(np.abs(horizon.numpy() - year)))
        mean = trend[place] + spread * float(prediction.mean[place, 0])
        parts = [
            spread * float(v[place, 0].sqrt())
            for v in (prediction.variance, prediction.epistemic, prediction.aleatoric)
        ]
        print(f"  {year}  {mean:7.2f}  {parts[0]:7.2f}  {parts[1]:9.2f}  {parts[2]:9.2f}")
    for name, rows in {"months trained on": seen, "months after": ~seen}.items():
        result = db.evaluate(net, x[rows], y[rows], likelihood=likelihood, n_draws=DRAWS)
        print(
            f"\n{name}: RMSE {spread * result.rmse:.2f} ppm; 95 % interval holds {100 * result.coverage_95:.0f} %",
            end="",
        )
    path = draw(years, residual, seen, horizon.numpy(), spread, prediction, samples)
    print(f"\n\nFigure: {path}   ({time.perf_counter() - start:.0f} s)")


def draw(years, residual, seen, horizon, spread, prediction, samples) -> pathlib.Path:  # type: ignore[no-untyped-def]
    """The figure: data, mean, bands of one and two standard deviations, and a few draws."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    mean = spread * prediction.mean[:, 0].numpy()
    std = spread * prediction.std[:, 0].numpy()
    figure, axes = plt.subplots(figsize=(9, 4.2), layout="constrained")
    for width, shade in ((2, 0.18), (1, 0.28)):
        axes.fill_between(horizon, mean - width * std, mean + width * std, color="#2b6cb0", alpha=shade, lw=0,
                          label=f"± {width} std")  # fmt: skip
    for sample in samples:
        axes.plot(horizon, spread * sample.numpy(), color="#2b6cb0", lw=0.4, alpha=0.5)
    axes.plot(horizon, mean, color="#1a365d", lw=1.4, label="predictive mean")
    axes.plot(years[seen], residual[seen], ".", color="black", ms=2.2, label="trained on")
    axes.plot(years[~seen], residual[~seen], ".", color="#c05621", ms=2.2, label="what happened")
    axes.axvline(TRAINED_UNTIL, color="0.4", lw=0.8, ls="--")
    axes.set(xlabel="year", ylabel="CO₂ off its linear trend (ppm)", xlim=(horizon[0], horizon[-1]),
             title="CO₂ at Mauna Loa: a dropout network knows where it stops knowing")  # fmt: skip
    axes.legend(loc="upper left", frameon=False, ncols=2)
    axes.spines[["top", "right"]].set_visible(False)
    OUT.mkdir(parents=True, exist_ok=True)
    path = OUT / "co2.png"
    figure.savefig(path, dpi=140)
    return path


if __name__ == "__main__":
    main()
