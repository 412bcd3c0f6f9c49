"""Predictive band with draws
==========================

A network with dropout is a distribution over functions. Its mean and its band say where it is unsure; its draws, each
one function, say what it considers possible there.
"""

# %%
# Train a network on noisy observations with a gap.
import pathlib
import sys

import matplotlib.pyplot as plt
import torch
from torch import nn

import dropbayes as db
from dropbayes import plots

torch.manual_seed(0)
x = torch.cat([torch.rand(40) * 2.4 - 3, torch.rand(30) * 2 + 1])[:, None]
noise = 0.1
y = torch.sin(2 * x) * torch.exp(0.2 * x) + noise * torch.randn_like(x)

net = nn.Sequential(
    nn.Linear(1, 200), nn.ReLU(), nn.Dropout(0.1), nn.Linear(200, 200), nn.ReLU(), nn.Dropout(0.1), nn.Linear(200, 1)
)
optimiser = torch.optim.Adam(net.parameters(), lr=1e-3, weight_decay=1e-5)
for _ in range(2000):
    optimiser.zero_grad()
    nn.functional.mse_loss(net(x), y).backward()
    optimiser.step()

# %%
# One call gives the moments. The total variance adds the noise's to that of the draws; the draws share their masks over
# all rows, so each is a smooth function.
grid = torch.linspace(-4.5, 4.5, 300)[:, None]
prediction = db.predict(net, grid, n_draws=200, likelihood=db.Gaussian(precision=noise**-2))
draws = db.draws(net, grid, n_draws=200)[:6, :, 0]

figure, ax = plt.subplots(figsize=(7, 3.8), layout="constrained")
plots.predictive_band(
    grid, prediction.mean.squeeze(), std=prediction.std.squeeze(), draws=draws, observed=(x, y), ax=ax
)
ax.set_title("The band, and six of the functions it stands for")
ax.legend(frameon=False, ncols=5, loc="upper center", bbox_to_anchor=(0.5, -0.14), fontsize="small")

# sphinx_gallery_start_ignore
# Run as a script, the figure goes to a folder; the gallery collects it itself.
if "sphinx_gallery" not in sys.modules:
    folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "out")
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "predictive_band.png", dpi=120)
# sphinx_gallery_end_ignore
