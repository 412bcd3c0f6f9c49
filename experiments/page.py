"""The results of experiments, kept and put on the pages that show them.

python -m experiments.page FOLDER...

Each folder is one that `python -m experiments NAME` wrote. Its results go to `experiments/results/NAME.json`, its
figures to `docs/figures`, and the block `<!-- results: NAME -->` of the page in `docs` that has it is written anew. The
arrays of CO2 and solar irradiance, which take a GPU, go to `experiments/results/NAME`.
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
DOCS = ROOT / "docs"


def page_of(name: str) -> pathlib.Path:
    """The page of the documentation that shows the results of the experiment `name`."""
    start = f"<!-- results: {name} -->"
    pages = [page for page in DOCS.glob("*.md") if start in page.read_text()]
    if len(pages) != 1:
        raise ValueError(f"One page in {str(DOCS)!r} must hold {start!r} ... '<!-- end -->'; {len(pages)} do.")
    return pages[0]


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
    return block.sub(lambda _: f"{start}\n\n{text}\n\n{end}", page, count=1)


def main(folders: list[str]) -> None:
    """Keeps the results of each folder and writes them on the page."""
    for folder in map(pathlib.Path, folders):
        report = (folder / "results.json").read_text()
        files.write_text(RESULTS / f"{folder.name}.json", report)
        for figure in folder.glob("*.png"):
            shutil.copy(figure, DOCS / "figures")
        if folder.name in ("co2", "solar"):
            (RESULTS / folder.name).mkdir(exist_ok=True)
            for stage in folder.glob("*.npz"):
                shutil.copy(stage, RESULTS / folder.name)
        page = page_of(folder.name)
        files.write_text(page, with_results(page.read_text(), folder.name, results_text(json.loads(report))))


if __name__ == "__main__":
    main(sys.argv[1:])
