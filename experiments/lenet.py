r"""LeNet with dropout nowhere, before its last layer or before every layer, trained as in the authors' files.

Before a convolution the authors drop single elements of the feature maps ("all"): such a mask differs from patch to
patch and is no draw of any $q(\mathbf W)$. A mask of whole channels is one ("channels"): it drops rows of the
convolution's weight matrix.
"""

from __future__ import annotations

import math
import pathlib
from typing import Literal

import torch
from torch import Tensor, nn

from dropbayes.layers import Prior, keep_probs
from dropbayes.likelihoods import Categorical
from dropbayes.training import Checkpoint, InverseDecay, Optimization, fit

__all__ = ["NAMES", "DropoutLayers", "lenet", "train"]

DropoutLayers = Literal["none", "last", "all", "channels"]
NAMES: dict[str, str] = {
    "none": "no dropout",
    "last": "dropout before the last layer",
    "all": "element-wise dropout before every layer but the first",
    "channels": "channel dropout before every layer",
}


def lenet(
    sites: DropoutLayers, *, channels: tuple[int, int] = (20, 50), hidden: int = 500, seed: int = 0
) -> nn.Sequential:
    """LeNet for 28 x 28 pixels: no non-linearity after its convolutions but the pooling, as in Caffe's.

    Args:
        sites: Where units are dropped, with probability 0.5: "none", before the "last" layer, before "all" but the
            first (a pixel is not dropped), or before every layer with masks of whole "channels" in the convolutions.
            The one channel of the image is dropped with probability 0.05: a draw without it sees no image.
        channels: The numbers of channels of the two convolutions; the paper has 20 and 50.
        hidden: The number of units before the last layer; the paper has 500.
        seed: The seed of the weights.

    Example:
        >>> lenet("last", channels=(2, 3), hidden=4)(torch.zeros(1, 1, 28, 28)).shape
        torch.Size([1, 10])
    """
    if sites not in NAMES:
        raise ValueError(f"`sites` must be one of {', '.join(NAMES)}; got {sites!r}.")
    image: list[nn.Module] = [nn.Dropout2d(0.05)] if sites == "channels" else []
    maps: dict[str, list[nn.Module]] = {"all": [nn.Dropout(0.5)], "channels": [nn.Dropout2d(0.5)]}
    units = [nn.Dropout(0.5)] if sites in maps else []
    last = [] if sites == "none" else [nn.Dropout(0.5)]
    net = nn.Sequential(
        *image, nn.Conv2d(1, channels[0], 5), nn.MaxPool2d(2),
        *maps.get(sites, []), nn.Conv2d(channels[0], channels[1], 5), nn.MaxPool2d(2), nn.Flatten(),
        *units, nn.Linear(channels[1] * 16, hidden), nn.ReLU(), *last,
        nn.Linear(hidden, 10),
    )  # fmt: skip
    source = torch.Generator().manual_seed(seed)
    for layer in net:
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            bound = math.sqrt(3 / layer.weight[0].numel())
            nn.init.uniform_(layer.weight, -bound, bound, generator=source)
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    return net


def train(
    net: nn.Sequential,
    x: Tensor,
    y: Tensor,
    *,
    n_steps: int,
    batch_size: int = 64,
    learning_rate: float = 0.01,
    weight_decay: float = 5e-4,
    seed: int = 0,
    device: torch.device | str = "cpu",
    checkpoint: pathlib.Path | None = None,
) -> nn.Sequential:
    r"""`net`, trained in place by momentum descent with $0.01 (1 + 10^{-4}\,\text{iteration})^{-0.75}$.

    Args:
        net: The network.
        x: The images.
        y: The labels.
        n_steps: The number of steps, rounded up to whole epochs.
        batch_size: The number of images per step.
        learning_rate: The base learning rate, doubled for biases.
        weight_decay: The weight decay of weights and biases, in the optimiser's sense.
        seed: The seed of batches and masks.
        device: The device to train on.
        checkpoint: The file that stores the state of an interrupted run.
    """
    device = torch.device(device)
    net.to(device)
    weights = [p for name, p in net.named_parameters() if not name.endswith("bias")]
    biases = [p for name, p in net.named_parameters() if name.endswith("bias")]
    groups = [{"params": weights, "lr": learning_rate}, {"params": biases, "lr": 2 * learning_rate}]
    # The prior whose decay of every stored parameter is that of the authors' files: l² p / N.
    scale = math.sqrt(weight_decay * len(y))
    per_layer = {name: scale * p**-0.5 for name, p in keep_probs(net, x[:1].to(device)).items()}
    prior = Prior(length_scale=scale, per_layer=per_layer, applies_to="stored")
    epochs = math.ceil(n_steps / math.ceil(len(y) / batch_size))
    fit(
        net,
        x,
        y,
        likelihood=Categorical(),
        prior=prior,
        epochs=epochs,
        batch_size=batch_size,
        device=device,
        seed=seed,
        checkpoint=None if checkpoint is None else Checkpoint(checkpoint, every=max(1, epochs // 10)),
        optimization=Optimization(
            torch.optim.SGD(groups, lr=learning_rate, momentum=0.9), schedule=InverseDecay(gamma=1e-4, power=0.75)
        ),
    )
    return net.eval()
