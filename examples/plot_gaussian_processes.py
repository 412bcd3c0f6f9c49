r"""The Gaussian processes behind a dropout network
===============================================

Gal and Ghahramani's argument goes from a covariance function to a dropout network in a few steps (sections 3 and 4.5
of their appendix). This page makes each of them happen: the covariance a non-linearity implies, its Monte Carlo
estimate by the hidden units of a network, the functions that network draws, what it learns beside the exact process,
and depth.
"""

import math
import pathlib
import sys

import matplotlib.pyplot as plt
import numpy as np
import torch

from dropbayes.processes import Cosine, Deep, ReLU, TanH, exact_process, network_prior_draws, prior_draws

BLUE, ORANGE, GREY = "#1f6fb4", "#d1621b", "#555555"
plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "savefig.dpi": 140})

LAYERS = {
    "ReLU": ReLU(length_scale=0.5, bias_scale=1.0),
    "TanH": TanH(length_scale=0.3, bias_scale=2.0),
    "Squared exponential\n(cosine units)": Cosine(length_scale=0.7),
}

# %%
# From the covariance to its finite rank
# --------------------------------------
# A hidden unit with random weights, :math:`\sigma(\mathbf w^T \mathbf x + b)`, defines a covariance function
# :math:`\mathbf K`. A hidden layer of width :math:`K` is its Monte Carlo estimate with :math:`K` terms,
# :math:`\widehat{\mathbf K} = \Phi\Phi^T`, and the error falls as :math:`K^{-1/2}`.

grid = torch.linspace(-2, 2, 81, dtype=torch.float64)[:, None]
relu = LAYERS["ReLU"]
matrices = [relu.features(1, width, seed=2)(grid) for width in (10, 100, 1000)]
matrices = [phi @ phi.T for phi in matrices] + [relu(grid)]

figure, axes = plt.subplots(1, 4, figsize=(11, 3.1), layout="constrained", sharey=True)
highest = float(matrices[-1].max())
for axis, matrix, title in zip(
    axes,
    matrices,
    ("network, $K = 10$", "network, $K = 100$", "network, $K = 1000$", "process, $K \\to \\infty$"),
    strict=True,
):
    image = axis.imshow(matrix, extent=(-2, 2, -2, 2), origin="lower", vmin=0, vmax=highest, cmap="viridis")
    axis.set(title=title, xlabel="input $y$", xticks=(-2, 0, 2), yticks=(-2, 0, 2))
axes[0].set_ylabel("input $x$")
figure.colorbar(image, ax=axes, label=r"$\widehat{\mathbf{K}}(x, y)$", shrink=0.8)
figure.suptitle("The covariance of ReLU units, estimated by the hidden layer of a network")

# %%
# The decay of the error, averaged over a hundred networks of each width:

widths = [10, 30, 100, 300, 1000, 3000]
few = grid[::10]
figure, axis = plt.subplots(figsize=(5.6, 3.8), layout="constrained")
for (name, layer), marker in zip(LAYERS.items(), "os^", strict=True):
    truth = layer(few)
    errors = []
    for width in widths:
        estimates = [layer.features(1, width, seed=seed)(few) for seed in range(100)]
        squares = [(phi @ phi.T - truth).square().mean() for phi in estimates]
        errors.append(float(torch.stack(squares).mean().sqrt() / truth.diagonal().mean()))
    rate = np.polyfit(np.log(widths), np.log(errors), 1)[0]
    label = name.split("\n")[0]
    axis.loglog(widths, errors, marker=marker, label=f"{label}: slope {rate:.2f}")
axis.loglog(widths, [1.2 * w**-0.5 for w in widths], "--", color=GREY, label=r"$\propto K^{-1/2}$")
axis.set(xlabel="width $K$ of the network", ylabel="error of the covariance / prior variance")
axis.legend(frameon=False)
axis.set_title("The network's covariance approaches the process's")

# %%
# Functions drawn from the prior
# ------------------------------
# With :math:`\mathbf W_2 \sim \mathcal N(0, \mathbf I)` the network's output is a function drawn from a process with
# covariance :math:`\widehat{\mathbf K}`. Narrow networks show their units; wide ones look like the process.

line = torch.linspace(-3, 3, 241, dtype=torch.float64)[:, None]
figure, axes = plt.subplots(3, 4, figsize=(11, 6.6), layout="constrained", sharex=True, sharey="row")
for row, (name, layer) in zip(axes, LAYERS.items(), strict=True):
    for axis, width in zip(row, (10, 100, 1000), strict=False):
        draws = network_prior_draws([layer], line, widths=[width], n_draws=6, seed=3)[..., 0]
        axis.plot(line, draws.T, color=ORANGE, alpha=0.75, linewidth=1.1)
        axis.set_title(f"network, $K = {width}$" if layer is relu else "")
    row[3].plot(line, prior_draws(layer, line, n_draws=6, seed=3).T, color=BLUE, alpha=0.75, linewidth=1.1)
    row[3].set_title("Gaussian process" if layer is relu else "")
    band = 2 * layer.diagonal(line).sqrt()
    for axis in row:
        axis.fill_between(line[:, 0], -band, band, color=GREY, alpha=0.12, linewidth=0)
    row[0].set_ylabel(f"{name}\n\n$f(x)$")
for axis in axes[-1]:
    axis.set_xlabel("input $x$")
figure.suptitle("Six functions from each prior (grey: two standard deviations of the process)")

# %%
# The posterior, exact and variational
# ------------------------------------
# The exact process conditions on the data. The dropout network minimises the paper's objective with a fresh mask for
# every row and step,
#
# .. math:: \frac{1}{2N} \sum_n |y_n - \widehat y_n|^2 + \frac{l^2}{2 \tau N} |\mathbf M_1|^2
#     + \frac{p_2}{2 \tau N} |\mathbf M_2|^2 + \frac{l'^2}{2 \tau N} |\mathbf m|^2, \quad l' = 1 / \beta.
#
# Its masks are before the second weight layer (the only input is always kept), so that the mean and the variance over
# masks have a closed form.


def initial_parameters(layer, width, seed=0):
    """M₁, m and M₂ drawn from the prior."""
    features = layer.features(1, width, seed=seed)
    m_2 = torch.randn(width, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + 1))
    return [z.clone().requires_grad_() for z in (features.weights, features.bias, m_2)]


def unit_terms(layer, parameters, x):
    """What each hidden unit adds to the output when it is kept, `[row, unit]`."""
    m_1, m, m_2 = parameters
    return layer.nonlinearity(x @ m_1 + m) * m_2[:, 0] / len(m) ** 0.5


def penalty(layer, parameters, n_data, *, keep_prob, precision):
    """The three weight decays of the objective."""
    m_1, m, m_2 = (z.square().sum() for z in parameters)
    return (layer.length_scale**2 * m_1 + keep_prob * m_2 + m / layer.bias_scale**2) / (2 * precision * n_data)


def dropout_moments(layer, parameters, x, *, keep_prob):
    """The mean and the variance over masks."""
    terms = unit_terms(layer, parameters, x)
    return keep_prob * terms.sum(1), keep_prob * (1 - keep_prob) * terms.square().sum(1)


def trained_with_masks(layer, x, y, *, width, keep_prob, precision, n_steps=2000):
    """The parameters that stochastic gradient descent finds with sampled masks."""
    parameters = initial_parameters(layer, width)
    optimizer = torch.optim.Adam(parameters, lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, n_steps)
    generator = torch.Generator().manual_seed(2)
    for _ in range(n_steps):
        masks = torch.rand(len(x), width, generator=generator) < keep_prob
        output = (unit_terms(layer, parameters, x) * masks).sum(1)
        loss = (y - output).square().mean() / 2
        loss = loss + penalty(layer, parameters, len(x), keep_prob=keep_prob, precision=precision)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return [z.detach() for z in parameters]


precision, keep_prob, width = 100.0, 0.9, 100
generator = torch.Generator().manual_seed(4)
x = torch.cat([torch.linspace(-2.2, -0.6, 12), torch.linspace(0.8, 2.0, 9)]).double()[:, None]
y = torch.sin(2 * x[:, 0]) + torch.randn(len(x), dtype=torch.float64, generator=generator) * precision**-0.5
gap = (line[:, 0] > -0.6) & (line[:, 0] < 0.8)
beyond = (line[:, 0] < -2.2) | (line[:, 0] > 2.0)
regions = {"in the gap": gap, "at the data": ~gap & ~beyond, "beyond the data": beyond}

figure, axes = plt.subplots(2, 3, figsize=(11, 6), layout="constrained", sharex=True, sharey=True)
for column, (name, layer) in zip(axes.T, LAYERS.items(), strict=True):
    process = exact_process(layer, x, y, precision=precision)
    parameters = trained_with_masks(layer, x, y, width=width, keep_prob=keep_prob, precision=precision)
    exact = process.mean(line), process.variance(line)
    variational = dropout_moments(layer, parameters, line, keep_prob=keep_prob)
    for axis, (mean, variance), colour in zip(column, (exact, variational), (BLUE, ORANGE), strict=True):
        axis.plot(line, mean, color=colour)
        for deviations, alpha in ((2, 0.18), (1, 0.22)):
            band = deviations * variance.sqrt()
            axis.fill_between(line[:, 0], mean - band, mean + band, color=colour, alpha=alpha, linewidth=0)
        axis.plot(x, y, "k.", markersize=4)
    ratios = [f"{float(variational[1][r].mean() / exact[1][r].mean()):.2g} {where}" for where, r in regions.items()]
    print(f"{name.splitlines()[0]}: variance of the network over that of the process: {', '.join(ratios)}")
    column[0].set_title(name.replace("\n", " "))
    column[1].text(
        0.03,
        0.03,
        "network's variance / process's:\n" + ",\n".join(ratios),
        transform=column[1].transAxes,
        fontsize=8.5,
    )
    column[1].set_xlabel("input $x$")
axes[0, 0].set(ylabel="exact process\n\n$f(x)$", ylim=(-3.4, 3.4))
axes[1, 0].set_ylabel(f"dropout network, $K = {width}$\n\n$f(x)$")
figure.suptitle("Posterior mean with one and two standard deviations of $f$ (dots: data)")

# %%
# The variational variance is that of the masks. It follows the size of the units' contributions, not the absence of
# data: in the gap, where the process is unsure, the network is sure (the paper expects variational inference to
# under-estimate); at the data it may well over-estimate. With ``keep_prob`` held fixed both fall as the network is made
# wider, because the masks of more units average out. Here the objective is averaged over masks in closed form,
# :math:`\mathbb E |y - \widehat y|^2 = (y - \mathbb E \widehat y)^2 + \operatorname{Var} \widehat y`, and minimised by
# L-BFGS.


def trained_in_expectation(layer, x, y, *, width, keep_prob, precision):
    """The parameters at a minimum of the objective's average over masks."""
    parameters = initial_parameters(layer, width)
    optimizer = torch.optim.LBFGS(parameters, max_iter=300, history_size=20, line_search_fn="strong_wolfe")

    def closure():
        mean, variance = dropout_moments(layer, parameters, x, keep_prob=keep_prob)
        loss = ((y - mean).square() + variance).mean() / 2
        loss = loss + penalty(layer, parameters, len(x), keep_prob=keep_prob, precision=precision)
        optimizer.zero_grad()
        loss.backward()
        return loss

    optimizer.step(closure)
    return [z.detach() for z in parameters]


widths = [10, 30, 100, 300, 1000]
figure, axes = plt.subplots(1, 3, figsize=(11, 3.6), layout="constrained", sharey=True)
for axis, (name, layer) in zip(axes, LAYERS.items(), strict=True):
    exact = exact_process(layer, x, y, precision=precision).variance(line)
    ratios = []
    for w in widths:
        parameters = trained_in_expectation(layer, x, y, width=w, keep_prob=keep_prob, precision=precision)
        variance = dropout_moments(layer, parameters, line, keep_prob=keep_prob)[1]
        ratios.append([float(variance[r].mean() / exact[r].mean()) for r in regions.values()])
    for where, values, marker in zip(regions, zip(*ratios, strict=True), "os^", strict=True):
        axis.loglog(widths, values, marker=marker, label=where)
    axis.axhline(1, color=GREY, linewidth=1)
    axis.set(title=name.replace("\n", " "), xlabel="width $K$ of the network")
axes[0].set_ylabel("variance of the network / of the process")
axes[0].legend(frameon=False, fontsize=9, loc="lower left")

# %%
# Going deeper
# ------------
# The deep process feeds the output of one process to the covariance of the next,
# :math:`\mathbf F_1 \sim \mathcal N(0, \widehat{\mathbf K}_1)`,
# :math:`\mathbf F_2 \sim \mathcal N(0, \widehat{\mathbf K}_2(\mathbf F_1, \mathbf F_1))`. As the widths grow, its
# covariance tends to a recursion from layer to layer. Without biases, each layer of ReLU units draws the correlation of
# two inputs towards one.

figure, axes = plt.subplots(1, 3, figsize=(11, 3.5), layout="constrained")
unit = ReLU(bias_scale=0.0)
angles = torch.linspace(0, math.pi, 41, dtype=torch.float64)
circle = torch.stack([angles.cos(), angles.sin()], 1)
for depth, shade in zip((1, 2, 4, 16), (0.35, 0.55, 0.75, 1.0), strict=True):
    matrix = Deep((unit,) * depth)(circle[:1], circle)[0] * 2**depth
    axes[0].plot(angles / math.pi, matrix, color=BLUE, alpha=shade, label=f"{depth} hidden layer{'s'[: depth > 1]}")
width = 200
draws = network_prior_draws([unit] * 4, circle, widths=[width] * 4, n_draws=200, n_outputs=40, seed=1)
second_moment = torch.einsum("snd,smd->nm", draws, draws)
axes[0].plot(angles[::4] / math.pi, (second_moment[0] / second_moment[0, 0])[::4], "o", color=ORANGE, markersize=4)
axes[0].set(xlabel=r"angle between the inputs / $\pi$", ylabel="correlation", ylim=(0, 1.03))
axes[0].legend(frameon=False, fontsize=9)
axes[0].set_title(f"Recursion (dots: networks of 4 × {width})", fontsize=10)
for axis, depth in zip(axes[1:], (1, 4), strict=True):
    layers = [TanH(length_scale=0.3, bias_scale=1.0)] + [TanH(length_scale=0.5, bias_scale=0.5)] * (depth - 1)
    draws = network_prior_draws(layers, line, widths=[200] * depth, n_draws=6, seed=2)[..., 0]
    axis.plot(line, draws.T, color=ORANGE, alpha=0.75, linewidth=1.1)
    band = 2 * Deep(tuple(layers)).diagonal(line).sqrt()
    axis.fill_between(line[:, 0], -band, band, color=GREY, alpha=0.12, linewidth=0)
    axis.set(xlabel="input $x$", ylabel="$f(x)$", ylim=(-3, 3))
    axis.set_title(f"Draws, {depth} hidden layer{'s'[: depth > 1]} of 200 TanH units", fontsize=10)

# sphinx_gallery_start_ignore
# Run as a script, the figures go to a folder; the gallery collects them itself.
if "sphinx_gallery" not in sys.modules:
    folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "out")
    folder.mkdir(parents=True, exist_ok=True)
    names = ("covariance", "convergence", "prior", "posterior", "variance_ratio", "deep")
    for number, name in zip(plt.get_fignums(), names, strict=True):
        plt.figure(number).savefig(folder / f"gaussian_processes_{name}.png")
# sphinx_gallery_end_ignore
