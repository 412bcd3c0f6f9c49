"""A league of tables: the default estimators against what one would pick instead, all with a distribution.

    python -m benchmarks.league $DROPBAYES_DATA/league                      # numbers
    python -m benchmarks.league $DROPBAYES_DATA/league_classes --jobs 16    # classes, sixteen games at a time
    python -m benchmarks.league $DROPBAYES_DATA/league --players dropbayes --again
    python -m benchmarks.league --show                                      # the tables of docs/alternatives.md

A folder holds one .npz file for each table: X `[row, column]`, y `[row]` (unsigned integers are classes) and fold
`[row]`, the fold that holds each row out; at most 3,000 rows, as in ScoringBench (arXiv 2603.29928). Numbers are
standardised by the training rows of their fold. Games in benchmarks/results/league.json are not played again; the
Gaussian process was stopped on music_origin, which has 117 columns. Contestants whose library is not installed are left
out (`pip install catboost ngboost xgboostlss pytabkit`, best in an environment of their own). The CRPS is twice the mean
pinball loss of ten quantiles for every contestant; quantiles have no density, and so no log score.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import pathlib
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed

import numpy as np
from scipy.stats import rankdata, studentized_range, wilcoxon

from benchmarks.contestants import CLASSES, DEFAULT, EFFORTS, NUMBERS, Array, Contestant, Scores

RESULTS = pathlib.Path(__file__).parent / "results" / "league.json"
PAGE = pathlib.Path(__file__).parent.parent / "docs" / "alternatives.md"
BEGIN, END = "<!-- league: begin -->", "<!-- league: end -->"
# Tables whose scores nobody looked at while the defaults were developed.
HELD_BACK = (
    *("auto_mpg", "cpu_act", "era", "house_8L", "la_mortality", "music_origin", "planes2d", "pollen", "skillcraft"),
    *("wind", "contraceptive", "phoneme", "vehicle"),
)
COVERED = (0.86, 0.94)  # acceptable coverages of 90 % intervals

Results = dict[str, dict[str, dict[str, Scores]]]  # by table, contestant and fold
Means = dict[str, dict[str, Scores]]  # by table and contestant
Game = tuple[pathlib.Path, str, int]


# --- games --------------------------------------------------------------------------------------------------------------


def play(path: pathlib.Path, contestant: str, fold: int) -> Scores:
    """The scores of a contestant on one fold of a table, with the CPU seconds of fit and prediction."""
    with np.load(path) as table:
        x, y, held = table["X"].astype(np.float64), table["y"], table["fold"] == fold
    if y.dtype.kind == "f":
        y = (y - y[~held].mean()) / y[~held].std()
    start = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a kernel's bounds, of bounded predictions
        scores = players_of(path)[contestant].play(x[~held], y[~held], x[held], y[held])
    return scores | {"CPU s": time.process_time() - start}


def players_of(path: pathlib.Path) -> dict[str, Contestant]:
    """The contestants for the kind of a table's targets, if it is not too long for them."""
    with np.load(path) as table:
        kind = NUMBERS if table["y"].dtype.kind == "f" else CLASSES
        return {name: player for name, player in kind.items() if len(table["y"]) <= player.max_rows}


def played(games: list[Game], n_jobs: int) -> Iterator[tuple[Game, Scores]]:
    """Each game with its scores, as they end; a contestant that fails says why, and the others go on."""
    if n_jobs == 1:
        for game in games:
            try:
                yield game, play(*game)
            except Exception as error:
                print(*game, "gave up:", repr(error), flush=True)
        return
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes
    with ProcessPoolExecutor(n_jobs, multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(play, *game): game for game in games}
        for future in as_completed(running):
            if error := future.exception():
                print(*running[future], "gave up:", repr(error), flush=True)
            else:
                yield running[future], future.result()


# --- the page -----------------------------------------------------------------------------------------------------------


def common_means(players: dict[str, dict[str, Scores]]) -> dict[str, Scores]:
    """The mean scores of each contestant on a table, over the folds that all of them played."""
    folds = set.intersection(*(set(games) for games in players.values()))
    return {name: mean_scores({fold: games[fold] for fold in sorted(folds)}) for name, games in players.items()}


def mean_scores(games: dict[str, Scores]) -> Scores:
    """The mean over the folds played of each score that all of them have."""
    first, *others = games.values()
    keys = [key for key in first if all(key in scores for scores in others)]
    return {key: float(np.mean([scores[key] for scores in games.values()])) for key in keys}


def critical_difference(n_players: int, n_tables: int) -> float:
    """The difference of two mean ranks that is significant at 5 % (Nemenyi).

    Example:
        >>> round(critical_difference(4, 15), 2)
        1.21
    """
    score = studentized_range.ppf(0.95, n_players, np.inf) / np.sqrt(2)
    return float(score * np.sqrt(n_players * (n_players + 1) / (6 * n_tables)))


def holm(p_values: Array) -> Array:
    """p-values corrected for their number (Holm).

    Example:
        >>> holm(np.array([0.01, 0.04, 0.03])).tolist()
        [0.03, 0.06, 0.06]
    """
    order, m = p_values.argsort(), len(p_values)
    corrected = np.maximum.accumulate(p_values[order] * (m - np.arange(m))).clip(max=1)
    return corrected[order.argsort()]


def losses(means: Means, players: list[str], key: str) -> Array:
    """The losses `[table, player]`; infinite, and so last in rank, where a contestant gave up; NaN without a density."""
    sign = -1 if key == "log score" else 1
    found = np.array([[sign * s[p].get(key, np.nan) if p in s else np.inf for p in players] for s in means.values()])
    return found if key == "log score" else np.where(np.isnan(found), np.inf, found)  # predictions that are no numbers


def significance(means: Means, rivals: list[str], key: str) -> dict[str, float]:
    """The p-value of each rival being as good as the default: Wilcoxon's test of the log-ratios, corrected by Holm."""
    ratios = np.log(losses(means, [DEFAULT, *rivals], key)).clip(max=1e9)
    p_values = [float(wilcoxon(ratios[:, 0], other).pvalue) for other in ratios.T[1:]]
    return dict(zip(rivals, holm(np.array(p_values)), strict=True))


def not_ranked(means: Means, players: list[str]) -> set[str]:
    """Other efforts of ours, and contestants that played on too few tables."""
    return {*EFFORTS, *(p for p in players if sum(p in scores for scores in means.values()) < 0.6 * len(means))}


def summary(means: Means, players: list[str], key: str) -> str:
    """A Markdown table with a row for each contestant; efforts are ranked in the place of the default."""
    apart = not_ranked(means, players)
    rivals = [player for player in players if player != DEFAULT and player not in apart]
    p_values, rows = significance(means, rivals, key), []
    for player in players:
        met = {table: scores for table, scores in means.items() if player in scores}
        others = [other for other in (rivals if player in EFFORTS else [DEFAULT, *rivals]) if other != player]
        # A contestant that gave up is last; those that are not affordable everywhere are ranked where they played.
        values = losses(met if player in apart else means, [player, *others], key)
        cells = {
            "": player,
            "tables": f"{len(met)}",
            f"rank of {key}": f"{rankdata(values, axis=1)[:, 0].mean():.2f}",
            "best": f"{(values[:, 0] <= values.min(1)).sum()}",
            "within 1.15": f"{(values[:, 0] <= 1.15 * values.min(1)).sum()}",
        }
        if key == "CRPS":
            dense = [other for other in others if not np.isnan(losses(means, [other], "log score")).any()]
            scores = losses(met if player in apart else means, [player, *dense], "log score")
            rank = rankdata(scores, axis=1)[:, 0].mean()
            low, high = COVERED
            cells["rank of log score"] = "–" if np.isnan(rank) else f"{rank:.2f}"
            cells["covered"] = f"{sum(low <= own[player]['coverage'] <= high for own in met.values())}"
        cells["CPU (s)"] = f"{np.median([own[player]['CPU s'] for own in met.values()]):.1f}"
        cells["p"] = f"{p_values[player]:.2g}" if player in p_values else ""
        rows.append(cells)
    return markdown(list(rows[0]), [list(row.values()) for row in rows])


def markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def standings(results: Results, names: list[str]) -> str:
    """The scores on some tables, the best of each bold, below the summary of the contestants."""
    means = {table: common_means(results[table]) for table in names}
    key, kind = ("CRPS", NUMBERS) if "CRPS" in means[names[0]][DEFAULT] else ("NLL", CLASSES)
    players = [name for name in kind if any(name in scores for scores in means.values())]
    own = {"log score": ".2f", "coverage": ".0%"} if key == "CRPS" else {"accuracy": ".1%"}
    rows = []
    for (table, scores), values in zip(means.items(), losses(means, players, key), strict=True):
        shown = [f"**{value:.4f}**" if value == values.min() else f"{value:.4f}" for value in values]
        shown += [f"{scores[DEFAULT][name]:{form}}" for name, form in own.items()]
        rows.append([table, *(value.replace("inf", "–") for value in shown), f"{scores[DEFAULT]['CPU s']:.1f}"])
    n_ranked = len(set(players) - not_ranked(means, players))
    return (
        f"{summary(means, players, key)}\n\nMean ranks of two contestants differ significantly (Nemenyi, 5 %) from "
        f"{critical_difference(n_ranked, len(names)):.2f} on.\n\n{markdown(['table', *players, *own, 'CPU (s)'], rows)}\n"
    )


def page(results: Results) -> str:
    """The part of docs/alternatives.md between its two comments."""
    parts = []
    for title, key in (("Numbers: CRPS", "CRPS"), ("Classes: negative log-likelihood", "NLL")):
        tables = sorted(name for name, games in results.items() if key in mean_scores(games[DEFAULT]))
        for part, held_back in (("", False), (", tables held back", True)):
            names = [name for name in tables if (name in HELD_BACK) == held_back]
            if names:
                parts.append(f"### {title}{part}\n\n{standings(results, names)}")
    return "\n".join(parts)


def write_page(results: Results) -> None:
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    PAGE.write_text(before + BEGIN + "\n\n" + page(results) + "\n" + END + rest.split(END)[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path, nargs="*", help="folders of tables")
    parser.add_argument("--folds", type=int, default=1, help="the number of folds of each table")
    parser.add_argument("--tables", default="", help="names of tables, with commas; all by default")
    parser.add_argument("--players", default="", help="names of contestants, with commas; all by default")
    parser.add_argument("--again", action="store_true", help="play games again that were played")
    parser.add_argument("--jobs", type=int, default=1, help="the number of games at a time, each on one thread")
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS, help="the file of the games")
    parser.add_argument("--show", action="store_true", help="write the tables of docs/alternatives.md")
    parser.add_argument("--development", action="store_true", help="without the tables held back")
    arguments = parser.parse_args()
    results: Results = json.loads(arguments.results.read_text()) if arguments.results.exists() else {}
    tables, names = (set(filter(None, value.split(","))) for value in (arguments.tables, arguments.players))
    games, absent = [], set()
    for path in sorted(file for folder in arguments.folder for file in folder.glob("*.npz")):
        if (tables and path.stem not in tables) or (arguments.development and path.stem in HELD_BACK):
            continue
        for name, player in players_of(path).items():
            if names and name not in names:
                continue
            if not player.is_installed:
                absent.add(f"{name} is left out: {player.library} is not installed.")
                continue
            known = results.get(path.stem, {}).get(name, {})
            games += [(path, name, k) for k in range(arguments.folds) if arguments.again or str(k) not in known]
    print(*sorted(absent), sep="\n")
    for (path, name, fold), scores in played(games, arguments.jobs):
        results.setdefault(path.stem, {}).setdefault(name, {})[str(fold)] = scores
        arguments.results.write_text(json.dumps(results, indent=1) + "\n")
        print(path.stem, name, fold, {key: round(value, 4) for key, value in scores.items()}, flush=True)
    if arguments.show:
        write_page(results)


if __name__ == "__main__":
    main()
