"""The families of noise, and one layer of each kind."""

import torch

from dropbayes.layers import (
    BernoulliNoise,
    ConcreteNoise,
    Conv1d,
    Conv2d,
    Conv3d,
    Embedding,
    GaussianNoise,
    Linear,
    MixtureNoise,
)

DTYPE = torch.float64


NOISES = {
    "bernoulli": BernoulliNoise(0.3),
    "dropped bias": BernoulliNoise(0.3, drop_bias=True),
    "non-diminishing": BernoulliNoise(0.3, std=0.2),
    "non-diminishing, dropped bias": BernoulliNoise(0.3, std=0.2, drop_bias=True),
    "concrete": ConcreteNoise(0.3, temperature=1e-3),
    "gaussian": GaussianNoise(0.5),
    "mixture": MixtureNoise(3, std=0.3, temperature=1e-2),
    "low-rank mixture": MixtureNoise(3, rank=2, std=0.3, temperature=1e-2),
}


def layers(noise):
    yield Linear(4, 3, noise=noise), torch.randn(4)
    yield Linear(4, 3, noise=noise, bias=False), torch.randn(2, 4)
    yield Conv1d(4, 6, 2, noise=noise, groups=2), torch.randn(4, 3)
    yield Conv2d(2, 3, 2, noise=noise, stride=2, padding=1), torch.randn(2, 3, 4)
    yield Conv3d(2, 2, 2, noise=noise), torch.randn(2, 2, 2, 3)
    yield Embedding(5, 3, noise=noise), torch.tensor([1, 4, 1, 2])
