"""`DropoutRegressor()` beside what one would pick instead, on the UCI sets: scores of the test rows and time of the fit.

    python -m benchmarks.comparison                          # three splits of each set, one of the large ones
    python -m benchmarks.comparison --sets boston,yacht --methods ours,ngboost
    python -m benchmarks.comparison --show                   # only the table, from the splits run so far

Needs the extra `compare` (NGBoost, CatBoost). Every method has its usual settings and none is tuned here. Each fit is a
process of its own; its time is CPU time, which other work on the machine disturbs least. Splits already in
benchmarks/results/comparison.json are not run again; the table goes into docs/alternatives.md.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from benchmarks import history
from dropbayes.predictive.mixtures import Mixture
from dropbayes.runtime import files
from experiments.uci import data

ROOT = pathlib.Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "comparison.json"
COVERAGE = 0.9
LEVELS = np.arange(1, 20) / 20  # quantiles of the boosted trees: their mean pinball loss is half the CRPS, nearly
LARGE = ("kin8nm", "naval", "power", "protein")
GAUSSIAN_PROCESS_ROWS = 1000  # the time of an exact process grows with the cube of its rows
Array = np.ndarray
Predict = Callable[[Array], dict[str, Any]]


# --- the methods: each learns from training rows and returns a function that predicts -----------------------------------


def ours(x: Array, y: Array) -> Predict:
    from dropbayes.estimators import DropoutRegressor

    model = DropoutRegressor(device="cpu", random_state=0).fit(x, y)
    return lambda rows: {"mixture": model.predictive(rows)}


def ngboost(x: Array, y: Array) -> Predict:
    from ngboost import NGBRegressor

    model = NGBRegressor(random_state=0, verbose=False).fit(x, y)

    def predict(rows: Array) -> dict[str, Any]:
        normal = model.pred_dist(rows)
        return gaussian(normal.loc, normal.scale)

    return predict


def catboost(x: Array, y: Array) -> Predict:
    from catboost import CatBoostRegressor

    model = CatBoostRegressor(
        loss_function="RMSEWithUncertainty", posterior_sampling=True, random_seed=0, verbose=False,
        allow_writing_files=False,
    ).fit(x, y)  # fmt: skip

    def predict(rows: Array) -> dict[str, Any]:
        mean, knowledge, noise = model.virtual_ensembles_predict(rows, prediction_type="TotalUncertainty").T
        return gaussian(mean, np.sqrt(knowledge + noise))

    return predict


def gaussian_process(x: Array, y: Array) -> Predict:
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    chosen = np.random.RandomState(0).permutation(len(x))[:GAUSSIAN_PROCESS_ROWS]
    kernel = ConstantKernel() * RBF(np.ones(x.shape[1])) + WhiteKernel()
    process = GaussianProcessRegressor(kernel, normalize_y=True, random_state=0)
    model = make_pipeline(StandardScaler(), process).fit(x[chosen], y[chosen])
    return lambda rows: gaussian(*model.predict(rows, return_std=True))


def quantile_boosting(x: Array, y: Array) -> Predict:
    """Quantiles of boosted trees; the interval is widened until it covers a quarter of the rows, held out [RPC19]."""
    from sklearn.ensemble import HistGradientBoostingRegressor

    order = np.random.RandomState(0).permutation(len(x))
    held, learned = np.split(order, [len(x) // 4])
    mean = HistGradientBoostingRegressor(random_state=0).fit(x, y)
    models = [
        HistGradientBoostingRegressor(loss="quantile", quantile=level, random_state=0).fit(x[learned], y[learned])
        for level in LEVELS
    ]
    lower, upper = (models[i].predict(x[held]) for i in (0, -1))
    excess = np.sort(np.maximum(lower - y[held], y[held] - upper))
    margin = excess[min(len(held) - 1, int(np.ceil(COVERAGE * (len(held) + 1))) - 1)]

    def predict(rows: Array) -> dict[str, Any]:
        quantiles = np.sort([model.predict(rows) for model in models], 0)
        ends = (quantiles[0] - margin, quantiles[-1] + margin)
        return {"mean": mean.predict(rows), "quantiles": quantiles, "ends": ends}

    return predict


METHODS = {
    "ours": ours,
    "ngboost": ngboost,
    "catboost": catboost,
    "gaussian_process": gaussian_process,
    "quantile_boosting": quantile_boosting,
}
TITLES = {
    "ours": "`DropoutRegressor()`",
    "ngboost": "NGBoost",
    "catboost": "CatBoost",
    "gaussian_process": "Gaussian process",
    "quantile_boosting": "quantile boosting",
}


def gaussian(mean: Array, std: Array) -> dict[str, Any]:
    return {"mixture": Mixture(torch.tensor(mean)[None], torch.tensor(std)[None])}


def scores(prediction: dict[str, Any], y: Array) -> dict[str, float | None]:
    """RMSE, log-likelihood, CRPS, and the coverage and mean width of 90 % intervals."""
    if "mixture" in prediction:
        mixture: Mixture = prediction["mixture"]
        mean, ends = mixture.mean.numpy(), [end.numpy() for end in mixture.interval(COVERAGE)]
        density: float | None = float(mixture.log_density(y).mean())
        crps = float(mixture.crps(y).mean())
    else:
        mean, ends, density = prediction["mean"], prediction["ends"], None
        error = y - prediction["quantiles"]
        crps = float(2 * np.maximum(LEVELS[:, None] * error, (LEVELS[:, None] - 1) * error).mean())
    return {
        "log_likelihood": density,
        "rmse": float(np.sqrt(np.mean((mean - y) ** 2))),
        "crps": crps,
        "coverage": float(np.mean((ends[0] <= y) & (y <= ends[1]))),
        "width": float(np.mean(ends[1] - ends[0])),
    }


def one_fit(method: str, name: str, split: int) -> dict[str, Any]:
    """The scores of one method on one split."""
    warnings.simplefilter("ignore")
    table = data.load(name)
    train, test = table.splits[split]
    METHODS[method](table.x[:60], table.y[:60])  # imports and first calls are not counted
    begun = time.process_time()
    predict = METHODS[method](table.x[train], table.y[train])
    seconds = time.process_time() - begun
    return {
        "set": name,
        "split": split,
        "method": method,
        **scores(predict(table.x[test]), table.y[test]),
        "cpu_seconds": seconds,
    }


# --- the table --------------------------------------------------------------------------------------------------------


def table(fits: Iterable[dict[str, Any]]) -> str:
    """Means over the splits that all methods of a set have run; the best of each column of a set is bold."""
    lines = [
        "| set | splits | method | log-likelihood | RMSE | CRPS | coverage | width | CPU time (s) |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    fits = list(fits)
    for name in data.SMALLEST_FIRST:
        by_method = {m: {f["split"]: f for f in fits if f["set"] == name and f["method"] == m} for m in METHODS}
        by_method = {method: found for method, found in by_method.items() if found}
        splits = sorted(set.intersection(*map(set, by_method.values()))) if "ours" in by_method else []
        if not splits:
            continue
        means = {
            method: {key: mean_of([found[s][key] for s in splits]) for key in COLUMNS}
            for method, found in by_method.items()
        }
        for number, (method, values) in enumerate(means.items()):
            cells = [TITLES[method]]
            for key, (better, text) in COLUMNS.items():
                best = better and better(v[key] for v in means.values() if v[key] is not None)
                shown = "–" if values[key] is None else format(values[key], text)
                cells.append(f"**{shown}**" if best is not None and values[key] == best else shown)
            head = [name, str(len(splits))] if not number else ["", ""]
            lines.append("| " + " | ".join([*head, *cells]) + " |")
    return "\n".join(lines)


COLUMNS: dict[str, tuple[Any, str]] = {
    "log_likelihood": (max, ".3f"),
    "rmse": (min, ".4g"),
    "crps": (min, ".4g"),
    "coverage": (None, ".0%"),
    "width": (None, ".4g"),
    "cpu_seconds": (None, ".1f"),
}


def mean_of(values: list[float | None]) -> float | None:
    return None if any(value is None for value in values) else statistics.mean(values)


def read(path: pathlib.Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["fits"] if path.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", default=",".join(data.SMALLEST_FIRST))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--splits", type=int, default=3, help="splits of the smaller sets; the large ones have one")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS, help="the file of the fits")
    parser.add_argument("--show", action="store_true", help="prints the table of the splits run so far")
    parser.add_argument("--fit", nargs=3, metavar=("METHOD", "SET", "SPLIT"), help="prints one fit's scores as JSON")
    arguments = parser.parse_args()
    if arguments.fit:
        method, name, split = arguments.fit
        print(json.dumps(one_fit(method, name, int(split))))
        return
    fits = read(arguments.out)
    done = {(f["set"], f["split"], f["method"]) for f in fits}
    for name in [] if arguments.show else arguments.sets.split(","):
        for split in range(1 if name in LARGE else arguments.splits):
            for method in arguments.methods.split(","):
                if (name, split, method) not in done:
                    fits.append(_in_a_process(method, name, split))
                    files.write_text(
                        arguments.out, json.dumps({"about": history.environment(), "fits": fits}, indent=1) + "\n"
                    )
    print(table(fits))


def _in_a_process(method: str, name: str, split: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.comparison", "--fit", method, name, str(split)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment, cwd=ROOT)
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
