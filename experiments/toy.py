r"""Three small pictures: $y = x \sin x$ from 20 points, noise that depends on $x$, a drop probability that is learned.

The authors' demonstration; its heteroscedastic sequel, whose last four points jump up and down; and Concrete dropout
(Gal, Hron and Kendall 2017), whose learned drop probability should fall as the data grow.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dropbayes.layers import ConcreteNoise, Linear, Prior, model_precision
from dropbayes.likelihoods import Gaussian, HeteroscedasticGaussian
from dropbayes.predictive import Prediction, predict
from dropbayes.runtime.devices import cpu_threads
from dropbayes.training import Optimization, fit
from experiments import bands
from experiments.record import Arrays, Findings, Record, markdown_table

CPU_ONLY = True  # too small to gain from a device
DEMO_DROP, DEMO_DECAY, DEMO_SQUARED_SCALE, DEMO_POINTS = 0.05, 1e-5, 0.005, 20  # the authors' demonstration
JUMPS = ((7.0, -7.0), (8.5, 7.0), (10.0, -7.0), (11.5, 7.0))  # the authors' heteroscedastic repository
LINE_SLOPE, LINE_LEVEL, LINE_NOISE = 2.0, 8.0, 1.0  # the Concrete dropout notebook
CONCRETE_BATCH, CONCRETE_SCALE, CONCRETE_START = 20, 1e-4, 0.1  # the same


@dataclass(frozen=True)
class Settings:
    """Values from the authors' demonstrations unless noted.

    Attributes:
        n_steps: The number of steps for the first two pictures; the demonstrations run until stopped.
        hidden: The number of units in their hidden layers.
        heteroscedastic_hidden: The number of units in the hidden layers of the network that predicts a variance.
        n_draws: The number of draws of each prediction.
        n_data: The numbers of training points from which a drop probability is learned.
        concrete_hidden: The number of units in the three hidden layers of that network.
        concrete_steps: The number of its steps for each size of the data.
        concrete_rate: The learning rate of Adam.
        seed: The seed of data, weights and masks.
    """

    n_steps: int = 40_000
    hidden: int = 20
    heteroscedastic_hidden: int = 100
    n_draws: int = 100
    n_data: tuple[int, ...] = (10, 100, 1000, 10_000)
    concrete_hidden: int = 1024
    concrete_steps: int = 2000
    concrete_rate: float = 1e-3
    seed: int = 0

    @classmethod
    def quick(cls) -> Settings:
        """Fewer steps and a narrower network."""
        return cls(
            n_steps=6000, heteroscedastic_hidden=50, n_data=(10, 100, 1000), concrete_hidden=64, concrete_steps=1500,
            concrete_rate=3e-3,
        )  # fmt: skip

    @classmethod
    def tiny(cls) -> Settings:
        """For tests."""
        return cls(
            n_steps=1000, heteroscedastic_hidden=30, n_draws=50, n_data=(10, 1000), concrete_hidden=16,
            concrete_steps=300, concrete_rate=1e-2,
        )  # fmt: skip


def run(settings: Settings, record: Record, *, device: torch.device) -> Findings:
    """Makes the three pictures; see the module's docstring."""
    del device
    with cpu_threads(1):
        demo = record.stage("demo", lambda: _demo(settings))
        jumps = record.stage("heteroscedastic", lambda: _heteroscedastic(settings))
        concrete = record.stage("concrete", lambda: _concrete(settings))
    return _findings(settings, demo, jumps, concrete)


def _perceptron(hidden: int, n_out: int, last: nn.Module, drop_prob: float, seed: int) -> nn.Sequential:
    """Two hidden layers with dropout after each; the one-dimensional input is not dropped."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(1, hidden), nn.ReLU(), nn.Dropout(drop_prob),
            nn.Linear(hidden, hidden), last, nn.Dropout(drop_prob),
            nn.Linear(hidden, n_out),
        )  # fmt: skip


def _demo(settings: Settings) -> Arrays:
    """The demonstration, its precision from its weight decay [GG16, eq:tau_weightdecay_relation]."""
    source = torch.Generator().manual_seed(settings.seed)
    x = torch.rand(DEMO_POINTS, 1, generator=source) * 10 - 5
    y = x * x.sin()
    scale = math.sqrt(DEMO_SQUARED_SCALE)
    precision = model_precision(
        weight_decay=DEMO_DECAY, keep_prob=1 - DEMO_DROP, length_scale=scale, n_data=DEMO_POINTS
    )  # fmt: skip
    net = _perceptron(settings.hidden, 1, nn.Sigmoid(), DEMO_DROP, settings.seed)
    likelihood = Gaussian(precision=precision)
    fit(
        net,
        x,
        y,
        likelihood=likelihood,
        prior=Prior(length_scale=scale, applies_to="stored"),
        epochs=settings.n_steps // 2,
        batch_size=10,
        device="cpu",
        seed=settings.seed,
        optimization=Optimization("sgd", learning_rate=0.01),
    )
    at = torch.linspace(-10, 10, 201)[:, None]
    prediction = predict(net, at, n_draws=settings.n_draws, likelihood=likelihood)
    seen = predict(net, x, n_draws=settings.n_draws)
    arrays = _moments(prediction) | {"x": x[:, 0].numpy(), "y": y[:, 0].numpy(), "at": at[:, 0].numpy()}
    return arrays | {"seen_mean": seen.mean[:, 0].numpy(), "precision": np.array(precision)}


def _moments(prediction: Prediction) -> Arrays:
    """The mean and both standard deviations."""
    moments = {
        "mean": prediction.mean,
        "epistemic_std": prediction.epistemic.sqrt(),
        "aleatoric_std": prediction.aleatoric.sqrt(),
    }
    return {name: value[:, 0].numpy() for name, value in moments.items()}


def _heteroscedastic(settings: Settings) -> Arrays:
    smooth = torch.linspace(-5, 5, 20)
    points = torch.cat([torch.stack([smooth, smooth * smooth.sin()], 1), torch.tensor(JUMPS)])
    x, y = points[:, :1], points[:, 1:]
    net = _perceptron(settings.heteroscedastic_hidden, 2, nn.ReLU(), DEMO_DROP, settings.seed)
    likelihood = HeteroscedasticGaussian()
    fit(
        net,
        x / 5,
        y,
        likelihood=likelihood,
        prior=Prior(length_scale=0.1, applies_to="stored"),
        epochs=settings.n_steps // 2,
        batch_size=12,
        device="cpu",
        seed=settings.seed,
        optimization=Optimization(learning_rate=3e-3),
    )
    at = torch.linspace(-8, 14, 221)[:, None]
    prediction = predict(net, at / 5, n_draws=settings.n_draws, likelihood=likelihood)
    return _moments(prediction) | {"x": x[:, 0].numpy(), "y": y[:, 0].numpy(), "at": at[:, 0].numpy()}


def _line(n: int, seed: int) -> tuple[Tensor, Tensor]:
    r"""The data of the Concrete dropout notebook: $y = 2x + 8 + \mathcal N(0, 1)$ with standard normal $x$."""
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 1, generator=source)
    return x, LINE_SLOPE * x + LINE_LEVEL + LINE_NOISE * torch.randn(n, 1, generator=source)


def _concrete(settings: Settings) -> Arrays:
    """Drop probabilities learned with each size of the data, `[size, layer]`, and the fit on fresh data."""
    x_test, y_test = _line(1000, settings.seed + 1)
    drop_probs, rmse, aleatoric_std = [], [], []
    for n_data in settings.n_data:
        width = settings.concrete_hidden
        with torch.random.fork_rng():
            torch.manual_seed(settings.seed)
            layers: list[nn.Module] = [nn.Linear(1, width), nn.ReLU()]
            for n_out in (width, width, 2):
                layers += [Linear(width, n_out, noise=ConcreteNoise(CONCRETE_START)), nn.ReLU()]
            net = nn.Sequential(*layers[:-1])
        x, y = _line(n_data, settings.seed)
        likelihood = HeteroscedasticGaussian()
        epochs = max(1, settings.concrete_steps // math.ceil(n_data / CONCRETE_BATCH))
        fit(
            net,
            x,
            y,
            likelihood=likelihood,
            prior=Prior(length_scale=CONCRETE_SCALE, applies_to="stored"),
            epochs=epochs,
            batch_size=CONCRETE_BATCH,
            device="cpu",
            seed=settings.seed,
            optimization=Optimization(learning_rate=settings.concrete_rate),
        )
        drop_probs.append([layer.noise.drop_prob for layer in net if isinstance(layer, Linear)])
        prediction = predict(net, x_test, n_draws=settings.n_draws, likelihood=likelihood)
        rmse.append((prediction.mean - y_test).square().mean().sqrt().item())
        aleatoric_std.append(prediction.aleatoric.mean().sqrt().item())
    return {"drop_prob": np.array(drop_probs), "rmse": np.array(rmse), "aleatoric_std": np.array(aleatoric_std)}


def _findings(settings: Settings, demo: Arrays, jumps: Arrays, concrete: Arrays) -> Findings:
    at, outside = demo["at"], np.abs(demo["at"]) > 7
    inside_jumps, smooth = (jumps["at"] > 7) & (jumps["at"] < 11.5), np.abs(jumps["at"]) < 5
    total_std = np.hypot(demo["epistemic_std"], demo["aleatoric_std"])
    within = np.abs(at * np.sin(at) - demo["mean"]) <= 2 * total_std
    metrics = {
        "demo": {
            "coverage_2_std_beyond": float(within[outside].mean()),
            "precision": float(demo["precision"]),
            "rmse_points": float(np.sqrt(np.mean((demo["seen_mean"] - demo["y"]) ** 2))),
            "epistemic_std_among_points": float(demo["epistemic_std"][np.abs(at) < 5].mean()),
            "epistemic_std_beyond": float(demo["epistemic_std"][outside].mean()),
        },
        "heteroscedastic": {
            "aleatoric_std_smooth": float(jumps["aleatoric_std"][smooth].mean()),
            "aleatoric_std_jumps": float(jumps["aleatoric_std"][inside_jumps].mean()),
        },
        "concrete": {
            "n_data": list(settings.n_data),
            "mean_drop_prob": concrete["drop_prob"].mean(1),
            **concrete,
        },
    }
    rows = [
        {"data": n, **{f"layer {k + 2}": p for k, p in enumerate(row)}, "RMSE": rmse, "aleatoric deviation": std}
        for n, row, rmse, std in zip(
            settings.n_data, concrete["drop_prob"], concrete["rmse"], concrete["aleatoric_std"], strict=True
        )
    ]
    points, noise = metrics["demo"], metrics["heteroscedastic"]
    sentences = [
        f"x sin x: among the 20 points the draws deviate by {points['epistemic_std_among_points']:.2f} on average, "
        f"beyond |x| = 7 by {points['epistemic_std_beyond']:.2f}; the weight decay implies a precision of "
        f"{points['precision']:.1f}. Beyond |x| = 7 the band of two deviations holds "
        f"{100 * points['coverage_2_std_beyond']:.0f} % of the curve: the last hidden layer saturates, so the draws "
        "cannot deviate as far as x sin x does.",
        f"Predicted noise: its deviation is {noise['aleatoric_std_smooth']:.2f} where the points lie on a smooth curve "
        f"and {noise['aleatoric_std_jumps']:.2f} where they jump.",
        "Learned drop probability: mean over layers "
        + ", ".join(f"{p:.3f} with {n}" for p, n in zip(concrete["drop_prob"].mean(1), settings.n_data, strict=True))
        + " points.",
    ]
    return Findings(
        title="Small demonstrations",
        sentences=sentences,
        metrics=metrics,
        tables={"Drop probability learned by each layer": markdown_table(rows)},
        figures={"toy": lambda: _figure(settings, demo, jumps, concrete)},
    )


def _figure(settings: Settings, demo: Arrays, jumps: Arrays, concrete: Arrays) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.2), layout="constrained")
    first, second, third = figure.subplots(1, 3, width_ratios=(1.2, 1.2, 1))
    bands.draw_band(first, demo["at"], demo["mean"], np.hypot(demo["epistemic_std"], demo["aleatoric_std"]))
    first.plot(demo["at"], demo["at"] * np.sin(demo["at"]), color=bands.HIDDEN, lw=0.8, label="x sin x")
    first.plot(demo["x"], demo["y"], "o", color=bands.OBSERVED, ms=3, label="points")
    first.set(title="$y = x\\,\\sin x$, total deviation", xlabel="x", ylim=(-12, 12), xlim=(-10, 10))
    first.legend(loc="upper center", ncols=3, fontsize=7)
    total = np.hypot(jumps["epistemic_std"], jumps["aleatoric_std"])
    bands.draw_band(second, jumps["at"], jumps["mean"], total)
    second.plot(
        jumps["at"], jumps["mean"] + 2 * jumps["aleatoric_std"], "--", color="0.35", lw=0.8, label="noise alone (±2)"
    )
    second.plot(jumps["at"], jumps["mean"] - 2 * jumps["aleatoric_std"], "--", color="0.35", lw=0.8)
    second.plot(jumps["x"], jumps["y"], "o", color=bands.OBSERVED, ms=3)
    second.set(title="Predicted noise", xlabel="x", ylim=(-25, 25), xlim=(-8, 14))
    second.legend(loc="upper left", fontsize=8)
    for layer, values in enumerate(concrete["drop_prob"].T):
        third.plot(settings.n_data, values, "o-", ms=3, label=f"before layer {layer + 2}")
    third.set(title="Learned drop probability", xlabel="training points", xscale="log", ylim=(0, None))
    third.legend(loc="upper right", fontsize=8)
    return figure
