r"""More data, the same doubt
=========================

With a fixed drop probability the spread of the draws does not shrink as data grow; that of the exact Gaussian process
does. The figure behind the first line of the limits.
"""

# %%
# The same network for 20 to 2000 rows, all trained at once, and the exact process of a ReLU layer on the same rows.
import pathlib
import sys

import matplotlib.pyplot as plt
import torch

from dropbayes.population import Member, Task, evaluate, train
from dropbayes.processes import ReLU, exact_process

torch.manual_seed(0)
x = torch.rand(2000, 1, dtype=torch.float64) * 4 - 2
y = torch.sin(2 * x[:, 0]) + 0.1 * torch.randn(2000, dtype=torch.float64)
sizes, probabilities = (20, 60, 200, 600, 2000), (0.02, 0.1, 0.3)
tasks = [Task(x[:n], y[:n]) for n in sizes]
members = [
    Member(task=place, drop_prob=(0.0, p), epochs=40_000 // max(n, 50))  # as many steps for each
    for p in probabilities
    for place, n in enumerate(sizes)
]
trained = train(tasks, members, hidden=(50,), batch_size=50)
middle = torch.linspace(-1.5, 1.5, 60, dtype=torch.float64)[:, None]
truth = (middle, torch.sin(2 * middle[:, 0]))
spread = evaluate(trained, [truth] * len(tasks), n_draws=200).epistemic.mean((1, 2)).sqrt().view(len(probabilities), -1)
exact = [
    exact_process(ReLU(length_scale=0.5), x[:n], y[:n], precision=100.0).variance(middle).mean().sqrt() for n in sizes
]

# %%
figure, ax = plt.subplots(figsize=(6.4, 4), layout="constrained")
for p, line, shade in zip(probabilities, spread, (0.45, 0.7, 1.0), strict=True):
    ax.loglog(sizes, line, "o-", color="#1f6fb4", alpha=shade, label=f"dropout, drop probability {p}")
ax.loglog(sizes, exact, "s--", color="#d1621b", label="exact process")
ax.set(xlabel="training rows N", ylabel="epistemic standard deviation", title="Only the process learns to be sure")
ax.legend(frameon=False, fontsize="small")
ax.spines[["top", "right"]].set_visible(False)

# sphinx_gallery_start_ignore
# Run as a script, the figure goes to a folder; the gallery collects it itself.
if "sphinx_gallery" not in sys.modules:
    folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "out")
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "data_growth.png", dpi=120)
# sphinx_gallery_end_ignore
