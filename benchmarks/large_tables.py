"""`DropoutRegressor()` on large synthetic tables: CPU time and wall time of a fit, peak memory, a prediction of all rows.

    python -m benchmarks.large_tables --rows 10000,100000

The target is Friedman's first function of five of the columns (Friedman 1991, "Multivariate Adaptive Regression Splines"),
with standard normal noise, so the best possible RMSE is 1.
"""

from __future__ import annotations

import argparse
import resource
import time

import numpy as np

from benchmarks import history
from dropbayes.estimators import DropoutRegressor


def friedman(n_rows: int, n_columns: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    source = np.random.default_rng(seed)
    x = source.uniform(size=(n_rows, n_columns))
    mean = 10 * np.sin(np.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]
    return x, mean + source.standard_normal(n_rows)


def peak_gigabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="10000,100000", help="numbers of rows, with commas")
    parser.add_argument("--columns", type=int, default=20)
    arguments = parser.parse_args()
    x_test, y_test = friedman(5000, arguments.columns, seed=1)
    DropoutRegressor(n_steps=10, min_epochs=1).fit(x_test[:60], y_test[:60])  # imports and first calls are not counted
    fits = []
    for n_rows in map(int, arguments.rows.split(",")):
        x, y = friedman(n_rows, arguments.columns, seed=0)
        before, cpu, wall = peak_gigabytes(), time.process_time(), time.perf_counter()
        model = DropoutRegressor(device="cpu", random_state=0).fit(x, y)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        error = float(np.sqrt(np.mean((model.predict(x_test) - y_test) ** 2)))
        score = model.log_likelihood(x_test, y_test)
        print(
            f"{n_rows:>9,} rows: fit {cpu:.1f} s of CPU, {wall:.1f} s; RMSE {error:.3f}, log-likelihood {score:.3f}; "
            f"peak memory {peak_gigabytes():.2f} GB (before the fit {before:.2f})",
            flush=True,
        )
        begun = time.perf_counter()
        model.with_draws(n_draws=10).predict(x)
        print(f"           10 draws for every row {time.perf_counter() - begun:.1f} s; peak {peak_gigabytes():.2f} GB")
        figures = {"cpu_seconds": cpu, "wall_seconds": wall, "rmse": error, "log_likelihood": score}
        fits.append({"rows": n_rows, **figures, "peak_gb": peak_gigabytes()})
    history.write("large_tables", {"columns": arguments.columns, "fits": fits})


if __name__ == "__main__":
    main()
