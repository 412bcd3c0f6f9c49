r"""The families $q(\omega)$ of the paper beside the posterior itself [GG16, section "Insights and Applications"].

One hidden layer of tanh units and 20 points with a gap: small enough for Hamiltonian Monte Carlo to sample the
posterior. Dropout, dropped biases, a $\sigma$ that stays, noise $\mathcal N(1, \sigma^2)$, mixtures and low-rank
covariances are fitted to the same points under the same prior; beside them the process of infinite width and an
ensemble.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dropbayes.layers import BernoulliNoise, GaussianNoise, Linear, MixtureNoise, Prior
from dropbayes.layers.noise import Noise
from dropbayes.likelihoods import Gaussian
from dropbayes.processes import exact_process, process_of
from dropbayes.runtime.devices import cpu_threads
from dropbayes.sampling import draws
from dropbayes.training import Objective, Optimization, fit
from experiments import bands
from experiments.record import Arrays, Findings, Record, markdown_table

CPU_ONLY = True  # too small to gain from a device
TRUTH = "Hamiltonian Monte Carlo"
PRIOR = Prior(length_scale=0.5, bias_length_scale=1.0, hidden_length_scale="fan_in")
GRID = torch.linspace(-2.5, 2.5, 101, dtype=torch.float64)[:, None]
REGIONS = {
    "at the data": GRID[:, 0].abs().sub(0.9).abs() < 0.45,
    "in the gap": GRID[:, 0].abs() < 0.3,
    "beyond": GRID[:, 0].abs() > 1.7,
}


@dataclass(frozen=True)
class Family:
    """A family: the noise of the first and of the second weight layer, None for a point, and the α of the objective."""

    first: Callable[[], Noise] | None = None
    second: Callable[[], Noise] | None = None
    alpha: float = 0.0


_both_dropped = functools.partial(BernoulliNoise, 0.1, drop_bias=True)
_sigma = functools.partial(BernoulliNoise, 0.1, std=0.05, learn_std=True)
_only_sigma = functools.partial(BernoulliNoise, 0.0, std=0.05, learn_std=True)
_low_rank = functools.partial(MixtureNoise, rank=2)
_gaussian = functools.partial(GaussianNoise, 0.3, learn_std=True)

FAMILIES = {
    "dropout before the last layer": Family(second=BernoulliNoise),
    "dropout, α = 1": Family(second=BernoulliNoise, alpha=1.0),
    "dropout before both layers": Family(BernoulliNoise, BernoulliNoise),
    "the same, biases dropped too": Family(_both_dropped, _both_dropped),
    "dropout with learned σ": Family(_only_sigma, _sigma),
    "N(1, σ²), σ learned": Family(_gaussian, _gaussian),
    "mixture of three": Family(MixtureNoise, MixtureNoise),
    "mixture of three, rank 2": Family(_low_rank, _low_rank),
}


@dataclass(frozen=True)
class Settings:
    """The paper proposes the families and compares none: these numbers are ours.

    Attributes:
        width: The number of hidden units.
        precision: τ.
        families: The families to fit, keys of `FAMILIES`.
        n_runs: The number of Hamiltonian runs.
        n_chains: The number of chains in each of them.
        n_warmup: The number of first samples of a chain, which are left out.
        n_samples: The number of samples of a chain.
        n_steps: The number of steps on all rows with which a family is fitted.
        n_draws: The number of its draws.
        n_members: The number of networks in the ensemble.
        seed: The seed of weights and masks.
    """

    width: int = 20
    precision: float = 100.0
    families: tuple[str, ...] = tuple(FAMILIES)
    n_runs: int = 2
    n_chains: int = 8
    n_warmup: int = 500
    n_samples: int = 1500
    n_steps: int = 4000
    n_draws: int = 1000
    n_members: int = 20
    seed: int = 0

    @classmethod
    def quick(cls) -> Settings:
        """Shorter chains and fits."""
        return cls(n_runs=1, n_warmup=200, n_samples=300, n_steps=1000, n_draws=300, n_members=5)

    @classmethod
    def tiny(cls) -> Settings:
        """For tests."""
        families = ("dropout before the last layer", "N(1, σ²), σ learned")
        return cls(
            width=5, families=families, n_runs=1, n_chains=2, n_warmup=20, n_samples=20, n_steps=100, n_draws=50,
            n_members=2,
        )  # fmt: skip


def data(precision: float) -> tuple[Tensor, Tensor]:
    """20 noisy values of sin(2.5 x) on both sides of a gap."""
    generator = torch.Generator().manual_seed(0)
    x = torch.cat([torch.linspace(-1.3, -0.5, 10), torch.linspace(0.5, 1.3, 10)]).double()[:, None]
    noise = torch.randn(20, 1, generator=generator, dtype=torch.float64) * precision**-0.5
    return x, torch.sin(2.5 * x) + noise


def network_outputs(parameters: Tensor, x: Tensor) -> Tensor:
    """Outputs `[chain, row]` of networks whose parameters are in units of their prior's deviations."""
    width = (parameters.shape[-1] - 1) // 3
    w1, b1, w2, b2 = parameters.split([width, width, width, 1], -1)
    hidden = torch.tanh(x[:, 0, None] * w1[:, None] / PRIOR.length_scale + b1[:, None])
    return (hidden @ w2[..., None])[..., 0] / math.sqrt(width) + b2


def hamiltonian(settings: Settings, run: int) -> Arrays:
    """The outputs of one run of NUTS, `[sample, chain, row]`; its chains are one joint target."""
    from pyro.infer.mcmc import MCMC, NUTS

    x, y = data(settings.precision)

    def potential(values: dict[str, Tensor]) -> Tensor:
        misfit = (y[:, 0] - network_outputs(values["parameters"], x)).square().sum()
        return 0.5 * settings.precision * misfit + 0.5 * values["parameters"].square().sum()

    torch.manual_seed(settings.seed + run)
    start = {"parameters": torch.randn(settings.n_chains, 3 * settings.width + 1, dtype=torch.float64)}
    kernel = NUTS(potential_fn=potential, max_tree_depth=6, target_accept_prob=0.75)
    chains = MCMC(
        kernel,
        num_samples=settings.n_samples,
        warmup_steps=settings.n_warmup,
        initial_params=start,
        disable_progbar=True,
    )
    chains.run()
    samples = chains.get_samples()["parameters"]  # [sample, chain, parameter]
    return {"outputs": torch.stack([network_outputs(sample, GRID) for sample in samples]).numpy()}


def fitted(settings: Settings, family: Family, *, n_steps: int, seed: int) -> nn.Module:
    """The network of one family after its descent."""
    torch.manual_seed(seed)
    layers = [
        nn.Linear(n_in, n_out) if noise is None else Linear(n_in, n_out, noise=noise())
        for n_in, n_out, noise in ((1, settings.width, family.first), (settings.width, 1, family.second))
    ]
    net = nn.Sequential(layers[0], nn.Tanh(), layers[1]).double()
    x, y = data(settings.precision)
    fit(
        net,
        x,
        y,
        likelihood=Gaussian(settings.precision),
        prior=PRIOR,
        epochs=n_steps,
        batch_size=len(y),
        device="cpu",
        progress=False,
        objective=Objective(alpha=family.alpha),
        optimization=Optimization(learning_rate=0.01),
    )
    return net


def family_draws(settings: Settings, name: str) -> Arrays:
    """Draws of a family, `[draw, row]`."""
    net = fitted(settings, FAMILIES[name], n_steps=settings.n_steps, seed=settings.seed)
    sampled: Any = draws(net, GRID, n_draws=settings.n_draws, seed=0)
    return {"outputs": sampled[..., 0].detach().numpy()}


def ensemble(settings: Settings) -> Arrays:
    """The functions of networks trained to their MAP points from other starts, `[member, row]`."""
    n_steps = settings.n_steps // 4  # without masks a descent is short
    nets = [fitted(settings, Family(), n_steps=n_steps, seed=seed) for seed in range(settings.n_members)]
    members = [net(GRID)[:, 0].detach() for net in nets]
    return {"outputs": torch.stack(members).numpy()}


def process(settings: Settings) -> Arrays:
    """The posterior of the network of infinite width."""
    x, y = data(settings.precision)
    net = nn.Sequential(nn.Linear(1, settings.width), nn.Tanh(), nn.Linear(settings.width, 1))
    posterior = exact_process(process_of(net, PRIOR), x, y[:, 0], precision=settings.precision)
    return {"mean": posterior.mean(GRID).numpy(), "std": posterior.variance(GRID).sqrt().numpy()}


def run(settings: Settings, record: Record, *, device: torch.device) -> Findings:
    """Samples the posterior, fits the families and compares them; see the module's docstring."""
    del device
    with cpu_threads(1):
        runs = [
            record.stage(f"hamiltonian-{number}", functools.partial(hamiltonian, settings, number))["outputs"]
            for number in range(settings.n_runs)
        ]
        chains = np.concatenate(runs, 1)  # [sample, chain, row]
        exact = record.stage("process", lambda: process(settings))
        sampled = {TRUTH: chains.reshape(-1, len(GRID))}
        for number, name in enumerate(settings.families):
            stage = record.stage(f"family-{number}", functools.partial(family_draws, settings, name))
            sampled[name] = stage["outputs"]
        sampled[f"ensemble of {settings.n_members}"] = record.stage("ensemble", lambda: ensemble(settings))["outputs"]
    moments = {name: (f.mean(0), f.std(0, ddof=1)) for name, f in sampled.items()}
    truth = moments.pop(TRUTH)
    return _findings(settings, chains, {TRUTH: truth, "exact process": (exact["mean"], exact["std"]), **moments})


def _findings(settings: Settings, chains: Any, moments: dict[str, tuple[Any, Any]]) -> Findings:
    from pyro.ops.stats import effective_sample_size, split_gelman_rubin

    true_mean, true_std = moments[TRUTH]
    outputs = torch.from_numpy(chains)
    mixing = {
        "r_hat": float(split_gelman_rubin(outputs, chain_dim=1, sample_dim=0).max()),
        "effective_samples": float(effective_sample_size(outputs, chain_dim=1, sample_dim=0).min()),
    }
    table = {
        name: {
            **{region: float((std[rows] / true_std[rows]).mean()) for region, rows in REGIONS.items()},
            "error of the mean at the data": float(
                np.sqrt(np.square((mean - true_mean)[REGIONS["at the data"]]).mean())
            ),
            "divergence": float(_divergence(true_mean, true_std, mean, std).mean()),
        }
        for name, (mean, std) in moments.items()
    }
    sentences = [
        f"Standard deviations of the function over those of {TRUTH} ({settings.n_runs * settings.n_chains} chains of "
        f"{settings.n_samples} samples, largest R-hat {mixing['r_hat']:.3f}, at least "
        f"{mixing['effective_samples']:.0f} effective samples at every point), the root mean square difference of the "
        "means at the data, and the mean over the whole axis of the divergence from the posterior, both taken as "
        "Gaussian, in nats."
    ]
    return Findings(
        title="Families beside the posterior",
        sentences=sentences,
        metrics={**mixing, "table": table},
        tables={
            "Deviations and means beside the posterior": markdown_table(
                [{"method": name, **{key: f"{value:.2g}" for key, value in row.items()}} for name, row in table.items()]
            )
        },
        figures={"posteriors": lambda: _figure(settings, moments)},
    )


def _divergence(mean: Any, std: Any, other_mean: Any, other_std: Any) -> Any:
    """KL(N(mean, std²) ‖ N(other_mean, other_std²)) at each point."""
    ratio = (std / other_std) ** 2
    return 0.5 * (ratio - 1 - np.log(ratio) + ((mean - other_mean) / other_std) ** 2)


def _figure(settings: Settings, moments: dict[str, tuple[Any, Any]]) -> Any:
    from matplotlib.figure import Figure

    x, y = data(settings.precision)
    grid = GRID[:, 0].numpy()
    n_rows = math.ceil(len(moments) / 3)
    figure = Figure(figsize=(11, 2.6 * n_rows), layout="constrained")
    axes = figure.subplots(n_rows, 3, sharex=True, sharey=True, squeeze=False)
    true_mean, true_std = moments[TRUTH]
    for ax, (name, (mean, std)) in zip(axes.flat, moments.items(), strict=False):
        bands.draw_band(ax, grid, mean, std)
        for sign in (-2, 2):
            ax.plot(grid, true_mean + sign * true_std, color="0.35", lw=0.9, ls="--")
        ax.plot(x[:, 0], y[:, 0], ".", color=bands.OBSERVED, ms=4)
        ax.set(title=name, ylim=(-2.5, 2.5), xlim=(-2.5, 2.5))
    for ax in axes.flat[len(moments) :]:
        ax.set_visible(False)
    figure.supxlabel(f"x (dashed: two deviations of {TRUTH})", fontsize=9)
    figure.supylabel("mean and two deviations", fontsize=9)
    return figure
