r"""Two kinds of uncertainty
========================

What varies by itself (aleatoric) and what is not known yet (epistemic), apart. The noise of these data grows to the
right; there are none beyond -2 and 2, and none around -0.4.
"""

# %%
# A network with two outputs, the mean and the logarithm of the noise variance, trained on the paper's objective.
import pathlib
import sys

import matplotlib.pyplot as plt
import torch
from torch import nn

import dropbayes as db
from dropbayes.training import Optimization

torch.manual_seed(0)
x = torch.cat([torch.rand(150) * 1.2 - 2, torch.rand(250) * 2])[:, None]


def noise_std(x):
    return 0.05 + 0.15 * (x + 2)


y = torch.sin(2 * x) + noise_std(x) * torch.randn_like(x)

net = nn.Sequential(
    nn.Linear(1, 100), nn.ReLU(), nn.Dropout(0.05), nn.Linear(100, 100), nn.ReLU(), nn.Dropout(0.05), nn.Linear(100, 2)
)
likelihood = db.HeteroscedasticGaussian()
prior = db.Prior(length_scale=0.1)
history = db.fit(
    net, x, y, likelihood=likelihood, prior=prior, epochs=300, optimization=Optimization(learning_rate=3e-3)
)

# %%
# One prediction has both parts. Their variances add up to the total.
grid = torch.linspace(-3, 4, 300)[:, None]
prediction = db.predict(net, grid, n_draws=200, likelihood=likelihood)
line = grid[:, 0]
mean, epistemic, total = (t[:, 0] for t in (prediction.mean, prediction.epistemic.sqrt(), prediction.variance.sqrt()))

figure, (above, below) = plt.subplots(2, 1, figsize=(7, 5.4), layout="constrained", sharex=True, height_ratios=(1.6, 1))
above.plot(x, y, ".", color="0.6", markersize=3, label="data")
above.fill_between(line, mean - 2 * total, mean + 2 * total, color="#1f6fb4", alpha=0.15, lw=0, label="total, ± 2 std")
above.fill_between(
    line, mean - 2 * epistemic, mean + 2 * epistemic, color="#1f6fb4", alpha=0.4, lw=0, label="epistemic, ± 2 std"
)
above.plot(line, mean, color="#123a5e", lw=1.4, label="mean")
above.set(ylim=(-4, 4), ylabel="y", title="The light band is the outcome's, the dark one the function's")
above.legend(frameon=False, ncols=2, fontsize="small")
below.plot(line, epistemic, color="#1f6fb4", label="epistemic")
below.plot(line, prediction.aleatoric[:, 0].sqrt(), color="#d1621b", label="aleatoric")
inside = line[(line > -2) & (line < 2)]
below.plot(inside, noise_std(inside), color="black", lw=1, ls=":", label="true noise")
below.set(xlabel="x", ylabel="standard deviation", ylim=(0, None))
below.legend(frameon=False, fontsize="small")
for axes in (above, below):
    for start, end in ((-3, -2), (-0.8, 0), (2, 4)):
        axes.axvspan(start, end, color="0.94", zorder=-1)
    axes.set_xlim(-3, 4)
    axes.spines[["top", "right"]].set_visible(False)

# %%
# Inside the data the noise is found, smoothed. Where there are no data (shaded) the epistemic part rises outwards,
# but hardly in the gap: a dropout network is over-confident between clusters. That is one of its limits.

print("epistemic std at -1.4, -0.4 (gap), 1 and 3.5:")
print(db.predict(net, torch.tensor([[-1.4], [-0.4], [1.0], [3.5]]), likelihood=likelihood).epistemic[:, 0].sqrt())

# sphinx_gallery_start_ignore
# Run as a script, the figure goes to a folder; the gallery collects it itself.
if "sphinx_gallery" not in sys.modules:
    folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "out")
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "two_kinds.png", dpi=120)
# sphinx_gallery_end_ignore
