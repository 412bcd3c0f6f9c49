"""The README's examples run as they stand, and print what it shows."""

import contextlib
import io
import pathlib
import re

import pytest

from tests.test_docs import agree, examples

ROOT = pathlib.Path(__file__).parent.parent
README = ROOT / "README.md"


@pytest.mark.slow
def test_every_python_example_of_the_readme_runs_and_prints_what_is_shown():
    found = examples(README)
    assert len(found) == 2
    for example in found:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(example["code"], {"__name__": "__main__"})
        assert agree(example["shown"] or "", out.getvalue())


def test_installing_is_in_the_first_screen_and_promises_no_package_index():
    head = README.read_text()[:2500]
    assert "pip install ." in head
    assert "make demo" in head
    for page in (README, ROOT / "docs" / "index.md"):
        assert not re.search(r"pip install '?dropbayes", page.read_text())


def test_the_figures_of_the_readme_are_those_of_the_reproduction():
    rows = {}
    for line in README.read_text().splitlines():
        cells = [cell.strip().strip("*") for cell in line.strip("|").split("|")]
        if len(cells) == 10 and cells[0].strip("-"):
            rows[cells[0]] = [float(cell.replace("−", "-")) for cell in cells[1:]]
    page = (ROOT / "docs" / "reproduction.md").read_text()
    tables = [block.splitlines() for block in re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE)]
    for label, head, number, column in (  # of the tables with a column, the number of the one
        ("the authors, 2018", "LL ours", 0, 7),
        ("their protocol of 2018, here", "LL ours", 0, 8),
        ("the paper", "deep ensembles", 0, 2),
        ("deep ensembles", "deep ensembles", 0, 5),
        ("`DropoutRegressor()`", "deep ensembles", 0, 7),
        ('`DropoutRegressor(effort="best")`', "deep ensembles", 2, 7),
    ):
        table = [lines for lines in tables if head in lines[0]][number]
        cells = [line.strip("|").split("|")[column] for line in table[2:]]
        shown = [float(re.search(r"-?[\d.]+", cell)[0]) for cell in cells]
        assert rows[label] == pytest.approx(shown, abs=0.00501)
