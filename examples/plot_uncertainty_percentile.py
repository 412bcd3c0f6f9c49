"""The percentile of an uncertainty
================================

A standard deviation of 5: is that much? The paper's answer is to fit a simple distribution to the uncertainties of the
training points and to read off the percentile [GG16, section Model Calibration].
"""

# %%
# A network for the diabetes data of scikit-learn: disease progression from ten measurements.
import pathlib
import sys

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_diabetes
from torch import nn

import dropbayes as db
from dropbayes import calibration, plots

torch.manual_seed(0)
x, y = (torch.tensor(array, dtype=torch.float32) for array in load_diabetes(return_X_y=True))
x, target = x / x.std(0), (y - y.mean()) / y.std()

net = nn.Sequential(
    nn.Linear(10, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1)
)
optimiser = torch.optim.Adam(net.parameters(), lr=1e-3, weight_decay=1e-3)
for _ in range(400):
    optimiser.zero_grad()
    nn.functional.mse_loss(net(x).squeeze(-1), target).backward()
    optimiser.step()

# %%
# Three new patients: the average one, one with a body mass index three deviations up, one with every measurement so.
average = x.mean(0)
heavy, unheard_of = average.clone(), average + 3
heavy[2] += 3
patients = torch.stack([average, heavy, unheard_of])
training = db.predict(net, x, n_draws=200).std.squeeze(-1) * y.std()
new = db.predict(net, patients, n_draws=200).std.squeeze(-1) * y.std()
reference = calibration.uncertainty_reference(training)

figure, ax = plt.subplots(figsize=(6.4, 4), layout="constrained")
plots.uncertainty_histogram(training, reference=reference, new=new, ax=ax)
ax.set(title="Diabetes: three new patients", xlabel="epistemic std of the progression")

# %%
# The paper's example: the same 5 is extreme among 0.2 to 2, and nothing among 10 to 15.
papers_figure, ax = plt.subplots(figsize=(6.4, 4), layout="constrained")
narrow, wide = 0.2 + 1.8 * torch.rand(300), 10 + 5 * torch.rand(300)
for training, look in ((narrow, "-"), (wide, "--")):
    fitted = calibration.uncertainty_reference(training)
    grid = torch.linspace(0.01, 18, 800)
    five = plots.percentile_text(fitted.percentile(torch.tensor(5.0)).item())
    ax.hist(training, bins=15, density=True, color="0.88", edgecolor="0.6", lw=0.5)
    ax.plot(grid, fitted.density(grid), color="black", ls=look, label=f"here 5 is {five}")
ax.axvline(5, color="#c04a00", lw=1.2, ls="-.")
ax.set(title="The paper's example: std 5", xlabel="uncertainty", ylabel="density", xlim=(0, 18))
ax.legend(frameon=False)

# sphinx_gallery_start_ignore
# Run as a script, the figure goes to a folder; the gallery collects it itself.
if "sphinx_gallery" not in sys.modules:
    folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "out")
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "uncertainty_percentile.png", dpi=120)
    papers_figure.savefig(folder / "uncertainty_percentile_of_five.png", dpi=120)
# sphinx_gallery_end_ignore
