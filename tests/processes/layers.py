"""The covariances under test, and inputs for them."""

import torch

from dropbayes.processes import (
    Cosine,
    Erf,
    Identity,
    ReLU,
    Sigmoid,
    Step,
    TanH,
)

CLOSED_FORMS = [ReLU, Step, Erf, Cosine, Identity]


ALL = [*CLOSED_FORMS, TanH, Sigmoid]


SCALES = [(1.0, 1.0), (0.7, 0.0), (2.0, 0.5), (1.3, 2.0)]


def inputs(n_rows=6, n_inputs=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n_rows, n_inputs, dtype=torch.float64, generator=generator)
