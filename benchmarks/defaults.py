"""`DropoutRegressor()` with no arguments on the UCI sets: test scores and CPU time, against an older source tree.

    python -m benchmarks.defaults --sets boston,yacht --splits 3
    python -m benchmarks.defaults --reference ../older/src     # each split with both trees, in turn

Prints a Markdown table of means over splits and writes benchmarks/results/defaults.json. Each fit is a process of its own
with the default number of threads; its time is CPU time, which other work on the machine disturbs least. Splits already
in the file are not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from benchmarks import history
from dropbayes.runtime import files

ROOT = pathlib.Path(__file__).parent.parent
FIT = """
import json, sys, time, warnings
import numpy as np
warnings.simplefilter("ignore")
from dropbayes.estimators import DropoutRegressor
try:
    from experiments.uci import data
except ImportError:
    from experiments import uci_data as data
table = data.load(sys.argv[1])
train, test = table.splits[int(sys.argv[2])]
DropoutRegressor(n_steps=10, min_epochs=1).fit(table.x[:60], table.y[:60])  # imports and first calls are not counted
begun = time.process_time()
model = DropoutRegressor(device="cpu", random_state=0).fit(table.x[train], table.y[train])
seconds = time.process_time() - begun
error = model.predict(table.x[test]) - table.y[test]
score = float(np.mean(model.log_likelihood(table.x[test], table.y[test])))
print(json.dumps({"log_likelihood": score, "rmse": float(np.sqrt(np.mean(error**2))), "cpu_seconds": seconds}))
"""


def one_fit(source: pathlib.Path, name: str, split: int) -> dict[str, Any]:
    """Fits the training rows of a split with the defaults of a source tree and scores the test rows."""
    environment = {**os.environ, "PYTHONPATH": str(source)}
    command = [sys.executable, "-c", FIT, name, str(split)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def mean_and_error(values: list[float]) -> str:
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return f"{statistics.mean(values):.3f} ± {error:.3f}"


def table(fits: list[dict[str, Any]]) -> str:
    """Means over the splits that both trees have run, and the paired difference and ratio."""
    lines = [
        "| set | splits | log-likelihood | before | difference | RMSE | before | CPU time (s) | before | ratio |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name in sorted({fit["set"] for fit in fits}):
        now = {f["split"]: f for f in fits if f["set"] == name and f["tree"] == "present"}
        before = {f["split"]: f for f in fits if f["set"] == name and f["tree"] == "reference"}
        both = sorted(now.keys() & before.keys()) or sorted(now)
        if not both:
            continue
        older = [before[s] for s in both] if before else []
        scores, times = [now[s]["log_likelihood"] for s in both], [now[s]["cpu_seconds"] for s in both]
        cells = [name, str(len(both)), f"{statistics.mean(scores):.3f}"]
        if older:
            differences = [now[s]["log_likelihood"] - before[s]["log_likelihood"] for s in both]
            ratios = [before[s]["cpu_seconds"] / now[s]["cpu_seconds"] for s in both]
            cells += [f"{statistics.mean(f['log_likelihood'] for f in older):.3f}", mean_and_error(differences)]
        else:
            ratios = []
            cells += ["", ""]
        cells += [f"{statistics.mean(now[s]['rmse'] for s in both):.4g}"]
        cells += [
            f"{statistics.mean(f['rmse'] for f in older):.4g}" if older else "",
            f"{statistics.median(times):.1f}",
        ]
        cells += [f"{statistics.median(f['cpu_seconds'] for f in older):.1f}" if older else ""]
        lines.append("| " + " | ".join([*cells, f"{statistics.median(ratios):.1f}" if ratios else ""]) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", default="boston,concrete,energy,yacht,wine,kin8nm,power")
    parser.add_argument("--splits", type=int, default=3)
    parser.add_argument("--reference", type=pathlib.Path, help="the src folder of an older version to compare with")
    parser.add_argument(
        "--out", type=pathlib.Path, help="the file of the fits; by default benchmarks/results/defaults.json"
    )
    parser.add_argument("--jobs", type=int, default=1, help="fits at a time; their CPU time is each one's own")
    arguments = parser.parse_args()
    path = arguments.out or ROOT / "benchmarks" / "results" / "defaults.json"
    fits: list[dict[str, Any]] = json.loads(path.read_text()).get("fits", []) if path.exists() else []
    done = {(f["set"], f["split"], f["tree"]) for f in fits if "tree" in f}
    fits = [f for f in fits if "tree" in f]
    trees = {"present": ROOT / "src"} | ({"reference": arguments.reference} if arguments.reference else {})
    missing = [
        (name, split, tree)
        for split in range(arguments.splits)
        for name in arguments.sets.split(",")
        for tree in trees
        if (name, split, tree) not in done
    ]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        begun = {pool.submit(one_fit, trees[fit[2]], *fit[:2]): fit for fit in missing}
        for future in as_completed(begun):
            name, split, tree = begun[future]
            fits.append({"set": name, "split": split, "tree": tree, **future.result()})
            files.write_text(path, json.dumps({"fits": fits}, indent=1) + "\n")
    if arguments.out is None:
        history.write("defaults", {"fits": fits})
    print(table(fits))


if __name__ == "__main__":
    main()
