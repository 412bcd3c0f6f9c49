"""Four posteriors of one small network: Hamiltonian Monte Carlo, the exact process, dropout and an ensemble.

Run `python -m benchmarks.posteriors` (it needs the extra `mcmc`); it prints a Markdown table, writes
`benchmarks/results/posteriors.json` and draws `docs/images/posteriors.png`. Minutes long: the Hamiltonian run is the truth
the others are measured by; how well its chains mixed is printed with it.
"""

from __future__ import annotations

import math
import pathlib
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import history
from dropbayes.layers import BernoulliNoise, Linear
from dropbayes.likelihoods import Gaussian
from dropbayes.processes import exact_process, process_of
from dropbayes.sampling import draws
from dropbayes.training import Objective, Optimization, fit
from dropbayes.weight_layers.precision import Prior

WIDTH, PRECISION, CHAINS, N_WARMUP, N_SAMPLES = 20, 100.0, 8, 500, 3000
PRIOR = Prior(length_scale=0.5, bias_length_scale=1.0, hidden_length_scale="fan_in")
GRID = torch.linspace(-2.5, 2.5, 101, dtype=torch.float64)[:, None]
REGIONS = {"at the data": GRID[:, 0].abs().sub(0.9).abs() < 0.45, "in the gap": GRID[:, 0].abs() < 0.3,
           "beyond": GRID[:, 0].abs() > 1.7}  # fmt: skip


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.cat([torch.linspace(-1.3, -0.5, 10), torch.linspace(0.5, 1.3, 10)]).double()[:, None]
    noise = torch.randn(20, 1, generator=generator, dtype=torch.float64) * PRECISION**-0.5
    return x, torch.sin(2.5 * x) + noise


def network_outputs(parameters: Tensor, x: Tensor) -> Tensor:
    """Outputs `[chain, row]` of networks whose parameters are in units of their prior's deviations, `[chain, 61]`."""
    w1, b1, w2, b2 = parameters.split([WIDTH, WIDTH, WIDTH, 1], -1)
    hidden = torch.tanh(x[:, 0, None] * w1[:, None] / 0.5 + b1[:, None])
    return (hidden @ w2[..., None])[..., 0] / math.sqrt(WIDTH) + b2


def hamiltonian(x: Tensor, y: Tensor, *, n_warmup: int, n_samples: int) -> tuple[Tensor, dict[str, float]]:
    """Function draws by NUTS, `[sample, row]`, and how well they mixed; chains run as one joint target."""
    from pyro.infer.mcmc import MCMC, NUTS
    from pyro.ops.stats import effective_sample_size, split_gelman_rubin

    def potential(values: dict[str, Tensor]) -> Tensor:
        parameters = values["parameters"]
        misfit = 0.5 * PRECISION * (y[:, 0] - network_outputs(parameters, x)).square().sum()
        return misfit + 0.5 * parameters.square().sum()

    torch.manual_seed(0)
    start = {"parameters": torch.randn(CHAINS, 3 * WIDTH + 1, dtype=torch.float64)}
    kernel = NUTS(potential_fn=potential, max_tree_depth=6, target_accept_prob=0.75)
    run = MCMC(kernel, num_samples=n_samples, warmup_steps=n_warmup, initial_params=start, disable_progbar=True)
    run.run()
    samples = run.get_samples()["parameters"]  # [sample, chain, parameter]
    outputs = torch.stack([network_outputs(sample, GRID) for sample in samples])  # [sample, chain, row]
    mixing = {
        "r_hat": float(split_gelman_rubin(outputs, chain_dim=1, sample_dim=0).max()),
        "effective_samples": float(effective_sample_size(outputs, chain_dim=1, sample_dim=0).min()),
    }
    return outputs.flatten(0, 1), mixing


def variational(x: Tensor, y: Tensor, *, alpha: float = 0.0, std: float = 0.0) -> Tensor:
    torch.manual_seed(0)
    noise = BernoulliNoise(0.1, std=std, learn_std=std > 0)
    net = nn.Sequential(nn.Linear(1, WIDTH), nn.Tanh(), Linear(WIDTH, 1, noise=noise)).double()
    fit(
        net,
        x,
        y,
        likelihood=Gaussian(PRECISION),
        prior=PRIOR,
        epochs=1000,
        batch_size=20,
        device="cpu",
        progress=False,
        objective=Objective(alpha=alpha),
        optimization=Optimization(learning_rate=0.01),
    )
    sampled: Any = draws(net, GRID, n_draws=500, seed=0)
    return sampled[..., 0].detach()


def ensemble(x: Tensor, y: Tensor, n_members: int = 20) -> Tensor:
    outputs = []
    for seed in range(n_members):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(1, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)).double()
        fit(
            net,
            x,
            y,
            likelihood=Gaussian(PRECISION),
            prior=PRIOR,
            epochs=400,
            batch_size=20,
            device="cpu",
            progress=False,
            optimization=Optimization(learning_rate=0.02),
        )
        with torch.no_grad():
            outputs.append(net(GRID)[:, 0])
    return torch.stack(outputs)


def process(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    net = nn.Sequential(nn.Linear(1, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    posterior = exact_process(process_of(net, PRIOR), x, y[:, 0], precision=PRECISION)
    return posterior.mean(GRID), posterior.variance(GRID).sqrt()


def posteriors(*, n_warmup: int, n_samples: int) -> tuple[dict[str, tuple[Tensor, Tensor]], dict[str, float]]:
    """The mean and standard deviation of the function over the grid, by method, and how well the first mixed."""
    x, y = data()
    sampled, mixing = hamiltonian(x, y, n_warmup=n_warmup, n_samples=n_samples)
    methods = {
        "Hamiltonian Monte Carlo": sampled,
        "dropout": variational(x, y),
        "dropout, α = 1": variational(x, y, alpha=1.0),
        "dropout with learned σ": variational(x, y, std=0.05),
        "ensemble of 20": ensemble(x, y),
    }
    moments = {name: (f.mean(0), f.std(0)) for name, f in methods.items()}
    truth = moments.pop("Hamiltonian Monte Carlo")
    return {"Hamiltonian Monte Carlo": truth, "exact process": process(x, y), **moments}, mixing


def draw(results: dict[str, tuple[Tensor, Tensor]], path: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    x, y = data()
    truth = results["Hamiltonian Monte Carlo"]
    figure, axes = plt.subplots(2, 3, figsize=(11, 6), sharex=True, sharey=True, constrained_layout=True)
    for axis, (name, (mean, std)) in zip(axes.flat, results.items(), strict=True):
        grid = GRID[:, 0]
        axis.fill_between(grid, mean - 2 * std, mean + 2 * std, color="tab:blue", alpha=0.25, lw=0)
        axis.plot(grid, mean, color="tab:blue", lw=1.5)
        if name != "Hamiltonian Monte Carlo":
            for sign in (-2, 2):
                axis.plot(grid, truth[0] + sign * truth[1], color="0.35", lw=0.9, ls="--")
        axis.plot(x[:, 0], y[:, 0], ".", color="black", ms=4)
        axis.set(title=name, ylim=(-4, 4), xlim=(-2.5, 2.5))
    axes[0, 0].set_ylabel("mean ± 2 deviations")
    axes[1, 0].set_ylabel("mean ± 2 deviations")
    figure.supxlabel("x (dashed: the band of Hamiltonian Monte Carlo)", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    torch.set_num_threads(1)
    results, mixing = posteriors(n_warmup=N_WARMUP, n_samples=N_SAMPLES)
    truth_mean, truth_std = results["Hamiltonian Monte Carlo"]
    table: dict[str, dict[str, float]] = {}
    for name, (mean, std) in results.items():
        ratios = {region: float((std[rows] / truth_std[rows]).mean()) for region, rows in REGIONS.items()}
        error = float((mean - truth_mean)[REGIONS["at the data"]].square().mean().sqrt())
        table[name] = {**ratios, "error of the mean at the data": error}
    columns = [*REGIONS, "error of the mean at the data"]
    print(
        f"Deviations over those of Hamiltonian Monte Carlo ({CHAINS} chains of {N_SAMPLES} samples, largest R-hat "
        f"{mixing['r_hat']:.3f}, at least {mixing['effective_samples']:.0f} effective samples)\n"
    )
    print(f"| method | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
    for name, row in table.items():
        print(f"| {name} | {' | '.join(f'{row[column]:.2g}' for column in columns)} |")
    history.write("posteriors", {"chains": CHAINS, "samples": N_SAMPLES, **mixing, "table": table})
    draw(results, pathlib.Path(__file__).parent.parent / "docs" / "images" / "posteriors.png")


if __name__ == "__main__":
    main()
