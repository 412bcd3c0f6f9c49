"""Memory and throughput of `dropbayes predict` on long files: python -m benchmarks.tables [ROWS ...]

Each length is predicted in a process of its own, whose peak resident memory is read at its end; the memory that an
empty command needs (importing torch) is measured the same way.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys
import tempfile
import time

import numpy as np

from benchmarks import history

ROWS = (100_000, 1_000_000)
DRAWS = 10

CHILD = """
import resource, sys
from dropbayes.app.cli import main
code = main(sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, file=sys.stderr)
sys.exit(code)
"""


def command(*arguments: object) -> tuple[float, float]:
    """The seconds and the peak memory in MB of one call of the command line."""
    start = time.perf_counter()
    child = [sys.executable, "-c", CHILD, *map(str, arguments)]
    done = subprocess.run(child, capture_output=True, text=True, check=True)
    return time.perf_counter() - start, float(done.stderr.splitlines()[-1])


def write_rows(path: pathlib.Path, n_rows: int, *, target: bool) -> None:
    """A table of four numbers a row."""
    generator = np.random.default_rng(0)
    with path.open("w") as file:
        file.write("a,b,c,d,y\n" if target else "a,b,c,d\n")
        for start in range(0, n_rows, 100_000):
            x = generator.normal(size=(min(100_000, n_rows - start), 4))
            y = np.sin(x[:, :1]) + 0.3 * x[:, 1:2] + 0.1 * generator.normal(size=(len(x), 1))
            np.savetxt(file, np.hstack([x, y]) if target else x, fmt="%.4f", delimiter=",")


def main() -> None:
    lengths = [int(text) for text in sys.argv[1:]] or list(ROWS)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        place = pathlib.Path(folder)
        write_rows(place / "train.csv", 1000, target=True)
        options = ["--target", "y", "--out", place / "model", "--hidden", "20", "--n-networks", "1", "--n-steps", "300"]
        command("fit", place / "train.csv", *options, "--drop-prob", "0.05", "--weight-decay", "1e-6")
        _, empty = command("explain", place / "model")
        print(f"{DRAWS} draws of a 4-20-1 network; a command that reads no table takes {empty:.0f} MB\n")
        print("| rows | MB in | seconds | rows/s | peak memory |\n|---|---|---|---|---|")
        for n_rows in lengths:
            write_rows(place / "new.csv", n_rows, target=False)
            out = place / "out.csv"
            seconds, memory = command("predict", place / "model", place / "new.csv", "-o", out, "--n-draws", DRAWS)
            size = (place / "new.csv").stat().st_size / 2**20
            results.append({"rows": n_rows, "seconds": seconds, "peak_mb": memory})
            print(
                f"| {n_rows:,} | {size:.0f} | {seconds:.0f} | {n_rows / seconds:,.0f} | {memory:.0f} MB |", flush=True
            )
    history.write("tables", {"empty_mb": empty, "draws": DRAWS, "predict": results})


if __name__ == "__main__":
    main()
