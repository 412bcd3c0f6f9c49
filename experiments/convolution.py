"""Bayesian convolutions: does dropout before every layer prevent overfitting of a small data set?

LeNet without dropout, with dropout before its last layer, and before every layer by elements and by channels, on 10, 50
and 100 % of the training images; those with dropout with averaged weights and with draws. The same number of steps
everywhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from dropbayes.likelihoods import Categorical
from dropbayes.predictive import predict
from experiments import datasets
from experiments.lenet import NAMES, DropoutLayers, lenet, train
from experiments.record import Arrays, Findings, Record, markdown_table


@dataclass(frozen=True)
class Settings:
    """Sizes of LeNet from the paper's digits experiment; the shares of the data are not from the paper.

    Attributes:
        images: The digits to use, as in the rotation experiment.
        shares: The shares of the training images to train on.
        networks: Where each network has dropout.
        channels: The numbers of channels of the two convolutions.
        hidden: The number of units before the last layer.
        n_train: The number of training images that count as 100 %.
        n_steps: The number of steps, each on a batch of 64.
        learning_rate: The base learning rate; scikit-learn's digits, which are blurred, need a lower one.
        n_test: The number of test images.
        n_draws: The number of draws of each prediction.
        seeds: The number of runs of each network.
    """

    images: Literal["auto", "mnist", "digits"] = "mnist"
    shares: tuple[float, ...] = (0.1, 0.5, 1.0)
    networks: tuple[DropoutLayers, ...] = ("none", "last", "all", "channels")
    channels: tuple[int, int] = (20, 50)
    hidden: int = 500
    n_train: int = 60_000
    n_steps: int = 100_000
    learning_rate: float = 0.01
    n_test: int = 10_000
    n_draws: int = 100
    seeds: int = 5

    @classmethod
    def quick(cls) -> Settings:
        """scikit-learn's digits and a narrower LeNet."""
        return cls(
            images="digits",
            learning_rate=0.005,
            channels=(6, 12),
            hidden=64,
            n_train=1297,
            n_steps=600,
            n_test=500,
            n_draws=50,
            seeds=1,
        )

    @classmethod
    def tiny(cls) -> Settings:
        """For tests."""
        return cls(
            images="digits", learning_rate=0.003, shares=(0.1,), networks=("none", "all"), channels=(6, 12), hidden=64,
            n_train=1297, n_steps=200, n_test=200, n_draws=30, seeds=1,
        )  # fmt: skip


def run(settings: Settings, record: Record, *, device: torch.device) -> Findings:
    """Trains every network on every share; see the module's docstring."""
    data = datasets.digits(settings.images)
    results: dict[tuple[DropoutLayers, float], list[Arrays]] = {}
    for sites in settings.networks:
        for share in settings.shares:
            results[sites, share] = [
                record.stage(
                    f"{sites}-{share:g}-{seed}",
                    lambda sites=sites, share=share, seed=seed: _stage(settings, data, sites, share, seed, device),
                )
                for seed in range(settings.seeds)
            ]
    return _findings(settings, data, results)


def _stage(
    settings: Settings, data: datasets.Images, sites: DropoutLayers, share: float, seed: int, device: torch.device
) -> Arrays:
    order = torch.randperm(min(settings.n_train, len(data.y)), generator=torch.Generator().manual_seed(seed))
    chosen = order[: math.ceil(share * len(order))]
    net = lenet(sites, channels=settings.channels, hidden=settings.hidden, seed=seed)
    train(
        net,
        data.x[chosen],
        data.y[chosen],
        n_steps=settings.n_steps,
        learning_rate=settings.learning_rate,
        seed=seed,
        device=device,
    )
    x, y = data.x_test[: settings.n_test].to(device), data.y_test[: settings.n_test].to(device)
    with torch.no_grad():
        averaged = torch.cat([net(batch) for batch in x.split(256)]).double().softmax(-1)
    arrays = {f"averaged_{name}": value for name, value in _scores(averaged, y).items()}
    if sites != "none":
        mean = predict(net, x, n_draws=settings.n_draws, likelihood=Categorical()).mean
        arrays |= {f"mc_{name}": value for name, value in _scores(mean.double(), y).items()}
    return arrays


def _scores(probabilities: torch.Tensor, y: torch.Tensor) -> Arrays:
    chosen = probabilities.gather(1, y[:, None]).clamp(min=1e-12)
    confidence = probabilities.amax(-1).mean()
    accuracy = (probabilities.argmax(-1) == y).double().mean()
    return {
        "error": np.array(float(1 - accuracy)),
        "log_likelihood": np.array(float(chosen.log().mean())),
        "overconfidence": np.array(float(confidence - accuracy)),
    }


def _findings(
    settings: Settings, data: datasets.Images, results: dict[tuple[DropoutLayers, float], list[Arrays]]
) -> Findings:
    metrics: dict[str, Any] = {}
    for kind in ("averaged", "mc"):
        for sites in settings.networks:
            if kind == "averaged" or sites != "none":
                metrics[f"{sites}, {kind}"] = {
                    f"{share:g}": {
                        score: float(np.mean([arrays[f"{kind}_{score}"] for arrays in results[sites, share]]))
                        for score in ("error", "log_likelihood", "overconfidence")
                    }
                    for share in settings.shares
                }
    least = f"{settings.shares[0]:g}"
    sentences = [
        f"Data: {data.source}; {settings.n_steps} steps, {settings.seeds} seed(s), the same test images throughout.",
        f"With {100 * settings.shares[0]:g} % of the training images the test log-likelihood is "
        + ", ".join(f"{by_share[least]['log_likelihood']:.3f} ({_label(name)})" for name, by_share in metrics.items())
        + ".",
    ]
    return Findings(
        title="Convolutions with little data",
        sentences=sentences,
        metrics=metrics,
        tables={"Test error and log-likelihood by share of the training images": _table(metrics)},
        figures={"convolution": lambda: _figure(settings, metrics)},
    )


def _label(name: str) -> str:
    """The words for a key of the metrics: a network, and how it predicts."""
    sites, kind = name.split(", ")
    return NAMES[sites] + ("" if sites == "none" else ", draws" if kind == "mc" else ", averaged weights")


def _table(metrics: dict[str, Any]) -> str:
    rows = []
    for name, by_share in metrics.items():
        row: dict[str, Any] = {"network": _label(name)}
        for share, scores in by_share.items():
            row[f"error at {100 * float(share):g} % (%)"] = 100 * scores["error"]
            row[f"log-likelihood at {100 * float(share):g} %"] = scores["log_likelihood"]
        rows.append(row)
    return markdown_table(rows)


def _figure(settings: Settings, metrics: dict[str, Any]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    shares = [100 * share for share in settings.shares]
    colours = {"none": "#c53030", "last": "#dd6b20", "all": "#2b6cb0", "channels": "#2f855a"}
    for name, by_share in metrics.items():
        sites, kind = name.split(", ")
        style: dict[str, Any] = {
            "color": colours[sites],
            "ls": "-" if kind == "mc" or sites == "none" else ":",
            "ms": 4,
        }
        left.plot(shares, [100 * v["error"] for v in by_share.values()], "o", label=_label(name), **style)
        right.plot(shares, [v["log_likelihood"] for v in by_share.values()], "o", label=_label(name), **style)
    left.set(title="Test error (%)", xlabel="share of the training images (%)", xticks=shares, ylim=(0, None))
    right.set(title="Test log-likelihood (nats)", xlabel="share of the training images (%)", xticks=shares)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8)
    return figure
