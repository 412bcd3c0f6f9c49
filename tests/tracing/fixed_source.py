"""A source of fixed masks and uniforms, and functions run with it."""

import torch

from dropbayes.tracing import Interception, Source


class FixedSource(Source):
    """A checkerboard of masks, and evenly spaced uniforms."""

    def __init__(self):
        self.kinds = []

    def keep(self, kind, drop_prob, shape, like):
        self.kinds.append((kind, drop_prob, shape))
        return (torch.arange(torch.Size(shape).numel()) % 2).reshape(shape).to(like.dtype)

    def uniform(self, kind, drop_prob, shape, device):
        self.kinds.append((kind, drop_prob, shape))
        return torch.linspace(0.05, 0.95, torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)


class WholeSource(FixedSource):
    """Masks that drop nothing and undo the scale."""

    def keep(self, kind, drop_prob, shape, like):
        return torch.full(shape, 1 - drop_prob, dtype=like.dtype)


def run_with_fixed_source(function, *args):
    source = FixedSource()
    with Interception(source):
        return function(*args), source
