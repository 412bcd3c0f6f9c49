"""Food and income: intervals that hold what they claim
====================================================

Engel's households of 1857: what 235 working families earned and what they spent on food. The more a family earns, the
more its spending varies, so the noise is learned as a function of the input.
"""

# %%
# Two thirds of the families train the model, chosen at random once; the rest judge it. Nothing was tuned: the drop
# probability and the weight decay are searched among the training families, the noise is heteroscedastic because their
# spread visibly grows.
import pathlib
import sys

import matplotlib.pyplot as plt
import numpy as np
from statsmodels.datasets import engel

from dropbayes import DropoutRegressor

families = engel.load_pandas().data
x, y = families[["income"]].to_numpy(), families["foodexp"].to_numpy()
order = np.random.default_rng(0).permutation(len(y))
training, held_out = order[:157], order[157:]
model = DropoutRegressor(noise="heteroscedastic", n_steps=1500, random_state=0).fit(x[training], y[training])

# %%
# Among the families it has not seen, each interval holds about the share it claims.
for coverage in (0.5, 0.8, 0.95):
    lower, upper = model.predict_interval(x[held_out], coverage)
    held = (lower <= y[held_out]) & (y[held_out] <= upper)
    print(f"{coverage:.0%} intervals hold {held.mean():.0%} of {len(held)} families")

# %%
# The band widens with the noise, and once more where families are few.
COLOURS = {
    "light": {"ink": "#1a2230", "outer": "#d5e4f5", "inner": "#98bfe8", "mean": "#0f3f7c", "known": "#9aa4b2"},
    "dark": {"ink": "#e7ebf1", "outer": "#20344d", "inner": "#345a83", "mean": "#a9d0fa", "known": "#6b7686"},
}


def drawn(theme):
    """The band in the colours of a theme, on a transparent ground, in letters that a phone can show."""
    colour = COLOURS[theme]
    grid = np.linspace(x.min(), 3000, 300)[:, None]
    plt.rcParams.update({"font.size": 15, "svg.fonttype": "path", "svg.hashsalt": "dropbayes"})
    figure, ax = plt.subplots(figsize=(8, 4.6), layout="constrained")
    ends = {coverage: model.predict_interval(grid, coverage) for coverage in (0.5, 0.95)}
    ax.fill_between(grid[:, 0], *ends[0.95], color=colour["outer"], label="95 % interval", lw=0)
    ax.fill_between(grid[:, 0], *ends[0.5], color=colour["inner"], label="50 % interval", lw=0)
    ax.plot(grid, model.predict(grid), color=colour["mean"], lw=2.5, label="mean")
    ax.scatter(x[training], y[training], s=14, color=colour["known"], label="trained on")
    ax.scatter(x[held_out], y[held_out], s=22, color=colour["ink"], label="held out")
    ax.set(xlim=(x.min(), 3000), ylim=(0, 2100), xlabel="income (francs a year)", ylabel="spent on food")
    ax.tick_params(colors=colour["ink"])
    for item in (ax.xaxis.label, ax.yaxis.label):
        item.set_color(colour["ink"])
    for side, spine in ax.spines.items():
        spine.set(visible=side in ("left", "bottom"), color=colour["known"])
    ax.legend(frameon=False, labelcolor=colour["ink"], loc="upper left", fontsize=13)
    return figure


figure = drawn("light")

# sphinx_gallery_start_ignore
# Run as a script, the figures go to a folder, once for each theme; the gallery collects the first itself.
if "sphinx_gallery" not in sys.modules:
    folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "out")
    folder.mkdir(parents=True, exist_ok=True)
    for theme in COLOURS:
        drawn(theme).savefig(folder / f"engel_{theme}.svg", transparent=True, metadata={"Date": None})
# sphinx_gallery_end_ignore
