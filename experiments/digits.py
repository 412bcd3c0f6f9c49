"""The page's digit reader: a small LeNet with dropout before its last layer, in 8-bit weights.

`python -m experiments.digits` trains it on MNIST and writes the file that the page carries.
"""

from __future__ import annotations

import functools
import pathlib

import torch
from torch import Tensor, nn

from dropbayes.app import page
from experiments.lenet import lenet, train

__all__ = ["digit_network", "quantised_weights", "restored_weights"]

WEIGHTS = pathlib.Path(page.__file__).parent / "web" / "lenet.safetensors"
CHANNELS, HIDDEN, STEPS = (8, 16), 128, 7500
LARGEST = 127  # of an 8-bit weight


def quantised_weights(net: nn.Module) -> dict[str, Tensor]:
    """The weights as 8-bit integers with a scale for each output unit, and the biases as they are.

    Example:
        >>> layer = nn.Linear(2, 1)
        >>> _ = layer.weight.data.copy_(torch.tensor([[1.0, -0.5]]))
        >>> quantised_weights(layer)["weight"]
        tensor([[127, -64]], dtype=torch.int8)
    """
    tensors: dict[str, Tensor] = {}
    for name, value in net.state_dict().items():
        if name.endswith("bias"):
            tensors[name] = value.float()
            continue
        scale = value.flatten(1).abs().amax(1).clamp(min=1e-12) / LARGEST
        tensors[name] = (value / scale.view(-1, *[1] * (value.dim() - 1))).round().to(torch.int8)
        tensors[f"{name.removesuffix('weight')}scale"] = scale
    return tensors


def restored_weights(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state of a network from what `quantised_weights` made of it: each weight off by half a scale at most."""
    state = {}
    for name, value in tensors.items():
        if name.endswith("weight"):
            scale = tensors[f"{name.removesuffix('weight')}scale"]
            value = value * scale.view(-1, *[1] * (value.dim() - 1))
        if not name.endswith("scale"):
            state[name] = value
    return state


@functools.cache
def _bundled_weights() -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(WEIGHTS)


def digit_network() -> nn.Sequential:
    """The trained network that reads the page's digits, `[row, 1, 28, 28]` with ink at 1, in evaluation mode.

    Example:
        >>> digit_network()(torch.zeros(1, 1, 28, 28)).shape
        torch.Size([1, 10])
    """
    net = lenet("last", channels=CHANNELS, hidden=HIDDEN)
    net.load_state_dict(restored_weights(_bundled_weights()))
    return net.eval()


def main() -> None:
    """Trains the network on MNIST and writes its weights beside the page's modules."""
    from safetensors.torch import save

    from dropbayes.runtime import files
    from experiments.datasets import digits

    data = digits("mnist")
    net = train(lenet("last", channels=CHANNELS, hidden=HIDDEN), data.x, data.y, n_steps=STEPS)
    files.write_bytes(WEIGHTS, save(quantised_weights(net)))
    with torch.no_grad():
        errors = (digit_network()(data.x_test).argmax(-1) != data.y_test).double().mean().item()
    print(f"{WEIGHTS.stat().st_size / 1000:.0f} kB; {100 * errors:.2f} % of the test digits are misread")


if __name__ == "__main__":
    main()
