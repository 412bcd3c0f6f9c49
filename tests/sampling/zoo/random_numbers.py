"""Stochastic depth and raw random numbers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.sampling.zoo.specimens import Module, flat, specimen

# Stochastic depth and raw random numbers ------------------------------------------------------------------------------


class DropPath(nn.Module):
    """Stochastic depth, by either of its two usual spellings."""

    def __init__(self, drop_prob: float, spelling: str) -> None:
        super().__init__()
        self.drop_prob, self.spelling = drop_prob, spelling

    def forward(self, x: Tensor) -> Tensor:
        if self.drop_prob == 0.0 or not self.training:
            return x
        keep_prob = 1 - self.drop_prob
        shape = (x.shape[0],) + (1,) * (x.dim() - 1)
        if self.spelling == "bernoulli":
            return x * x.new_empty(shape).bernoulli_(keep_prob).div_(keep_prob)
        return x / keep_prob * (keep_prob + torch.rand(shape, dtype=x.dtype, device=x.device)).floor_()


@specimen()
def drop_path_bernoulli():
    return Module(lambda m, x: x + m.p(m.a(x)), a=nn.Linear(6, 6), p=DropPath(0.3, "bernoulli")), flat()


@specimen(raw=True)
def drop_path_rand():
    return Module(lambda m, x: x + m.p(m.a(x)), a=nn.Linear(6, 6), p=DropPath(0.3, "rand")), flat()


@specimen(raw=True)
def gaussian_noise():
    return Module(
        lambda m, x: m.b(m.a(x) + 0.3 * torch.randn_like(m.a(x))), a=nn.Linear(6, 8), b=nn.Linear(8, 2)
    ), flat()


@specimen(raw=True)
def noise_in_a_buffer():
    def forward(m, x):
        noise = x.new_empty(x.shape[0], 8)
        noise.normal_(0, 0.5)
        return m.b(m.a(x) + noise)

    return Module(forward, a=nn.Linear(6, 8), b=nn.Linear(8, 2)), flat()


@specimen(raw=True)
def bernoulli_of_probabilities():
    return Module(
        lambda m, x: m.b(torch.bernoulli(torch.sigmoid(m.a(x)))), a=nn.Linear(6, 8), b=nn.Linear(8, 2)
    ), flat()


@specimen(raw=True)
def gumbel_softmax():
    return Module(lambda m, x: m.b(F.gumbel_softmax(m.a(x), tau=1.0)), a=nn.Linear(6, 8), b=nn.Linear(8, 2)), flat()


@specimen()
def binomial_mask():
    def forward(m, x):
        h = torch.relu(m.a(x))
        kept = torch.distributions.Binomial(probs=torch.tensor(0.7, device=x.device))
        return m.b(h * kept.sample(h.shape) / 0.7 if m.training else h)

    return Module(forward, a=nn.Linear(6, 8), b=nn.Linear(8, 2)), flat()


@specimen(raw=True)
def binomial_counts():
    def forward(m, x):
        count = torch.arange(8.0, device=x.device) % 4
        return m.b(torch.binomial(count.expand(len(x), 8), torch.sigmoid(m.a(x))))

    return Module(forward, a=nn.Linear(6, 8), b=nn.Linear(8, 2)), flat()


@specimen()
def shuffled_features():
    def forward(m, x):
        h = torch.tanh(m.a(x))
        return m.b(h[:, torch.randperm(8)] if m.training else h)

    return Module(forward, a=nn.Linear(6, 8), b=nn.Linear(8, 2)), flat()


@specimen(raw=True)
def one_feature_cut_out():
    def forward(m, x):
        cut = torch.randint(1, 6, (len(x), 1), device=x.device)
        return m.a(x.scatter(1, cut, 0.0)) + m.a(x) * torch.randint_like(x[:, :2], high=3)

    return Module(forward, a=nn.Linear(6, 2)), flat()


@specimen(raw=True)
def sampled_classes():
    def forward(m, x):
        return m.b(torch.distributions.Categorical(logits=m.a(x)).sample((2,)).movedim(0, 1)).sum(1)

    return Module(forward, a=nn.Linear(6, 5), b=nn.Embedding(5, 2)), flat()


@specimen(raw=True)
def patches_without_replacement():
    def forward(m, x):
        chosen = torch.multinomial(torch.sigmoid(m.a(x)), 3)
        return m.b(x.gather(1, chosen))

    return Module(forward, a=nn.Linear(6, 6), b=nn.Linear(3, 2)), flat()
