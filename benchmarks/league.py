"""A league of tables: the default estimators against what scikit-learn offers with a distribution.

    python -m benchmarks.league $DROPBAYES_DATA/league                    # numbers
    python -m benchmarks.league $DROPBAYES_DATA/league_classes            # classes
    python -m benchmarks.league $DROPBAYES_DATA/league --again dropbayes  # one contestant once more
    python -m benchmarks.league --show                                    # the tables of docs/alternatives.md

A folder holds one .npz file for each table: X `[row, column]`, y `[row]` (unsigned integers are classes) and fold
`[row]`, the fold that holds each row out; at most 3,000 rows, as in ScoringBench (arXiv 2603.29928). Numbers are
standardised by the training rows of their fold. Games in benchmarks/results/league.json are not played again; the
Gaussian process was stopped on music_origin, which has 117 columns. The CRPS is twice the mean pinball loss of ten
quantiles for every contestant; quantiles have no density, and so no log score.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import time
import warnings
from collections.abc import Callable

import numpy as np
from scipy.stats import norm, rankdata
from sklearn.ensemble import (
    ExtraTreesClassifier,
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
    RandomForestRegressor,
)
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from dropbayes.estimators import DropoutClassifier, DropoutRegressor

RESULTS = pathlib.Path(__file__).parent / "results" / "league.json"
PAGE = pathlib.Path(__file__).parent.parent / "docs" / "alternatives.md"
BEGIN, END = "<!-- league: begin -->", "<!-- league: end -->"
LEVELS = np.arange(0.05, 1, 0.1)  # the middle of every tenth; the outer two are the 90 % interval
PROCESS_ROWS = 800
# Tables whose scores nobody looked at while the defaults were developed.
HELD_BACK = (
    *("auto_mpg", "cpu_act", "era", "house_8L", "la_mortality", "music_origin", "planes2d", "pollen", "skillcraft"),
    *("wind", "australian", "contraceptive", "phoneme", "vehicle"),
)

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


def forest_numbers(x: Array, y: Array, new: Array, truth: Array) -> Scores:
    """A quantile forest (Meinshausen 2006): quantiles of the training targets, weighted by the leaves they share."""
    forest = RandomForestRegressor(200, min_samples_leaf=5, max_features=1 / 3, bootstrap=False, random_state=0)
    known, met = forest.fit(x, y).apply(x), forest.apply(new)
    weight = np.zeros((len(new), len(x)))
    for leaf, met_leaf in zip(known.T, met.T, strict=True):
        same = met_leaf[:, None] == leaf
        weight += same / same.sum(1, keepdims=True)
    order = y.argsort()
    share = weight[:, order].cumsum(1) / len(known.T)
    index = np.stack([(share < level).sum(1) for level in LEVELS]).clip(max=len(y) - 1)
    return regression_scores(truth, y[order][index], weight @ y / len(known.T), None)


def dropout_classes(x: Array, y: Array, new: Array, truth: Array) -> Scores:
    return class_scores(truth, DropoutClassifier(random_state=0).fit(x, y).predict_proba(new))


def boosted_classes(x: Array, y: Array, new: Array, truth: Array) -> Scores:
    return class_scores(truth, HistGradientBoostingClassifier(random_state=0).fit(x, y).predict_proba(new))


def trees_classes(x: Array, y: Array, new: Array, truth: Array) -> Scores:
    trees = ExtraTreesClassifier(300, min_samples_leaf=3, random_state=0)
    return class_scores(truth, make_pipeline(SimpleImputer(), trees).fit(x, y).predict_proba(new))


def logistic_classes(x: Array, y: Array, new: Array, truth: Array) -> Scores:
    logistic = make_pipeline(SimpleImputer(), StandardScaler(), LogisticRegression(max_iter=1000))
    return class_scores(truth, logistic.fit(x, y).predict_proba(new))


def some_rows(x: Array) -> Array:
    return np.random.default_rng(0).permutation(len(x))[:PROCESS_ROWS]


Contestant = Callable[[Array, Array, Array, Array], Scores]
NUMBERS: dict[str, Contestant] = {
    "dropbayes": dropout_numbers,
    "boosted quantiles": boosted_numbers,
    "quantile forest": forest_numbers,
    "Gaussian process": process_numbers,
}
CLASSES: dict[str, Contestant] = {
    "dropbayes": dropout_classes,
    "boosting": boosted_classes,
    "extra trees": trees_classes,
    "logistic regression": logistic_classes,
}


def play(path: pathlib.Path, fold: int, contestant: str) -> Scores:
    """The scores of a contestant on one fold of a table, with the CPU seconds of fit and prediction."""
    with np.load(path) as table:
        x, y, held = table["X"].astype(np.float64), table["y"], table["fold"] == fold
    games = NUMBERS if y.dtype.kind == "f" else CLASSES
    if games is NUMBERS:
        y = (y - y[~held].mean()) / y[~held].std()
    start = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a kernel's bounds, of bounded predictions
        scores = games[contestant](x[~held], y[~held], x[held], y[held])
    return scores | {"CPU s": time.process_time() - start}


def contestants(path: pathlib.Path) -> list[str]:
    with np.load(path) as table:
        return list(NUMBERS if table["y"].dtype.kind == "f" else CLASSES)


def mean_scores(games: dict[str, Scores]) -> Scores:
    """The mean of each score over the folds played."""
    first = next(iter(games.values()))
    return {key: float(np.mean([scores[key] for scores in games.values()])) for key in first}


def standings(results: dict[str, dict[str, dict[str, Scores]]], names: list[str]) -> str:
    """A Markdown table of some tables' scores, the best of each bold, and the mean ranks below it."""
    means = {table: {name: mean_scores(games) for name, games in results[table].items()} for table in names}
    numbers = "CRPS" in means[names[0]]["dropbayes"]
    players, key = list(NUMBERS if numbers else CLASSES), "CRPS" if numbers else "NLL"
    own = {"log score": ".2f", "coverage": ".0%"} if numbers else {"accuracy": ".1%"}
    head = ["table", *players, *own, "CPU (s)"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    ranks = []
    for table, scores in means.items():
        values = [scores[player][key] if player in scores else np.inf for player in players]  # last where it gave up
        shown = [f"**{value:.4f}**" if value == min(values) else f"{value:.4f}" for value in values]
        shown = [value.replace("inf", "–") for value in shown]
        shown += [f"{scores['dropbayes'][name]:{form}}" for name, form in own.items()]
        lines.append("| " + " | ".join([table, *shown, f"{scores['dropbayes']['CPU s']:.1f}"]) + " |")
        ranks.append(rankdata(values))
    rank = zip(players, np.mean(ranks, axis=0), strict=True)
    below = ", ".join(f"{player} {value:.2f}" for player, value in rank)
    best = sum(int(np.argmin(row) == 0) for row in ranks)
    within = sum(scores["dropbayes"][key] <= 1.15 * min(s[key] for s in scores.values()) for scores in means.values())
    return "\n".join(lines) + (
        f"\n\nMean rank of the {key} over {len(names)} tables: {below}. The default is best on {best} and within 1.15 "
        f"times the best on {within}.\n"
    )


def page(results: dict[str, dict[str, dict[str, Scores]]]) -> str:
    """The part of docs/alternatives.md between its two comments."""
    parts = []
    for title, players in (("Numbers: CRPS", NUMBERS), ("Classes: negative log-likelihood", CLASSES)):
        tables = sorted(name for name, games in results.items() if games.keys() <= players.keys())
        for part, held_back in (("", False), (", tables held back", True)):
            names = [name for name in tables if (name in HELD_BACK) == held_back]
            if names:
                parts.append(f"### {title}{part}\n\n{standings(results, names)}")
    return "\n".join(parts)


def write_page(results: dict[str, dict[str, dict[str, Scores]]]) -> None:
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    PAGE.write_text(before + BEGIN + "\n\n" + page(results) + "\n" + END + rest.split(END)[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path, nargs="?", help="the folder of the tables")
    parser.add_argument("--folds", type=int, default=1, help="the number of folds of each table")
    parser.add_argument("--tables", default="", help="names of tables, with commas; all by default")
    parser.add_argument("--again", default="", help="a contestant that plays again")
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS, help="the file of the games")
    parser.add_argument("--show", action="store_true", help="write the tables of docs/alternatives.md")
    parser.add_argument("--development", action="store_true", help="without the tables held back")
    arguments = parser.parse_args()
    results = json.loads(arguments.results.read_text()) if arguments.results.exists() else {}
    chosen = set(filter(None, arguments.tables.split(",")))
    for path in sorted(arguments.folder.glob("*.npz") if arguments.folder else []):
        if (chosen and path.stem not in chosen) or (arguments.development and path.stem in HELD_BACK):
            continue
        for name in contestants(path):
            for fold in range(arguments.folds):
                games = results.setdefault(path.stem, {}).setdefault(name, {})
                if str(fold) not in games or name == arguments.again:
                    games[str(fold)] = play(path, fold, name)
                    arguments.results.write_text(json.dumps(results, indent=1) + "\n")
                    print(path.stem, name, fold, {key: round(v, 4) for key, v in games[str(fold)].items()}, flush=True)
    if arguments.show:
        write_page(results)


if __name__ == "__main__":
    main()
