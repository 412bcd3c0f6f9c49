"""Small dropout networks trained on scikit-learn's bundled data, and draws from them with explicit masks."""

from collections.abc import Callable
from itertools import pairwise

import sklearn.datasets
import torch
from torch import Tensor, nn


def standardised(name: str) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a bundled data set: features standardised, regression targets too."""
    x, y = getattr(sklearn.datasets, f"load_{name}")(return_X_y=True)
    x = torch.tensor((x - x.mean(0)) / (x.std(0) + 1e-9), dtype=torch.float32)
    if name == "diabetes":
        return x, torch.tensor((y - y.mean()) / y.std(), dtype=torch.float32)
    return x, torch.tensor(y)


def network(*sizes: int, drop_prob: float, seed: int = 0) -> nn.Sequential:
    """A ReLU network with dropout before every weight layer but the first."""
    torch.manual_seed(seed)
    hidden = [nn.Sequential(nn.Linear(a, b), nn.ReLU(), nn.Dropout(drop_prob)) for a, b in pairwise(sizes[:-1])]
    return nn.Sequential(*[layer for block in hidden for layer in block], nn.Linear(*sizes[-2:]))


def trained(net: nn.Sequential, x: Tensor, y: Tensor, *, steps: int, lr: float = 3e-3, batch: int = 128, seed: int = 0):
    """The network after some steps of Adam on the cross-entropy (integer y) or the squared error (real y)."""
    torch.manual_seed(seed)
    optimiser = torch.optim.Adam(net.parameters(), lr=lr, weight_decay=1e-4)
    net.train()
    for _ in range(steps):
        rows = torch.randint(len(x), (min(batch, len(x)),))
        output = net(x[rows])
        if y.is_floating_point():
            loss = nn.functional.mse_loss(output.squeeze(-1), y[rows])
        else:
            loss = nn.functional.cross_entropy(output, y[rows])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return net


def function_draw(net: nn.Sequential, seed: int) -> Callable[[Tensor], Tensor]:
    """One draw as a function: a mask per site, the same for every row and every call."""
    generator = torch.Generator().manual_seed(seed)
    widths = [layer.out_features for layer in net if isinstance(layer, nn.Linear)]
    rates = [layer.p for layer in net if isinstance(layer, nn.Dropout)]
    masks = [torch.rand(w, generator=generator).ge(rate) / (1 - rate) for w, rate in zip(widths, rates, strict=False)]

    def draw(x: Tensor) -> Tensor:
        sites = iter(masks)
        for layer in net:
            x = x * next(sites) if isinstance(layer, nn.Dropout) else layer(x)
        return x

    return draw


def shared_draws(net: nn.Sequential, x: Tensor, n_draws: int, *, seed: int = 0) -> Tensor:
    """Draws of the network's output with one mask per draw for all rows, `[draw, row, output]`."""
    with torch.no_grad():
        return torch.stack([function_draw(net, seed * 1_000_003 + index)(x) for index in range(n_draws)])


def row_draws(net: nn.Sequential, x: Tensor, n_draws: int, *, seed: int = 0) -> Tensor:
    """Draws of the network's output with a fresh mask for every row, `[draw, row, output]`."""
    torch.manual_seed(seed)
    net.train()
    with torch.no_grad():
        return torch.stack([net(x) for _ in range(n_draws)])
