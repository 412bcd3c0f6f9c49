"""Torch's composite functions, with the random calls inside them intercepted."""

import torch
import torch.nn.functional as F

from tests.tracing.fixed_source import run_with_fixed_source


def test_the_gumbel_softmax_draws_its_exponentials_from_the_source():
    logits = torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64)
    out, source = run_with_fixed_source(F.gumbel_softmax, logits, 0.5)
    uniforms = torch.linspace(0.05, 0.95, 3, dtype=torch.float64)
    gumbels = -torch.log(-torch.log(uniforms))
    torch.testing.assert_close(out, ((logits + gumbels) / 0.5).softmax(0))
    assert [kind for kind, _, _ in source.kinds] == ["rand"]
