"""A league of tables: the default estimators against boosted quantiles and a Gaussian process.

    python -m benchmarks.league $DROPBAYES_DATA/league                    # numbers
    python -m benchmarks.league $DROPBAYES_DATA/league_classes --folds 1  # classes, one fold of each table

A folder holds one .npz file for each table: X `[row, column]`, y `[row]` (unsigned integers are classes) and fold
`[row]`, the fold that holds each row out. Prints a Markdown table of the scores of each contestant, means over the
folds, and the mean rank over the tables. The CRPS is twice the mean pinball loss of ten quantiles for every contestant;
boosted quantiles have no density, and so no log score.
"""

from __future__ import annotations

import argparse
import pathlib
import time
from collections.abc import Callable

import numpy as np
from scipy.stats import norm, rankdata
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.gaussian_process import GaussianProcessClassifier, GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from dropbayes.estimators import DropoutClassifier, DropoutRegressor

LEVELS = np.arange(0.05, 1, 0.1)  # the middle of every tenth; the outer two are the 90 % interval
PROCESS_ROWS = 800

Array = np.ndarray
Scores = dict[str, float]


def regression_scores(y: Array, quantiles: Array, mean: Array, log_density: Array | None) -> Scores:
    """The scores of predicted quantiles `[level, row]`, means and log-densities.

    Example:
        >>> y = np.zeros(1)
        >>> regression_scores(y, np.zeros((10, 1)), y, None)["CRPS"]
        0.0
    """
    error = y - quantiles
    pinball = np.maximum(LEVELS[:, None] * error, (LEVELS[:, None] - 1) * error)
    return {
        "log score": np.nan if log_density is None else float(log_density.mean()),
        "CRPS": float(2 * pinball.mean()),
        "coverage": float(((quantiles[0] <= y) & (y <= quantiles[-1])).mean()),
        "width": float((quantiles[-1] - quantiles[0]).mean()),
        "RMSE": float(np.sqrt(((y - mean) ** 2).mean())),
    }


def class_scores(y: Array, probabilities: Array) -> Scores:
    """The scores of class probabilities `[row, class]`.

    Example:
        >>> class_scores(np.array([0]), np.array([[0.5, 0.5]]))["Brier"]
        0.5
    """
    truth = np.eye(probabilities.shape[1])[y]
    return {
        "NLL": float(-np.log(np.maximum(probabilities[truth == 1], 1e-12)).mean()),
        "Brier": float(((probabilities - truth) ** 2).sum(1).mean()),
        "accuracy": float((probabilities.argmax(1) == y).mean()),
    }


def dropout_numbers(x: Array, y: Array, new: Array, truth: Array) -> Scores:
    mixture = DropoutRegressor(random_state=0).fit(x, y).predictive(new)
    quantiles = np.stack([mixture.quantile(float(level)).numpy() for level in LEVELS])
    return regression_scores(truth, quantiles, mixture.mean.numpy(), mixture.log_density(truth).numpy())


def boosted_numbers(x: Array, y: Array, new: Array, truth: Array) -> Scores:
    models = [HistGradientBoostingRegressor(loss="quantile", quantile=level, random_state=0) for level in LEVELS]
    quantiles = np.sort([model.fit(x, y).predict(new) for model in models], axis=0)
    mean = HistGradientBoostingRegressor(random_state=0).fit(x, y).predict(new)
    return regression_scores(truth, quantiles, mean, None)


def process_numbers(x: Array, y: Array, new: Array, truth: Array) -> Scores:
    rows, kernel = some_rows(x), ConstantKernel() * RBF(np.ones(x.shape[1])) + WhiteKernel()
    process = make_pipeline(
        SimpleImputer(keep_empty_features=True),
        StandardScaler(),
        GaussianProcessRegressor(kernel, normalize_y=True, random_state=0),
    )
    mean, std = process.fit(x[rows], y[rows]).predict(new, return_std=True)
    predicted = norm(mean, std)
    return regression_scores(truth, predicted.ppf(LEVELS[:, None]), mean, predicted.logpdf(truth))


def dropout_classes(x: Array, y: Array, new: Array, truth: Array) -> Scores:
    return class_scores(truth, DropoutClassifier(random_state=0).fit(x, y).predict_proba(new))


def boosted_classes(x: Array, y: Array, new: Array, truth: Array) -> Scores:
    return class_scores(truth, HistGradientBoostingClassifier(random_state=0).fit(x, y).predict_proba(new))


def process_classes(x: Array, y: Array, new: Array, truth: Array) -> Scores:
    rows = some_rows(x)
    process = GaussianProcessClassifier(ConstantKernel() * RBF(), random_state=0)
    fitted = make_pipeline(SimpleImputer(keep_empty_features=True), StandardScaler(), process).fit(x[rows], y[rows])
    return class_scores(truth, fitted.predict_proba(new))


def some_rows(x: Array) -> Array:
    return np.random.default_rng(0).permutation(len(x))[:PROCESS_ROWS]


Contestant = Callable[[Array, Array, Array, Array], Scores]
NUMBERS: dict[str, Contestant] = {
    "dropbayes": dropout_numbers,
    "boosted quantiles": boosted_numbers,
    "Gaussian process": process_numbers,
}
CLASSES: dict[str, Contestant] = {
    "dropbayes": dropout_classes,
    "boosting": boosted_classes,
    "Gaussian process": process_classes,
}


def play(path: pathlib.Path, n_folds: int) -> dict[str, Scores]:
    """The scores of every contestant on one table, means over its first folds, with the CPU seconds of a fold."""
    with np.load(path) as table:
        x, y, fold = table["X"].astype(np.float64), table["y"], table["fold"]
    contestants = NUMBERS if y.dtype.kind == "f" else CLASSES
    results = {}
    for name, contestant in contestants.items():
        folds = []
        for held in (fold == k for k in np.unique(fold)[:n_folds]):
            start = time.process_time()
            scores = contestant(x[~held], y[~held], x[held], y[held])
            folds.append(scores | {"CPU s": time.process_time() - start})
        results[name] = {key: float(np.mean([scores[key] for scores in folds])) for key in folds[0]}
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path, help="the folder of the tables")
    parser.add_argument("--folds", type=int, default=5, help="the number of folds of each table")
    parser.add_argument("--tables", default="", help="names of tables, with commas; all by default")
    arguments = parser.parse_args()
    chosen = set(filter(None, arguments.tables.split(",")))
    ranks: list[Array] = []
    header: list[str] = []
    for path in sorted(arguments.folder.glob("*.npz")):
        if chosen and path.stem not in chosen:
            continue
        results = play(path, arguments.folds)
        if not header:
            header = ["table", "contestant", *next(iter(results.values()))]
            print("| " + " | ".join(header) + " |\n|" + "---|" * len(header))
        for name, scores in results.items():
            print(
                "| " + " | ".join([path.stem, name, *(f"{value:.4g}" for value in scores.values())]) + " |", flush=True
            )
        ranks.append(rankdata([scores.get("CRPS", scores.get("NLL")) for scores in results.values()]))
    if ranks:
        means = zip(results, np.mean(ranks, axis=0), strict=True)
        print(f"\nmean rank over {len(ranks)} tables: " + ", ".join(f"{name} {rank:.2f}" for name, rank in means))


if __name__ == "__main__":
    main()
