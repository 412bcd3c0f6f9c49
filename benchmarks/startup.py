"""What a small command costs before it does anything: python -m benchmarks.startup

The CPU time of `dropbayes predict` and `evaluate` for three rows, as a ratio to that of `python -c "import torch"`, taken
in turns; the median over the turns.
"""

from __future__ import annotations

import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile

from benchmarks import history
from benchmarks.tables import write_rows

TURNS = 3
# Arrow imports pandas, where it is installed, with the first array it makes from Python.
WITHOUT_PANDAS = "import sys; sys.modules['pandas'] = None; from dropbayes.app.cli import main; main()"


def cpu_seconds(*arguments: object) -> float:
    """The CPU time of one process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = pathlib.Path(folder)
        write_rows(place / "train.csv", 200, target=True)
        write_rows(place / "few.csv", 3, target=True)
        fit = ["fit", place / "train.csv", "--target", "y", "--out", place / "model", "--effort", "quick"]
        subprocess.run([sys.executable, "-m", "dropbayes", *map(str, fit)], capture_output=True, check=True)
        commands = {
            "import torch": ["-c", "import torch"],
            "import the estimators": ["-c", "from dropbayes import DropoutRegressor"],
            "help": ["-m", "dropbayes", "--help"],
            "predict": ["-m", "dropbayes", "predict", place / "model", place / "few.csv", "-o", "-"],
            "predict, no pandas": ["-c", WITHOUT_PANDAS, "predict", place / "model", place / "few.csv", "-o", "-"],
            "evaluate": ["-m", "dropbayes", "evaluate", place / "model", place / "few.csv"],
        }
        times: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(TURNS):
            for name, arguments in commands.items():
                times[name].append(cpu_seconds(*arguments))
    medians = {name: statistics.median(values) for name, values in times.items()}
    ratios = {name: seconds / medians["import torch"] for name, seconds in medians.items()}
    print("| command | CPU seconds | times `import torch` |\n|---|---|---|")
    for name, seconds in medians.items():
        print(f"| {name} | {seconds:.2f} | {ratios[name]:.2f} |")
    history.write("startup", {"cpu_seconds": medians, "ratio_to_import_torch": ratios})


if __name__ == "__main__":
    main()
