"""The documentation tells the truth: its examples run and print what is shown, its links lead somewhere, and no module
is missing from it. `python tests/test_docs.py` writes what the examples print into the pages."""

import ast
import contextlib
import functools
import http.server
import importlib
import io
import os
import pathlib
import re
import shlex
import shutil
import socket
import subprocess
import sys
import textwrap
import threading
import warnings

import pytest

import dropbayes
from tests.command_line import run

ROOT = pathlib.Path(__file__).parent.parent
DOCS = ROOT / "docs"
SOURCE = ROOT / "src" / "dropbayes"
PAGES = sorted(DOCS.glob("*.md"))
FENCE = re.compile(
    r"^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<shown>(?!\$ ).*?)^```\n)?", re.DOTALL | re.MULTILINE
)
SESSION = re.compile(r"^ *```text\n(?P<session> *\$ .*?)^ *```\n", re.DOTALL | re.MULTILINE)
NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")


def examples(page):
    """The Python examples of a page, each a match with its `code` and the output `shown` right below it.

    A block that starts with `$` is a session of a shell, not the output of Python.
    """
    return list(FENCE.finditer(page.read_text()))


def printed_by(page):
    """What each example of a page prints, run in order in one namespace."""
    import matplotlib

    matplotlib.use("Agg")
    names = {"__name__": "__main__"}
    return [printed_by_example(page, found, names) for found in examples(page)]


def printed_by_example(page, found, names):
    """What one example of a page prints, run in a namespace."""
    line = page.read_text()[: found.start("code")].count("\n")
    code = compile("\n" * line + found["code"], str(page), "exec")  # errors name the line of the page
    out = io.StringIO()
    with contextlib.redirect_stdout(out), warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", DeprecationWarning)  # of one library used by another
        if page.stem == "frameworks":
            warnings.simplefilter("ignore")  # of frameworks, about themselves
        exec(code, names)
    return out.getvalue()


def agree(shown, printed):
    """Whether the texts are the same but for spaces, and numbers within a quarter: training rounds as its processor does.

    A count may be off by three, a decimal by three in its last place.
    """
    if NUMBER.sub("#", " ".join(shown.split())) != NUMBER.sub("#", " ".join(printed.split())):
        return False
    pairs = zip(NUMBER.findall(shown), NUMBER.findall(printed), strict=True)
    return all(abs(float(one) - float(other)) <= 0.25 * abs(float(one)) + 3 * _last_place(one) for one, other in pairs)


def _last_place(number):
    digits, _, exponent = number.partition("e")
    return 10.0 ** (int(exponent or 0) - len(digits.partition(".")[2]))


SLOW = (
    "architectures", "calibrating", "command_line", "decisions", "hugging_face", "limits", "network", "one_pass",
    "production", "report", "table", "training",
)  # fmt: skip  # they train


def marked(page):
    return pytest.param(page, marks=pytest.mark.slow if page.stem in SLOW else (), id=page.stem)


# The programs of docs/frameworks.md need frameworks, and are run one by one by tests/guests/test_page.py.
@pytest.mark.parametrize("page", [marked(page) for page in PAGES if examples(page) and page.stem != "frameworks"])
def test_the_examples_of_a_page_run_and_print_what_it_shows(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for found, printed in zip(examples(page), printed_by(page), strict=True):
        assert agree(found["shown"] or "", printed), f"{page.name} prints\n{printed}\nand shows\n{found['shown']}"


def commands_of(session):
    """The commands of a shell session, each with the lines below it."""
    return [
        (command, textwrap.dedent(shown))
        for command, shown in re.findall(r"^ *\$ (.*)\n((?: *(?!\$ ).*\n)*?)(?= *\$ |\Z)", session, re.MULTILINE)
    ]


def sessions(page):
    """The commands of a page, in order, each with what is shown below it."""
    return [pair for found in SESSION.finditer(page.read_text()) for pair in commands_of(found["session"])]


def answer(command):
    """What a command of a session says, notes first; `dropbayes` runs in this process."""
    program, *arguments = shlex.split(command)
    if program != "dropbayes":
        return subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True).stdout
    result = run(*arguments)
    return result.err + result.text


def without_times(text):
    """A session's text without what differs from run to run: seconds, and the widths of rules."""
    return re.sub("─+", "─", re.sub(r"\d+(\.\d+)? s of training", "some seconds of training", text))


@pytest.mark.parametrize("page", [marked(page) for page in PAGES if sessions(page)])
def test_the_sessions_of_a_page_say_what_it_shows(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    printed_by(page)
    for command, shown in sessions(page):
        said, expected = without_times(answer(command)), without_times(shown)
        assert agree(expected, said), f"{page.name}: $ {command} says\n{said}\nand shows\n{expected}"


@pytest.mark.slow
def test_the_commands_of_the_page_on_production_run(tmp_path):
    """The blocks of shell commands, one after the other in one shell, on a port that is free."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    blocks = re.findall(r"^```sh\n(.*?)^```", (DOCS / "production.md").read_text(), re.DOTALL | re.MULTILINE)
    for name, module in (("dropbayes", "-m dropbayes"), ("python", "")):
        shim = tmp_path / "bin" / name
        shim.parent.mkdir(exist_ok=True)
        shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" {module} "$@"\n')
        shim.chmod(0o755)
    path = os.pathsep.join([str(tmp_path / "bin"), os.environ["PATH"]])
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "PATH": path}
    script = "set -e\n" + "\n".join(blocks).replace("8000", port)
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert '"name":"mean"' in done.stdout


def options_of(*commands):
    return {option for name in commands for option in re.findall(r"--[a-z][a-z-]*", run(name, "--help").text)}


def test_the_pages_name_options_that_exist_and_all_of_the_server():
    known = options_of("fit", "predict", "evaluate", "calibrate", "explain", "report", "serve", "demo", "page")
    foreign = {
        "--quick",
        "--set",
        "--csv",
        "--method",
        "--target",
        "--out",
        "--help",
        "--debug",
    }  # of the experiments, too
    foreign |= {"--nproc-per-node", "--build-arg", "--signal"}  # of torchrun and docker
    for page in ("command_line.md", "production.md", "report.md", "questions.md", "table.md"):
        prose = re.sub(r"```.*?```", "", (DOCS / page).read_text(), flags=re.DOTALL)
        assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", prose)) - known <= foreign, page
    section = (DOCS / "production.md").read_text().partition("### Running it")[2].partition("###")[0]
    assert set(re.findall(r"`(--[a-z-]+)`", section)) >= options_of("serve") - {"--help"}


def test_outputs_are_compared_number_by_number():
    assert (
        agree("a 1.00  b\n", "a 1.05 b") and agree("", "") and agree("29 of 697", "31 of 697") and agree("1e-6", "3e-6")
    )
    assert not agree("a 1.00", "a 1.30") and not agree("a 1.00", "b 1.00") and not agree("", "1")
    assert not agree("29", "40") and not agree("1e-6", "1e-5") and not agree("True", "False") and not agree("1 2", "1")


# The programming interface ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def extensions():
    """The modules under docs/_ext."""
    sys.path.insert(0, str(DOCS / "_ext"))
    try:
        yield {name: importlib.import_module(name) for name in ("api_pages", "docstrings", "long_names", "mathml")}
    finally:
        sys.path.remove(str(DOCS / "_ext"))


def test_every_public_module_has_an_api_page(extensions):
    there = {path.stem for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    listed = [name for names in extensions["api_pages"].GROUPS.values() for name in names]
    assert {name for name in there if not name.startswith("_")} <= set(listed)
    assert len(listed) == len(set(listed))
    for name in extensions["api_pages"].modules():
        assert f"automodule:: dropbayes.{name}" in extensions["api_pages"].page(name)


def test_every_public_name_is_in_the_table_of_the_api(extensions):
    table = extensions["api_pages"].index()
    names = [name for name in dropbayes.__all__ if not name.startswith("_")]
    assert [name for name in names if f":py:obj:`db.{name} <dropbayes." not in table] == []


def test_the_api_page_of_a_module_shows_every_public_name(extensions):
    """Names are described on the page of their home, which must not exclude them or leave them out of `__all__`."""
    for module, names in dropbayes._HOME.items():
        home = importlib.import_module(f"dropbayes.{module}")
        assert set(names) <= set(getattr(home, "__all__", dir(home)))
        assert not set(names) & set(extensions["api_pages"].HANDED_ON.get(module, ()))


@pytest.mark.parametrize(
    ("written", "rest"),
    [
        (r"The mean $\tfrac1T \sum_t$ of `x`.", r"The mean :math:`\tfrac1T \sum_t` of ``x``."),
        ("See `predict` [GG16, prop:mean].", "See :py:obj:`predict <dropbayes.predictive.predict>` :doc:`[GG16, prop:mean] </theory>`."),
        ("$$a =\n b$$", "\n.. math:: a = b\n"),
        ("    >>> cost = '$5 and $6 `x`'\n    '$5'", "    >>> cost = '$5 and $6 `x`'\n    '$5'"),
        ("So:\n\n    a = `b`", "So:\n\n::\n\n    a = `b`"),
        ("| a | b |\n|---|---|\n| `x` | 1 |", ".. list-table::\n   :header-rows: 1\n\n   * - a\n     - b\n   * - ``x``\n     - 1"),
        ("A formula $a\n+ b$ over a line.", "A formula :math:`a + b` over a line."),
    ],
)  # fmt: skip
def test_a_docstring_becomes_rest(extensions, written, rest):
    assert "\n".join(extensions["docstrings"].converted(written.split("\n"))) == rest


def test_a_name_does_not_link_to_itself(extensions):
    for here in ("dropbayes.predictive.predict", "dropbayes.app.cli"):  # and the command of that name is another thing
        assert extensions["docstrings"].converted(["`predict`"], here=here) == ["``predict``"]


@pytest.mark.slow
def test_every_formula_can_be_drawn_without_a_script(extensions):
    pages = [path.read_text() for path in PAGES]
    sources = [ast.get_docstring(node) or "" for path in sorted(SOURCE.rglob("*.py")) for node in documented(path)]
    text = re.sub(r"```.*?```|`[^`\n]*`", "", "\n".join(pages + sources), flags=re.DOTALL)
    formulas = [a or b for a, b in re.findall(r"\$\$(.+?)\$\$|\$([^$]+?)\$", text, re.DOTALL)]
    assert len(formulas) > 400
    for formula in formulas:
        assert extensions["mathml"].mathml(" ".join(formula.split()), block=False).startswith("<math")


def documented(path):
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)]


def test_the_index_of_a_hat_stands_beside_it(extensions):
    formula = extensions["mathml"].mathml(r"\widehat{\mathbf y}_t", block=False)
    assert "munder" not in formula and "<msub>" in formula


def test_long_names_may_be_broken_and_short_ones_not(extensions):
    page = '<span class="pre">test_a_name_that_would_not_fit</span> <span class="pre">a_b</span>'
    expected = page.replace(
        "test_a_name_that_would_not_fit", "test_<wbr>a_<wbr>name_<wbr>that_<wbr>would_<wbr>not_<wbr>fit"
    )
    assert extensions["long_names"].breakable(page) == expected


# Pages and links ------------------------------------------------------------------------------------------------------------


def test_every_page_is_reached_from_the_start_page():
    start = (DOCS / "index.md").read_text()
    entries = {line for tree in re.findall(r"```{toctree}\n(.*?)```", start, re.DOTALL) for line in tree.split("\n")}
    assert {page.stem for page in PAGES} - {"index"} <= entries


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        own = target.removeprefix("https://github.com/dropbayes/dropbayes/blob/main/")  # for readers on an index
        if own.startswith(("http:", "https:", "#")):
            continue
        path = (page.parent if own == target else ROOT) / own.partition("#")[0]
        if target.startswith("gallery/"):  # written by the build, one page for each script
            path = ROOT / "examples" / f"{target.removeprefix('gallery/')}.py"
        assert path.exists(), target


def test_the_examples_of_the_gallery_have_titles_and_hide_what_saves_files():
    for script in sorted((ROOT / "examples").glob("plot_*.py")):
        text = script.read_text()
        title, line = ast.get_docstring(ast.parse(text)).split("\n")[:2]
        assert len(title) == len(line) and set(line) == {"="}, script.name
        start, end = text.index("sphinx_gallery_start_ignore"), text.index("sphinx_gallery_end_ignore")
        assert start < text.index(".savefig(") < end, script.name


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built documentation, from what is under version control; a warning is an error."""
    tmp_path = tmp_path_factory.mktemp("documentation")
    for folder in ("docs", "examples", "src"):
        ignored = shutil.ignore_patterns("_build", "api", "gallery", "__pycache__", "sg_execution_times.rst")
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    shutil.copy(ROOT / "CHANGELOG.md", tmp_path)
    site = tmp_path / "site"
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-n", "-q", "-b", "html", "docs", str(site)]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return site


@pytest.mark.slow
def test_the_documentation_builds_strictly_from_what_is_under_version_control(site):
    """No name is missing from the inventory, nothing is fetched from a network when a page is read."""
    from sphinx.util.inventory import InventoryFile

    with open(site / "objects.inv", "rb") as file:
        described = {name for kind in InventoryFile.load(file, "", os.path.join).values() for name in kind}
    homes = {f"dropbayes.{module}.{name}" for module, names in dropbayes._HOME.items() for name in names}
    assert homes <= described
    for page in site.rglob("*.html"):
        fetched = re.findall(r"<(?:script|img|link|iframe)[^>]+(?:src|href)=\"(https?:[^\"]+)", page.read_text())
        assert not fetched, (page, fetched)


@pytest.mark.slow
def test_a_browser_finds_every_file_of_the_site_and_no_error(site):
    """Style sheets, pictures and scripts that a page asks for are there: the gallery once asked for four in vain."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no chromium on this machine")
    handler = functools.partial(QuietHandler, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, playwright.sync_playwright() as running:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser = running.chromium.launch(executable_path=path, args=["--no-sandbox"])
        tab, wrong = browser.new_page(), []
        tab.on(
            "response", lambda answer: wrong.append(f"{answer.status} {answer.url}") if answer.status >= 400 else None
        )
        tab.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        for page in [*sorted(site.glob("*.html")), site / "gallery/index.html", site / "api/index.html"]:
            tab.goto(f"http://127.0.0.1:{server.server_port}/{page.relative_to(site)}")
        browser.close()
        server.shutdown()
    assert wrong == []


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """Serves files without a line for each."""

    def log_message(self, *_):
        pass


if __name__ == "__main__":
    wanted = [DOCS / f"{name}.md" for name in sys.argv[1:]] or PAGES
    os.chdir(os.environ.get("TMPDIR", "/tmp"))
    for page in wanted:
        outputs = iter(printed_by(page))

        def with_output(found, outputs=outputs):
            printed = "\n".join(line.rstrip() for line in next(outputs).rstrip().split("\n"))
            block = f"```python\n{found['code']}```\n"
            return block + (f"\n```text\n{printed}\n```\n" if printed else "")

        def with_answers(found):
            indent = re.match(" *", found["session"])[0]
            text = "".join(f"$ {command}\n{answer(command)}" for command, _ in commands_of(found["session"]))
            lines = [f"{indent}{line}".rstrip() for line in text.rstrip().split("\n")]
            return "\n".join([f"{indent}```text", *lines, f"{indent}```\n"])

        page.write_text(SESSION.sub(with_answers, FENCE.sub(with_output, page.read_text())))
        print(page.name)
