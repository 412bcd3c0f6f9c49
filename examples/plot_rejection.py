"""Deferring to a person
=====================

A person can look at a tenth of the images. Which tenth, and how many of the network's errors do they catch?
"""

# %%
# A network fitted to 600 handwritten digits; 500 images are held out to set the threshold.
import pathlib
import sys

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

import dropbayes as db
from dropbayes import decisions, plots, scores

torch.manual_seed(0)
images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
order = torch.randperm(len(labels))
x, y = (images / 16).float()[order], labels[order]

net = nn.Sequential(
    nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10)
)
optimiser = torch.optim.Adam(net.parameters(), lr=3e-3)
for _ in range(200):
    optimiser.zero_grad()
    nn.functional.cross_entropy(net(x[:600]), y[:600]).backward()
    optimiser.step()
net.eval()

prediction = db.predict(net, x[600:], n_draws=100, likelihood=db.Categorical())
uncertainty, wrong = prediction.mutual_information, prediction.mean.argmax(-1) != y[600:]

# %%
# The threshold comes with its guarantee.
rule = decisions.deferral_for_workload(uncertainty[:500], fraction=0.1)
deferred = rule.defers(uncertainty[500:])
print(rule.guarantee)
print(
    f"deferred {deferred.double().mean():.1%}; errors: {wrong[500:].sum()} in all, {wrong[500:][~deferred].sum()} kept"
)

# %%
# The picture for every workload.
figure, ax = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
curve = scores.risk_coverage(uncertainty[500:], wrong[500:].double())
plots.rejection_diagram(curve, label="by mutual information", deferred=0.1, ax=ax)
ax.set_title("Errors left when the most uncertain digits go to a person")

# sphinx_gallery_start_ignore
# Run as a script, the figure goes to a folder; the gallery collects it itself.
if "sphinx_gallery" not in sys.modules:
    folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "out")
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "rejection.png", dpi=120)
# sphinx_gallery_end_ignore
