"""The results of experiments, kept and put on the page that shows them.

python -m experiments.page FOLDER...

Each folder is one that `python -m experiments NAME` wrote. Its results go to `experiments/results/NAME.json`, its
figures to `docs/figures`, and the block `<!-- results: NAME -->` of `docs/experiments.md` is written anew.
"""

from __future__ import annotations

import json
import pathlib
import re
import shutil
import sys

from dropbayes.runtime import files
from experiments.record import results_text

ROOT = pathlib.Path(__file__).parent.parent
RESULTS = ROOT / "experiments" / "results"
PAGE, FIGURES = ROOT / "docs" / "experiments.md", ROOT / "docs" / "figures"


def with_results(page: str, name: str, text: str) -> str:
    """The page with `text` as the results of the experiment `name`.

    Example:
        >>> print(with_results("<!-- results: co2 -->old<!-- end -->", "co2", "new"))
        <!-- results: co2 -->
        <BLANKLINE>
        new
        <BLANKLINE>
        <!-- end -->
    """
    start, end = f"<!-- results: {name} -->", "<!-- end -->"
    block = re.compile(re.escape(start) + ".*?" + re.escape(end), re.DOTALL)
    if not block.search(page):
        raise ValueError(f"The page must hold {start!r} and, after it, {end!r}; it does not.")
    return block.sub(lambda _: f"{start}\n\n{text}\n\n{end}", page, count=1)


def main(folders: list[str]) -> None:
    """Keeps the results of each folder and writes them on the page."""
    for folder in map(pathlib.Path, folders):
        report = (folder / "results.json").read_text()
        files.write_text(RESULTS / f"{folder.name}.json", report)
        for figure in folder.glob("*.png"):
            shutil.copy(figure, FIGURES)
        files.write_text(PAGE, with_results(PAGE.read_text(), folder.name, results_text(json.loads(report))))


if __name__ == "__main__":
    main(sys.argv[1:])
