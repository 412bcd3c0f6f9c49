r"""Adversarial images: does uncertainty rise with a perturbation made to mislead? [GG16, section "Insights and
Applications"] leaves the question open.

LeNet with dropout before every layer, by elements and by channels, is attacked through its averaged weights: one signed
gradient step (FGSM) or many small ones (PGD), at several strengths, from the paper's one grey level on. The answer is
the area under the ROC curve of detecting attacked images by their uncertainty, 0.5 being chance; random signs of the
same strength are the control.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from dropbayes.likelihoods import Categorical
from dropbayes.predictive import predict
from experiments import datasets
from experiments.lenet import NAMES, DropoutLayers, lenet, train
from experiments.record import Arrays, Findings, Record, markdown_table

MEASURES = ("entropy", "mutual_information", "variation_ratio")
PGD_STEPS = 10
PGD_STEP_SHARE = 0.25
"""Each of the 10 steps moves by a quarter of the strength, so the bound is reached and the image still moves on it."""


@dataclass(frozen=True)
class Settings:
    """Sizes of LeNet and its training from the paper's digits experiment; the attacks are not in the paper.

    Attributes:
        images: The digits to use, as in the rotation experiment.
        networks: Where each network has dropout.
        channels: The numbers of channels of the two convolutions.
        hidden: The number of units before the last layer.
        n_train: The largest number of training images.
        n_steps: The number of steps, each on a batch of 64.
        learning_rate: The base learning rate; scikit-learn's digits, which are blurred, need a lower one.
        strengths: The largest change of a pixel, pixels being in [0, 1]; the paper's is one grey level of 255.
        n_test: The number of images to attack.
        n_draws: The number of draws of each prediction.
        seed: The seed of weights, batches and masks.
    """

    images: Literal["auto", "mnist", "digits"] = "mnist"
    networks: tuple[DropoutLayers, ...] = ("all", "channels")
    channels: tuple[int, int] = (20, 50)
    hidden: int = 500
    n_train: int = 60_000
    n_steps: int = 20_000
    learning_rate: float = 0.01
    strengths: tuple[float, ...] = (1 / 255, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3)
    n_test: int = 2000
    n_draws: int = 100
    seed: int = 0

    @classmethod
    def quick(cls) -> Settings:
        """Fewer images, steps and draws."""
        return cls(
            images="auto", n_train=10_000, n_steps=700, strengths=(1 / 255, 0.05, 0.1, 0.3), n_test=150, n_draws=50
        )

    @classmethod
    def tiny(cls) -> Settings:
        """For tests."""
        return cls(
            images="digits", networks=("all",), learning_rate=0.005, channels=(6, 12), hidden=64, n_train=1297,
            n_steps=250, strengths=(0.05, 0.15), n_test=60, n_draws=20,
        )  # fmt: skip


def signed_gradient(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The sign of the gradient of the loss with respect to the image, through averaged weights."""
    image = x.clone().requires_grad_()
    loss = nn.functional.cross_entropy(net.eval()(image), y)
    return torch.autograd.grad(loss, image)[0].sign()


def fgsm(net: nn.Module, x: Tensor, y: Tensor, *, strength: float) -> Tensor:
    """Images moved by `strength` along the sign of the gradient (Goodfellow et al. 2015), kept in [0, 1]."""
    return (x + strength * signed_gradient(net, x, y)).clamp(0, 1)


def pgd(net: nn.Module, x: Tensor, y: Tensor, *, strength: float) -> Tensor:
    """Images moved in `PGD_STEPS` small signed steps, no pixel by more than `strength` (Madry et al. 2018)."""
    image = x
    for _ in range(PGD_STEPS):
        image = image + PGD_STEP_SHARE * strength * signed_gradient(net, image, y)
        image = image.clamp(x - strength, x + strength).clamp(0, 1)
    return image


def random_signs(net: nn.Module, x: Tensor, y: Tensor, *, strength: float) -> Tensor:
    """Images moved by `strength` along random signs: the control."""
    del net, y
    signs = torch.randint(2, x.shape, generator=torch.Generator().manual_seed(0)) * 2.0 - 1
    return (x + strength * signs.to(x.device)).clamp(0, 1)


ATTACKS: dict[str, Callable[..., Tensor]] = {"FGSM": fgsm, "PGD": pgd, "random signs": random_signs}


def run(settings: Settings, record: Record, *, device: torch.device) -> Findings:
    """Trains, attacks and measures; see the module's docstring."""
    data = datasets.digits(settings.images)
    results = {
        sites: record.stage(sites, lambda sites=sites: _stage(settings, record, data, sites, device))
        for sites in settings.networks
    }
    return _findings(settings, data, results)


def _stage(
    settings: Settings, record: Record, data: datasets.Images, sites: DropoutLayers, device: torch.device
) -> Arrays:
    from sklearn.metrics import roc_auc_score

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
    x, y = data.x_test[: settings.n_test].to(device), data.y_test[: settings.n_test].to(device)
    shape = (len(ATTACKS), len(settings.strengths) + 1)
    arrays: Arrays = {f"auroc_{name}": np.full(shape, 0.5) for name in MEASURES}
    arrays |= {f"mean_{name}": np.zeros(shape) for name in MEASURES}
    arrays |= {"accuracy_averaged": np.zeros(shape), "accuracy_mc": np.zeros(shape)}
    clean = predict(net, x, n_draws=settings.n_draws, likelihood=Categorical())
    examples = []
    for row, attack in enumerate(ATTACKS.values()):
        for column, strength in enumerate((0.0, *settings.strengths)):
            images = attack(net, x, y, strength=strength) if strength else x
            prediction = predict(net, images, n_draws=settings.n_draws, likelihood=Categorical()) if strength else clean
            examples.append(images[0, 0].cpu().numpy())
            with torch.no_grad():
                correct = net(images).argmax(-1) == y
            arrays["accuracy_averaged"][row, column] = correct.float().mean().item()
            arrays["accuracy_mc"][row, column] = (prediction.mean.argmax(-1) == y).float().mean().item()
            event = np.r_[np.zeros(len(y)), np.ones(len(y))]
            for name in MEASURES:
                both = torch.cat([getattr(clean, name), getattr(prediction, name)]).cpu().numpy()
                arrays[f"mean_{name}"][row, column] = both[len(y) :].mean()
                arrays[f"auroc_{name}"][row, column] = roc_auc_score(event, both)
    arrays["examples"] = np.stack(examples).reshape(*shape, *x.shape[-2:])
    return arrays


def _findings(settings: Settings, data: datasets.Images, results: dict[DropoutLayers, Arrays]) -> Findings:
    metrics: dict[str, Any] = {
        sites: {
            attack: {name: values[row] for name, values in arrays.items() if name != "examples"}
            for row, attack in enumerate(ATTACKS)
        }
        for sites, arrays in results.items()
    }
    sentences = [f"Data: {data.source}, {settings.n_test} test images, {settings.n_draws} draws."]
    sentences += [
        f"{attack}, {NAMES[sites]}: telling attacked from clean images by mutual information has an AUROC of "
        f"{scores['auroc_mutual_information'][1]:.2f} at strength {settings.strengths[0]:.3g} and "
        f"{scores['auroc_mutual_information'][-1]:.2f} at {settings.strengths[-1]:g}."
        for sites, by_attack in metrics.items()
        for attack, scores in by_attack.items()
    ]
    return Findings(
        title="Adversarial images",
        sentences=sentences,
        metrics=metrics,
        tables={
            f"Detection and accuracy: {NAMES[sites]}": _table(settings, by_attack)
            for sites, by_attack in metrics.items()
        },
        figures={"adversarial": lambda: _figure(settings, results)},
    )


def _table(settings: Settings, by_attack: dict[str, Any]) -> str:
    return markdown_table(
        [
            {
                "attack": attack,
                "strength": f"{strength:.3g}",
                "accuracy, averaged": scores["accuracy_averaged"][column],
                "accuracy, MC": scores["accuracy_mc"][column],
                "mutual information": scores["mean_mutual_information"][column],
                **{f"AUROC {name.replace('_', ' ')}": scores[f"auroc_{name}"][column] for name in MEASURES},
            }
            for attack, scores in by_attack.items()
            for column, strength in enumerate(settings.strengths, start=1)
        ]
    )


def _figure(settings: Settings, results: dict[DropoutLayers, Arrays]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 2.2 + 3.0 * len(results)), layout="constrained")
    *tops, bottom = figure.subfigures(len(results) + 1, 1, height_ratios=[1.4] * len(results) + [1])
    strengths = np.r_[0.0, settings.strengths]
    for top, (sites, arrays) in zip(tops, results.items(), strict=True):
        top.suptitle(NAMES[sites].capitalize(), fontsize=10)
        for row, (ax, attack) in enumerate(zip(top.subplots(1, len(ATTACKS), sharey=True), ATTACKS, strict=True)):
            for name in MEASURES:
                ax.plot(strengths, arrays[f"auroc_{name}"][row], "o-", ms=3, label=f"AUROC, {name.replace('_', ' ')}")
            ax.plot(strengths, arrays["accuracy_mc"][row], "k--", lw=1, label="accuracy, MC dropout")
            ax.axhline(0.5, color="0.7", lw=0.8, zorder=0)
            ax.set(title=attack[0].upper() + attack[1:], xlabel="largest change of a pixel", ylim=(-0.03, 1.03))
    tops[0].axes[-1].legend(loc="lower left", fontsize=8)
    panels = bottom.subplots(len(ATTACKS), len(strengths), squeeze=False)
    examples = next(iter(results.values()))["examples"]
    for row, attack in enumerate(ATTACKS):
        for column, strength in enumerate(strengths):
            ax = panels[row, column]
            ax.imshow(examples[row, column], cmap="gray_r", vmin=0, vmax=1)
            ax.set(xticks=[], yticks=[])
            ax.spines[:].set_visible(False)
            if column == 0:
                ax.set_ylabel(attack, rotation=0, ha="right", va="center")
            if row == 0:
                ax.set_title(f"{strength:.2g}", fontsize=8, loc="center")
    return figure
