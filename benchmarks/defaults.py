"""`DropoutRegressor()` with no arguments on the UCI sets: its test scores against the paper's Table 1, and its time.

    python -m benchmarks.defaults --splits 5 --workers 1

Prints a Markdown table and writes benchmarks/results/defaults.json. Splits already in the file are not run again. The
times are those of one process with `--threads` threads; the scores depend on neither.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import multiprocessing
import pathlib
import platform
import statistics
import time

RESULTS = pathlib.Path(__file__).parent / "results" / "defaults.json"


def one_fit(name: str, split: int, threads: int) -> dict[str, object]:
    """Fits the training rows of a split with the defaults and scores the test rows."""
    import numpy as np
    import torch

    from dropbayes.estimators import DropoutRegressor
    from dropbayes.experiments.uci import data as uci_data

    torch.set_num_threads(threads)
    data = uci_data.load(name)
    train, test = data.splits[split]
    start = time.perf_counter()
    model = DropoutRegressor(device="cpu").fit(data.x[train], data.y[train])
    seconds = time.perf_counter() - start
    error = model.predict(data.x[test]) - data.y[test].reshape(-1)
    return {
        "set": name,
        "split": split,
        "log_likelihood": float(np.mean(model.log_likelihood(data.x[test], data.y[test]))),
        "rmse": float(np.sqrt(np.mean(error**2))),
        "fit_seconds": seconds,
    }


def table(entries: list[dict[str, object]]) -> str:
    """Means over splits beside the published ones."""
    from dropbayes.experiments.uci import page as uci_report

    lines = [
        "| set | splits | log-likelihood | Table 1 | reached | RMSE | Table 1 | fit (s) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in sorted({str(entry["set"]) for entry in entries}):
        own = [entry for entry in entries if entry["set"] == name]
        scores = [float(e["log_likelihood"]) for e in own]  # type: ignore[arg-type]
        error = statistics.stdev(scores) / len(scores) ** 0.5 if len(scores) > 1 else float("nan")
        published = uci_report.PUBLISHED[name].paper
        mean = statistics.mean(scores)
        lines.append(
            f"| {name} | {len(own)} | {mean:.3f} ± {error:.3f} | {published[1]} | {'yes' if mean >= published[1] else 'no'} | "
            f"{statistics.mean(float(e['rmse']) for e in own):.4g} | {published[0]} | "  # type: ignore[arg-type]
            f"{statistics.median(float(e['fit_seconds']) for e in own):.0f} |"  # type: ignore[arg-type]
        )
    return "\n".join(lines)


def main() -> None:
    from dropbayes.experiments.uci import data as uci_data

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sets", default=",".join(uci_data.SMALLEST_FIRST))
    parser.add_argument("--splits", type=int, default=20)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no fit after this time")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    arguments = parser.parse_args()
    saved = json.loads(arguments.out.read_text()) if arguments.out.exists() else {"fits": []}
    done = {(e["set"], e["split"]) for e in saved["fits"]}
    counts = {name: len(uci_data.load(name).splits) for name in arguments.sets.split(",")}
    tasks = [
        (name, split)
        for split in range(arguments.splits)
        for name in reversed(counts)  # the largest first
        if split < counts[name] and (name, split) not in done
    ]
    began = time.perf_counter()
    saved["hardware"] = f"{platform.machine()}, {arguments.workers} processes of {arguments.threads} threads"
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(arguments.workers, mp_context=context) as pool:
        waiting = iter(tasks)
        running = {
            pool.submit(one_fit, *task, arguments.threads)
            for task, _ in zip(waiting, range(arguments.workers), strict=False)
        }
        while running:
            finished, running = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
            for future in finished:
                saved["fits"].append(future.result())
                arguments.out.write_text(json.dumps(saved, indent=1) + "\n")
                task = next(waiting, None)
                if task is not None and time.perf_counter() - began < arguments.seconds:
                    running.add(pool.submit(one_fit, *task, arguments.threads))
    print(table(saved["fits"]))


if __name__ == "__main__":
    main()
