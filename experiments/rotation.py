"""Classification: a digit 1 rotated step by step, and how sure LeNet is of it [GG16; main paper, section 5.2].

Three networks, with dropout before the last layer, and before every layer by elements and by channels. As the digit
turns away from all that was seen in training, the draws of the network should disagree: entropy, mutual information and
variation ratio rise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from dropbayes.likelihoods import Categorical
from dropbayes.predictive import Prediction, predict
from dropbayes.sampling import draws
from experiments import datasets
from experiments.lenet import NAMES, DropoutLayers, lenet, train
from experiments.record import Array, Arrays, Findings, Record, markdown_table

MEASURES = ("entropy", "mutual_information", "variation_ratio")


@dataclass(frozen=True)
class Settings:
    """Values from the paper unless noted.

    Attributes:
        images: "mnist", "digits" (scikit-learn's) or "auto": MNIST where the data folder has it.
        networks: Where each network has dropout.
        channels: The numbers of channels of the two convolutions.
        hidden: The number of units before the last layer.
        n_train: The largest number of training images.
        n_steps: The number of steps, each on a batch of 64.
        learning_rate: The base learning rate; scikit-learn's digits, which are blurred, need a lower one.
        n_angles: The number of rotations of the digit.
        largest_angle: The largest rotation in degrees; the paper does not state it.
        n_draws: The number of draws for each rotated digit.
        n_test: The number of test images for the scores; not from the paper.
        n_turned: The number of test images rotated for the mean curves; not from the paper.
        seed: The seed of weights, batches and masks.
    """

    images: Literal["auto", "mnist", "digits"] = "mnist"
    networks: tuple[DropoutLayers, ...] = ("last", "all", "channels")
    channels: tuple[int, int] = (20, 50)
    hidden: int = 500
    n_train: int = 60_000
    n_steps: int = 1_000_000
    learning_rate: float = 0.01
    n_angles: int = 12
    largest_angle: float = 120.0
    n_draws: int = 100
    n_test: int = 10_000
    n_turned: int = 1000
    seed: int = 0

    @classmethod
    def quick(cls) -> Settings:
        """Fewer images and steps."""
        return cls(images="auto", n_train=10_000, n_steps=700, n_test=1000, n_turned=60)

    @classmethod
    def tiny(cls) -> Settings:
        """For tests."""
        return cls(
            images="digits", networks=("last",), channels=(4, 8), hidden=64, n_train=1297, n_steps=400,
            n_angles=4, largest_angle=90.0, n_draws=30, n_test=150, n_turned=20,
        )  # fmt: skip


def rotate(image: Tensor, degrees: Tensor) -> Tensor:
    """The image `[1, height, width]` rotated anticlockwise by each angle, `[angle, 1, height, width]`.

    Example:
        >>> corner = torch.zeros(1, 4, 4)
        >>> corner[0, 0, 3] = 1.0
        >>> rotate(corner, torch.tensor([90.0]))[0, 0].argmax().item()
        0
    """
    angle = torch.deg2rad(degrees)
    rows = [
        torch.stack([angle.cos(), -angle.sin(), 0 * angle], -1),
        torch.stack([angle.sin(), angle.cos(), 0 * angle], -1),
    ]
    shape = [len(degrees), *image.shape]
    grid = nn.functional.affine_grid(torch.stack(rows, 1).to(image.dtype), shape, align_corners=False)
    return nn.functional.grid_sample(image.expand(shape), grid, align_corners=False)


def run(settings: Settings, record: Record, *, device: torch.device) -> Findings:
    """Trains the networks and shows them rotated digits; see the module's docstring."""
    data = datasets.digits(settings.images)
    angles = torch.linspace(0, settings.largest_angle, settings.n_angles)
    results = {
        sites: record.stage(sites, lambda sites=sites: _stage(settings, record, data, angles, sites, device))
        for sites in settings.networks
    }
    return _findings(data, angles.numpy(), results)


def _stage(
    settings: Settings,
    record: Record,
    data: datasets.Images,
    angles: Tensor,
    sites: DropoutLayers,
    device: torch.device,
) -> Arrays:
    net = lenet(sites, channels=settings.channels, hidden=settings.hidden, seed=settings.seed)
    x, y = data.x[: settings.n_train], data.y[: settings.n_train]
    train(
        net,
        x,
        y,
        n_steps=settings.n_steps,
        learning_rate=settings.learning_rate,
        seed=settings.seed,
        device=device,
        checkpoint=record.checkpoint(sites),
    )
    one = data.x_test[data.y_test == 1][0]
    with torch.no_grad():
        logits = draws(net, rotate(one, angles).to(device), n_draws=settings.n_draws)
    arrays: Arrays = {"logits": logits.cpu().numpy(), "images": rotate(one, angles)[:, 0].numpy()}
    arrays |= _test_scores(net, data, settings, device)
    several = torch.stack([rotate(image, angles) for image in data.x_test[: settings.n_turned]], 1)
    for name in MEASURES:
        arrays[f"turned_{name}"] = np.zeros(len(angles))
    for index, images in enumerate(several):
        prediction = _class_prediction(net, images, settings.n_draws, device)
        for name in MEASURES:
            arrays[f"turned_{name}"][index] = getattr(prediction, name).mean().item()
    return arrays


def _class_prediction(net: nn.Module, x: Tensor, n_draws: int, device: torch.device) -> Prediction:
    return predict(net, x.to(device), n_draws=n_draws, likelihood=Categorical())


def _test_scores(net: nn.Module, data: datasets.Images, settings: Settings, device: torch.device) -> Arrays:
    """Errors of averaged weights and of the mean over draws, and the separation of digits from other images."""
    from sklearn.metrics import roc_auc_score

    x, y = data.x_test[: settings.n_test], data.y_test[: settings.n_test]
    other, _ = datasets.unrelated_images(data)
    other = other[: settings.n_test]
    known, unknown = (_class_prediction(net, z, settings.n_draws, device) for z in (x, other))
    with torch.no_grad():
        standard = torch.cat([net(batch.to(device)).cpu() for batch in x.split(256)]).softmax(-1)
        averaged_other = torch.cat([net(batch.to(device)).cpu() for batch in other.split(256)]).softmax(-1)
    mean = known.mean.cpu()
    scores = {
        "error_standard": (standard.argmax(-1) != y).float().mean(),
        "error_mc": (mean.argmax(-1) != y).float().mean(),
        "log_likelihood_standard": standard.gather(1, y[:, None]).clamp(min=1e-12).log().mean(),
        "log_likelihood_mc": mean.gather(1, y[:, None]).clamp(min=1e-12).log().mean(),
    }
    arrays: Arrays = {name: np.array(float(value)) for name, value in scores.items()}
    event = np.r_[np.zeros(len(x)), np.ones(len(other))]
    for name in MEASURES:
        values = torch.cat([getattr(known, name), getattr(unknown, name)]).cpu().numpy()
        arrays[f"auroc_{name}"] = np.array(roc_auc_score(event, values))
    doubt = torch.cat([1 - standard.amax(-1), 1 - averaged_other.amax(-1)]).numpy()
    arrays["auroc_standard"] = np.array(roc_auc_score(event, doubt))
    return arrays


def _findings(data: datasets.Images, angles: Array, results: dict[DropoutLayers, Arrays]) -> Findings:
    _, other = datasets.unrelated_images(data)
    metrics: dict[str, Any] = {}
    for sites, arrays in results.items():
        scalars = {name: float(value) for name, value in arrays.items() if value.ndim == 0}
        probabilities = np.exp(arrays["logits"] - np.logaddexp.reduce(arrays["logits"], -1, keepdims=True)).mean(0)
        curves = {name: arrays[f"turned_{name}"] for name in MEASURES}
        metrics[sites] = {**scalars, "predicted": probabilities.argmax(-1), **curves}
    sentences = [
        f"Data: {data.source}; unrelated images: {other}. Angles: {', '.join(f'{a:.0f}' for a in angles)} degrees."
    ]
    sentences += [
        f"{NAMES[sites].capitalize()}: the rotated digit 1 is read as {m['predicted'].tolist()}; over many digits the "
        f"mutual information rises from {m['mutual_information'][0]:.3f} upright to "
        f"{m['mutual_information'].max():.3f} nats, the entropy from {m['entropy'][0]:.3f} to {m['entropy'].max():.3f}."
        for sites, m in metrics.items()
    ]
    return Findings(
        title="Classification: a rotated digit",
        sentences=sentences,
        metrics=metrics,
        tables={"Test images and images of no digit": _table(metrics)},
        figures={
            "rotation": lambda: _scatter(angles, results),
            "rotation_uncertainty": lambda: _curves(angles, results),
        },
    )


def _table(metrics: dict[str, Any]) -> str:
    rows = [
        {
            "network": NAMES[sites],
            "error, averaged weights (%)": 100 * m["error_standard"],
            "error, MC dropout (%)": 100 * m["error_mc"],
            "log-likelihood, averaged": m["log_likelihood_standard"],
            "log-likelihood, MC": m["log_likelihood_mc"],
            "AUROC, 1 - max probability (averaged)": m["auroc_standard"],
            "AUROC, entropy": m["auroc_entropy"],
            "AUROC, mutual information": m["auroc_mutual_information"],
        }
        for sites, m in metrics.items()
    ]
    return markdown_table(rows)


def _scatter(angles: Array, results: dict[DropoutLayers, Arrays]) -> Any:
    """Softmax input and output of the three classes most often on top, a point for each draw."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 2.6 * len(results) + 1.2), layout="constrained")
    rows = figure.subplots(len(results), 2, squeeze=False, sharex=True)
    jitter = (angles[1] - angles[0]) * 0.22
    for axes, (sites, arrays) in zip(rows, results.items(), strict=True):
        logits = arrays["logits"]
        outputs = np.exp(logits - np.logaddexp.reduce(logits, -1, keepdims=True))
        classes = np.argsort(np.bincount(logits.argmax(-1).ravel(), minlength=10))[::-1][:3]
        jittered = angles + np.random.default_rng(0).uniform(-jitter, jitter, logits.shape[:2])
        for ax, values, what in zip(axes, (logits, outputs), ("input", "output"), strict=True):
            for kind, colour in zip(classes, ("#2b6cb0", "#dd6b20", "#2f855a"), strict=True):
                ax.scatter(jittered, values[..., kind], s=3, alpha=0.35, lw=0, color=colour, label=f"class {kind}")
            ax.set(ylabel=f"softmax {what}", xticks=angles)
            ax.set_xticklabels([f"{a:.0f}°" for a in angles])
        axes[0].set_title(NAMES[sites].capitalize())
        axes[1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5), markerscale=3)
    for ax in rows[-1]:
        for angle, image in zip(angles, next(iter(results.values()))["images"], strict=True):
            width = 0.9 / len(angles)
            left = (angle - angles[0] + jitter) / (angles[-1] - angles[0] + 2 * jitter)
            inset = ax.inset_axes((left * 0.955 + 0.0225 - width / 2, -0.36, width, 0.25))
            inset.imshow(image, cmap="gray_r")
            inset.axis("off")
        ax.set_xlim(angles[0] - 2 * jitter, angles[-1] + 2 * jitter)
    return figure


def _curves(angles: Array, results: dict[DropoutLayers, Arrays]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.0), layout="constrained")
    for ax, name in zip(figure.subplots(1, 3, sharex=True), MEASURES, strict=True):
        for sites, arrays in results.items():
            ax.plot(angles, arrays[f"turned_{name}"], "o-", ms=3, label=NAMES[sites])
        unit = "" if name == "variation_ratio" else " (nats)"
        ax.set(title=f"{name.replace('_', ' ').capitalize()}{unit}", xlabel="degrees", ylim=(0, None))
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure
