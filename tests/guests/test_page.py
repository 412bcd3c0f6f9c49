"""The programs of the page on frameworks, each alone."""

import ast
import importlib.util

import matplotlib
import pytest

from tests.test_docs import DOCS, agree, examples, printed_by_example

PAGE = DOCS / "frameworks.md"


def packages(code):
    """The packages that a program imports."""
    names = []
    for node in ast.walk(ast.parse(code)):
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) else []
    return sorted({name.partition(".")[0] for name in names})


@pytest.mark.slow
@pytest.mark.parametrize("found", examples(PAGE), ids=lambda found: "-".join(packages(found["code"])))
def test_a_program_runs_alone_and_prints_what_is_shown(found, tmp_path, monkeypatch):
    missing = [name for name in packages(found["code"]) if not importlib.util.find_spec(name)]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: `make test-guests` installs it")
    monkeypatch.chdir(tmp_path)
    matplotlib.use("Agg")
    printed = printed_by_example(PAGE, found, {"__name__": "__main__"})
    assert agree(found["shown"] or "", printed), f"prints\n{printed}\nand shows\n{found['shown']}"
