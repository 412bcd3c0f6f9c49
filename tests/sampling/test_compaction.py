"""Draws without their dropped units are the draws with them."""

import pytest
import torch
from torch import nn

from dropbayes.sampling.compaction import compact_draws
from dropbayes.sampling.masks import Keys, keep_mask

KEYS = Keys(seed=3, n_draws=12)
DRAWS = range(2, 11)


def masked_draws(layers, x, draws):
    """Every product in full, a mask on every unit."""
    h, site = x.expand(len(draws), *x.shape), 0
    for layer in layers:
        if isinstance(layer, nn.Dropout):
            mask = keep_mask(
                KEYS,
                site,
                drop_prob=layer.p,
                draws=draws,
                rows=None,
                shape=(h.shape[-1],),
                dtype=x.dtype,
                device=x.device,
            )
            h, site = h * mask[:, None, :] / (1 - layer.p), site + 1
        else:
            h = layer(h)
    return h


NETWORKS = {
    "dropout before the first layer": [nn.Dropout(0.3), nn.Linear(5, 40), nn.ReLU(), nn.Dropout(0.5), nn.Linear(40, 2)],
    "a prefix without draws": [nn.Linear(5, 30), nn.Tanh(), nn.Dropout(0.5), nn.Linear(30, 20, bias=False), nn.SiLU(), nn.Dropout(0.5), nn.Linear(20, 3)],
    "a layer without dropout": [nn.Dropout(0.5), nn.Linear(5, 30), nn.ReLU(), nn.Linear(30, 20), nn.Dropout(0.4), nn.Linear(20, 1)],
    "an activation after dropout that moves zero": [nn.Linear(5, 30), nn.Dropout(0.5), nn.Sigmoid(), nn.Linear(30, 2)],
    "dropout after dropout": [nn.Linear(5, 30), nn.ReLU(), nn.Dropout(0.5), nn.Dropout(0.2), nn.Linear(30, 2)],
    "dropout at the end": [nn.Linear(5, 30), nn.ReLU(), nn.Dropout(0.5), nn.Linear(30, 8), nn.Dropout(0.5)],
    "no dropout": [nn.Linear(5, 30), nn.ReLU(), nn.Linear(30, 8)],
    "everything dropped": [nn.Linear(5, 30), nn.Dropout(1 - 1e-9), nn.Linear(30, 2)],
}  # fmt: skip


@pytest.mark.parametrize("name", NETWORKS)
@torch.no_grad()
def test_a_compact_draw_is_the_masked_draw(name):
    layers, x = [layer.double() for layer in NETWORKS[name]], torch.randn(7, 5, dtype=torch.float64)
    outputs, variance = compact_draws(layers, x, KEYS, draws=DRAWS, integrate_last=False)
    torch.testing.assert_close(outputs, masked_draws(layers, x, DRAWS))
    assert variance is None


@torch.no_grad()
def test_an_integrated_last_mask_has_the_moments_of_many_drawn_ones():
    layers = [layer.double() for layer in NETWORKS["a prefix without draws"]]
    x = torch.randn(4, 5, dtype=torch.float64)
    outputs, variance = compact_draws(layers, x, KEYS, draws=DRAWS, integrate_last=True)
    h = masked_draws(layers[:5], x, DRAWS)
    torch.testing.assert_close(outputs, layers[-1](h))
    z = (torch.rand(200_000, 20, dtype=torch.float64) < 0.5) / 0.5
    for_draw = torch.stack(
        [compact_draws(layers, x, KEYS, draws=range(t, t + 1), integrate_last=True)[1] for t in DRAWS]
    )
    sampled = torch.stack([((z * h[0, row]) @ layers[-1].weight.t()).var(0) for row in range(4)])
    torch.testing.assert_close(for_draw[0], sampled, rtol=0.03, atol=0)
    torch.testing.assert_close(variance, for_draw.mean(0))
