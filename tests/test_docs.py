"""The documentation tells the truth: its examples run and print what is shown, its links lead somewhere, and no module
is missing from it. `python tests/test_docs.py` writes what the examples print into the pages."""

import contextlib
import io
import os
import pathlib
import re
import subprocess
import sys
import warnings

import pytest

ROOT = pathlib.Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
FENCE = re.compile(r"^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<shown>.*?)^```\n)?", re.DOTALL | re.MULTILINE)
NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")


def examples(page):
    """The Python examples of a page, each a match with its `code` and the output `shown` right below it."""
    return list(FENCE.finditer(page.read_text()))


def printed_by(page):
    """What each example of a page prints, run in order in one namespace."""
    import matplotlib

    matplotlib.use("Agg")
    names, printed = {"__name__": "__main__"}, []
    for found in examples(page):
        line = page.read_text()[: found.start("code")].count("\n")
        code = compile("\n" * line + found["code"], str(page), "exec")  # errors name the line of the page
        out = io.StringIO()
        with contextlib.redirect_stdout(out), warnings.catch_warnings():
            warnings.simplefilter("error")
            exec(code, names)
        printed.append(out.getvalue())
    return printed


def agree(shown, printed):
    """Whether the texts are the same but for spaces, and numbers within a tenth: training rounds as its processor does.

    A count may be off by three, a decimal by three in its last place.
    """
    if NUMBER.sub("#", " ".join(shown.split())) != NUMBER.sub("#", " ".join(printed.split())):
        return False
    pairs = zip(NUMBER.findall(shown), NUMBER.findall(printed), strict=True)
    return all(abs(float(one) - float(other)) <= 0.1 * abs(float(one)) + 3 * _last_place(one) for one, other in pairs)


def _last_place(number):
    digits, _, exponent = number.partition("e")
    return 10.0 ** (int(exponent or 0) - len(digits.partition(".")[2]))


@pytest.mark.parametrize("page", [page for page in PAGES if examples(page)], ids=lambda page: page.stem)
def test_the_examples_of_a_page_run_and_print_what_it_shows(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for found, printed in zip(examples(page), printed_by(page), strict=True):
        assert agree(found["shown"] or "", printed), f"{page.name} prints\n{printed}\nand shows\n{found['shown']}"


def test_outputs_are_compared_number_by_number():
    assert agree("a 1.00  b\n", "a 1.05 b") and agree("", "") and agree("29 of 697", "31 of 697") and agree("1e-6", "3e-6")
    assert not agree("a 1.00", "a 1.20") and not agree("a 1.00", "b 1.00") and not agree("", "1")
    assert not agree("29", "40") and not agree("1e-6", "1e-5") and not agree("True", "False") and not agree("1 2", "1")


if __name__ == "__main__":
    wanted = [DOCS / f"{name}.md" for name in sys.argv[1:]] or PAGES
    os.chdir(os.environ.get("TMPDIR", "/tmp"))
    for page in wanted:
        outputs = iter(printed_by(page))

        def with_output(found, outputs=outputs):
            printed = "\n".join(line.rstrip() for line in next(outputs).rstrip().split("\n"))
            block = f"```python\n{found['code']}```\n"
            return block + (f"\n```text\n{printed}\n```\n" if printed else "")

        page.write_text(FENCE.sub(with_output, page.read_text()))
        print(page.name)
