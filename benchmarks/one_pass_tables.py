"""One pass on tables: are causes of uncertainty found, is the likelihood that of many draws, is it better than Laplace?

*causes*: 100 tables in which one column makes one row uncertain, each fitted with the quick effort: how often that column
has the largest share of the epistemic variance. *likelihoods*: networks of the nine UCI sets with the settings of the
paper, their test log-likelihood without draws against that of 1,000. *rates*: networks trained without dropout on the
nine UCI sets and on MNIST, `tune_dropout` (a rate per unit; for classes per layer) against a Laplace approximation of
the last layer.

Run `DROPBAYES_DATA=... python -m benchmarks.one_pass_tables causes` (or `likelihoods`, `rates`; minutes each, on a CPU);
it prints a table of docs/one_pass.md and writes `benchmarks/results/one_pass_causes.json`.
"""

from __future__ import annotations

import itertools
import math
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import dropbayes as db
from benchmarks import history
from benchmarks.history import Goal
from benchmarks.networks import perceptron
from benchmarks.one_pass_gpu import NOISE, table, trained
from dropbayes.app.cli.explaining import reasons
from dropbayes.app.models.model import Model
from dropbayes.linear.points import gaussian_points
from experiments.datasets import digits
from experiments.uci import data as uci

Found = dict[str, Any]

# Planted causes -------------------------------------------------------------------------------------------------------

N_TABLES = 100


def planted(seed: int) -> tuple[dict[str, np.ndarray], np.ndarray, str, str]:
    """A table, a row that one column makes uncertain, that column, and how: beyond all rows, or among four of 300."""
    rng = np.random.default_rng(seed)
    n_columns, kind = int(rng.integers(4, 9)), ("beyond", "sparse")[seed % 2]
    x, row = rng.normal(size=(300, n_columns)), rng.normal(size=n_columns).clip(-2, 2)
    cause, side = int(rng.integers(n_columns)), rng.choice([-1, 1])
    if kind == "sparse":
        x[:4, cause] = side * rng.uniform(3.5, 5.5, 4)
    row[cause] = side * (rng.uniform(4, 6) if kind == "beyond" else rng.uniform(4, 5))
    slope, bends, phases = rng.normal(size=n_columns), rng.normal(size=(n_columns, 3)), rng.uniform(0, 2 * np.pi, 3)
    y = (x @ slope + np.sin(1.5 * x @ bends / n_columns**0.5 + phases).sum(1)) / n_columns**0.5
    names = [f"column {index}" for index in range(n_columns)]
    columns = dict(zip(names, x.T, strict=True))
    return {**columns, "y": y + 0.1 * rng.normal(size=len(x))}, row[None], names[cause], kind


def causes() -> tuple[Found, list[Goal]]:
    """How often the planted column has the largest share, against the training rows and against their mean."""
    hits = {f"{kind}, {what}": 0 for kind in ("beyond", "sparse") for what in ("rows", "mean")}
    for seed in range(N_TABLES):
        frame, row, cause, kind = planted(seed)
        model = Model.fit(frame, target="y", effort="quick", random_state=0)
        inputs = np.stack([frame[column.name] for column in model.schema.columns], 1)
        for what, background in (("rows", inputs), ("mean", None)):
            parts = reasons(model, row, background, n_rows=1)[0]["columns"]
            hits[f"{kind}, {what}"] += max(parts, key=lambda name: parts[name]["uncertainty"]) == cause
    first = {what: hits[f"beyond, {what}"] + hits[f"sparse, {what}"] for what in ("rows", "mean")}
    return {"tables": N_TABLES, **hits, **first}, [Goal("planted causes ranked first", first["rows"], at_least=95)]


def cause_rows(found: Found) -> list[list[str]]:
    words = {"beyond": "beyond all training rows", "sparse": "among four of 300 training rows"}
    rows = [[words[kind], *(str(found[f"{kind}, {what}"]) for what in ("rows", "mean"))] for kind in words]
    return [*rows, ["both", *(str(found[what]) for what in ("rows", "mean"))]]


# The likelihood of UCI networks ---------------------------------------------------------------------------------------

PAPER = {
    "boston": (0.05, 0.1597), "concrete": (0.01, 0.05573), "energy": (0.05, 0.4271), "kin8nm": (0.05, 192.5),
    "naval": (0.05, 42_174.0), "power": (0.005, 0.08711), "protein": (0.005, 0.06444), "wine": (0.05, 2.958),
    "yacht": (0.01, 0.5419),
}  # fmt: skip
"""The drop probability and the precision, in units of 1/y², of the paper's networks: one hidden layer."""
N_TRUE, N_SPLITS, N_STEPS, MAX_ROWS = 1000, 2, 2000, 5000


def splits(name: str) -> list[tuple[Tensor, Tensor, Tensor, Tensor, float]]:
    """Some splits of a set, standardised by their training rows, and the deviation of the targets."""
    found, dataset = [], uci.load(name)
    for train, test in dataset.splits[:N_SPLITS]:
        x, y = torch.tensor(dataset.x[train[:MAX_ROWS]]), torch.tensor(dataset.y[train[:MAX_ROWS]])[:, None]
        x_test, y_test = torch.tensor(dataset.x[test]), torch.tensor(dataset.y[test])[:, None]
        centre, scale, mean, spread = x.mean(0), x.std(0).clamp(min=1e-9), y.mean(), float(y.std())
        inputs = [((rows - centre) / scale).float() for rows in (x, x_test)]
        targets = [((rows - mean) / spread).float() for rows in (y, y_test)]
        found.append((inputs[0], targets[0], inputs[1], targets[1], spread))
    return found


def fitted(net: nn.Module, x: Tensor, y: Tensor, precision: float) -> nn.Module:
    epochs = math.ceil(N_STEPS / math.ceil(len(x) / 128))
    prior, likelihood = db.Prior(length_scale=0.01), db.Gaussian(precision)
    db.fit(net, x, y, likelihood=likelihood, prior=prior, epochs=epochs, device="cpu", progress=False)
    return net.eval()


def likelihoods() -> tuple[Found, list[Goal]]:
    """The log-likelihood of the test rows by each method, in nats per row and units of the targets' deviation."""
    found, ways = {}, {"draws": {"n_draws": N_TRUE}, "linear": {"method": "linear"}, "moments": {"method": "moments"}}
    for name, (drop_prob, precision) in PAPER.items():
        scores = dict.fromkeys(ways, 0.0)
        for x, y, x_test, y_test, spread in splits(name):
            torch.manual_seed(0)
            n_hidden = 100 if name == "protein" else 50
            likelihood = db.Gaussian(precision * spread**2)
            net = perceptron(x.shape[1], n_hidden, 1, drop_prob=drop_prob, at_input=True)
            net = fitted(net, x, y, precision * spread**2)
            for way, arguments in ways.items():
                judged = db.evaluate(net, x_test, y_test, likelihood=likelihood, **arguments)  # type: ignore[arg-type]
                scores[way] += judged.log_likelihood / N_SPLITS
        found[name] = scores
        print(name, scores, flush=True)
    close = {way: sum(abs(one[way] - one["draws"]) <= 0.02 for one in found.values()) for way in ("linear", "moments")}
    goals = [Goal(f"UCI sets within 0.02 nats of {N_TRUE} draws, {way}", n, at_least=8) for way, n in close.items()]
    return {"sets": found, "close": close}, goals


def likelihood_rows(found: Found) -> list[list[str]]:
    return [
        [name, *(f"{one[way]:.3f}" for way in ("draws", "linear", "moments"))] for name, one in found["sets"].items()
    ]


# Rates after training against the Laplace approximation of the last layer ---------------------------------------------

PRIOR_PRECISIONS = torch.logspace(-6, 6, 49).double()
N_TRAINED = 60_000  # digits


def features(net: nn.Module, x: Tensor) -> Tensor:
    """The inputs of the last layer, and a one for its bias."""
    with torch.no_grad():
        hidden = nn.Sequential(*list(net)[:-1])(x).double()  # type: ignore[call-overload]
    return torch.cat([hidden, torch.ones(len(hidden), 1).double()], 1)


def squared_errors(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        return (net(x) - y)[:, 0].double().square()


def gaussian_laplace(net: nn.Module, x: Tensor, held: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]) -> float:
    """The test log-likelihood; the prior precision and the noise are those of the best held-out log-likelihood."""
    phi = features(net, x)
    levels, axes = torch.linalg.eigh(phi.T @ phi)

    def scorer(rows: tuple[Tensor, Tensor]) -> Callable[[tuple[Tensor, Tensor]], float]:
        projected, error = (features(net, rows[0]) @ axes).square(), squared_errors(net, *rows)

        def score(pair: tuple[Tensor, Tensor]) -> float:
            precision, noise = pair
            variance = noise + projected @ (1 / (levels.clamp(min=0) / noise + precision))
            return float(-0.5 * ((2 * math.pi * variance).log() + error / variance).mean())

        return score

    noises = squared_errors(net, *held).mean() * torch.logspace(-1.5, 0.5, 41).double()
    best = max(itertools.product(PRIOR_PRECISIONS, noises), key=scorer(held))
    return scorer(test)(best)


def class_laplace(net: nn.Module, x: Tensor, held: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]) -> float:
    """The same for classes: the generalised Gauss-Newton matrix of the last layer, whole, and 256 points of the logits."""
    phi = features(net, x)
    with torch.no_grad():
        chances = net(x).double().softmax(1)
    n_classes, size = chances.shape[1], phi.shape[1]
    hessian = torch.zeros(n_classes, size, n_classes, size).double()
    for k in range(n_classes):
        for other in range(k + 1):
            weight = chances[:, k] * (float(k == other) - chances[:, other])
            hessian[k, :, other] = hessian[other, :, k] = phi.T @ (weight[:, None] * phi)
    levels, axes = torch.linalg.eigh(hessian.view(n_classes * size, -1))

    def scorer(rows: tuple[Tensor, Tensor]) -> Callable[[Tensor], float]:
        projected = torch.einsum("rf,kfe->rke", features(net, rows[0]), axes.view(n_classes, size, -1))
        with torch.no_grad():
            mean = net(rows[0]).double()

        def score(precision: Tensor) -> float:
            covariance = torch.einsum("rke,rle->rkl", projected / (levels.clamp(min=0) + precision), projected)
            probabilities = gaussian_points(mean, covariance).softmax(2).mean(0)
            return float(probabilities.gather(1, rows[1][:, None]).log().mean())

        return score

    best = max(PRIOR_PRECISIONS[::2], key=scorer(held))
    return scorer(test)(best)


def compared(net: nn.Module, x: Tensor, held: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]) -> dict[str, float]:
    """Test log-likelihoods of tuned rates and of the Laplace approximation."""
    is_number = test[1].is_floating_point()
    tuning = db.tune_dropout(net, *held, per="unit" if is_number else "layer")
    laplace = gaussian_laplace if is_number else class_laplace
    found = {"laplace": laplace(net, x, held, test)}
    if tuning.drop_probs:
        judged = db.evaluate(tuning.network, *test, likelihood=tuning.likelihood, n_draws=1000)
        return {"tuned": judged.log_likelihood, **found}
    with torch.no_grad():
        return {"tuned": float(tuning.likelihood.log_density(net(test[0]), test[1]).mean()), **found}


def rates() -> tuple[Found, list[Goal]]:
    """Networks trained without dropout: both methods see the same held-out rows, and are judged on others."""
    found: dict[str, dict[str, float]] = {}
    for name, (_, precision) in PAPER.items():
        scores = {"tuned": 0.0, "laplace": 0.0}
        for x, y, x_test, y_test, spread in splits(name):
            torch.manual_seed(0)
            n_fit = 4 * len(x) // 5
            net = nn.Sequential(nn.Linear(x.shape[1], 50), nn.ReLU(), nn.Linear(50, 1))
            net = fitted(net, x[:n_fit], y[:n_fit], precision * spread**2)
            one = compared(net, x[:n_fit], (x[n_fit:], y[n_fit:]), (x_test, y_test))
            scores = {way: scores[way] + one[way] / N_SPLITS for way in scores}
        found[name] = scores
        print(name, scores, flush=True)
    data = digits("auto")
    torch.manual_seed(0)
    some = data.x_test[:4000]
    noisy = (some + NOISE * torch.randn_like(some)).flatten(1)
    layers = [nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)]
    x, y, n_held = data.x[:N_TRAINED].flatten(1), data.y[:N_TRAINED], len(noisy) // 2
    net = trained(nn.Sequential(*layers), x, y, 600)
    found["MNIST, noisy"] = compared(
        net, x, (noisy[:n_held], data.y_test[:n_held]), (noisy[n_held:], data.y_test[n_held : len(noisy)])
    )
    print(found["MNIST, noisy"], flush=True)
    better = [name for name, one in found.items() if one["tuned"] > one["laplace"]]
    n_sets = sum(name in PAPER for name in better)
    goals = [Goal("UCI sets on which tuned rates beat last-layer Laplace", n_sets, at_least=6)]
    goals.append(Goal("the same on noisy digits", float("MNIST, noisy" in better), at_least=1))
    return {"sets": found, "better": n_sets}, goals


def rate_rows(found: Found) -> list[list[str]]:
    return [[name, f"{one['tuned']:.3f}", f"{one['laplace']:.3f}"] for name, one in found["sets"].items()]


PARTS: dict[str, tuple[Callable[[], tuple[Found, list[Goal]]], Callable[[Found], list[list[str]]], list[str]]] = {
    "causes": (causes, cause_rows, ["the row's value is", "against the training rows", "against their mean"]),
    "likelihoods": (likelihoods, likelihood_rows, ["set", "1,000 draws", "linear", "moments"]),
    "rates": (rates, rate_rows, ["set", "tuned rates", "last-layer Laplace"]),
}


def main(part: str) -> None:
    warnings.simplefilter("ignore")
    run, rows, head = PARTS[part]
    found, goals = run()
    print(table(rows(found), head))
    history.write(f"one_pass_{part}", found, goals)


if __name__ == "__main__":
    main(sys.argv[1])
