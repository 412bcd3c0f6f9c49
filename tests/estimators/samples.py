"""Rows to learn, and settings with which learning takes a moment."""

import numpy as np

QUICK = {
    "hidden": (20,),
    "drop_prob": 0.05,
    "weight_decay": 1e-4,
    "n_steps": 50,
    "n_folds": 2,
    "n_draws": 20,
    "n_networks": 2,
    "min_epochs": 1,
    "device": "cpu",
    "learning_rate": 0.02,
}
PLAIN = QUICK | {"noise": "constant"}  # a shape of the noise takes longer to fit than these networks


def toy(n: int = 150, *, noise: float = 0.2, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    source = np.random.default_rng(seed)
    x = source.normal(size=(n, 2))
    return x, 100 + 20 * np.sin(x[:, 0]) + 20 * noise * source.normal(size=n)
