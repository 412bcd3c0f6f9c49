"""Small dropout networks and the bundled data of scikit-learn to train them on."""

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
