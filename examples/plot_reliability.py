"""Reliability diagram
===================

When a classifier says 80 %, is it right four times in five? The diagram sets claim against frequency; the bars show two
standard errors, so that chance is not read as a fault.
"""

# %%
# A network for the handwritten digits of scikit-learn, seen through noise so that there is something to be unsure of.
import pathlib
import sys

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

import dropbayes as db
from dropbayes import calibration, plots, scores

torch.manual_seed(0)
images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
order = torch.randperm(len(labels))
x, y = (images / 16).float()[order], labels[order]
x = x + 0.4 * torch.randn(x.shape)
train, held_out, test = slice(0, 500), slice(500, 900), slice(900, None)

net = nn.Sequential(
    nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.5), nn.Linear(256, 256), nn.ReLU(), nn.Dropout(0.5), nn.Linear(256, 10)
)
optimiser = torch.optim.Adam(net.parameters(), lr=2e-3)
for _ in range(250):
    optimiser.zero_grad()
    nn.functional.cross_entropy(net(x[train]), y[train]).backward()
    optimiser.step()
net.eval()

# %%
# Three claims of the same network: its plain output, the mean over draws, and the mean over draws after fitting one
# temperature on held-out images.
with torch.no_grad():
    plain = net(x[test]).softmax(-1)
logits = db.draws(net, x, n_draws=100)
temperature = calibration.temperature(logits[:, held_out], y[held_out])
claims = {
    "one pass, no dropout": plain,
    "mean of 100 draws": logits[:, test].softmax(-1).mean(0),
    f"draws, temperature {temperature:.2f}": (logits[:, test] / temperature).softmax(-1).mean(0),
}

figure, ax = plt.subplots(figsize=(5.2, 5.2), layout="constrained")
for name, probabilities in claims.items():
    error = scores.expected_calibration_error(probabilities, y[test])
    plots.reliability_diagram(
        calibration.class_reliability(probabilities, y[test]), label=f"{name}: ECE {error:.3f}", ax=ax
    )
ax.set_title("Digits seen through noise")

# sphinx_gallery_start_ignore
# Run as a script, the figure goes to a folder; the gallery collects it itself.
if "sphinx_gallery" not in sys.modules:
    folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "out")
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "reliability.png", dpi=120)
# sphinx_gallery_end_ignore
