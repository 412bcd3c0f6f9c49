"""Risk against coverage
=====================

Keep the rows the network is surest of: how wrong is it on those? The curve shows every choice at once, and its area
ranks uncertainties by how well they know the errors.
"""

# %%
# A network fitted to 300 handwritten digits.
import pathlib
import sys

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

import dropbayes as db
from dropbayes import plots, scores

torch.manual_seed(0)
images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
order = torch.randperm(len(labels))
x, y = (images / 16).float()[order], labels[order]

net = nn.Sequential(
    nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10)
)
optimiser = torch.optim.Adam(net.parameters(), lr=3e-3)
for _ in range(150):
    optimiser.zero_grad()
    nn.functional.cross_entropy(net(x[:300]), y[:300]).backward()
    optimiser.step()
net.eval()

# %%
# Three uncertainties of the same prediction, one picture.
prediction = db.predict(net, x[300:], n_draws=100, likelihood=db.Categorical())
wrong = (prediction.mean.argmax(-1) != y[300:]).double()
uncertainties = {
    "predictive entropy": prediction.entropy,
    "mutual information": prediction.mutual_information,
    "variation ratio": prediction.variation_ratio,
}

figure, ax = plt.subplots(figsize=(6.4, 4), layout="constrained")
for name, uncertainty in uncertainties.items():
    plots.risk_coverage_diagram(scores.risk_coverage(uncertainty, wrong), label=name, ax=ax)
ax.set_title(f"{wrong.mean():.1%} of {len(wrong)} digits are wrong")

# sphinx_gallery_start_ignore
# Run as a script, the figure goes to a folder; the gallery collects it itself.
if "sphinx_gallery" not in sys.modules:
    folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "out")
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "risk_coverage.png", dpi=120)
# sphinx_gallery_end_ignore
