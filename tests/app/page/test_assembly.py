"""The one file: made from the modules by our own code, the same every time, small, and closed to the outside."""

import base64
import graphlib
import hashlib
import re
import shutil
import subprocess

import pytest

from dropbayes.app.page import content_policy, page_html, program
from experiments.digits import WEIGHTS
from tests.app.page.javascript import HERE, NODE, WEB, needs_node

TSC = HERE / "node_modules" / ".bin" / "tsc"


def test_the_page_is_the_same_bytes_every_time():
    first = page_html()
    assert page_html() == first


def test_the_page_is_small():
    assert len(page_html().encode()) < 200_000


def test_the_page_names_no_address_to_fetch_from():
    html = page_html()
    addresses = set(re.findall(r"https?://[^\s\"'<>)]+", html))
    assert addresses <= {"http://www.w3.org/2000/svg"}  # a name, not a place
    assert not re.findall(r"\b(?:fetch|XMLHttpRequest|WebSocket|EventSource|sendBeacon|importScripts)\b", html)


def test_the_policy_allows_the_pages_own_script_and_style_alone():
    html = page_html()
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', html)[1]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    for element, rule in (("script", "script-src"), ("style", "style-src")):
        text = re.search(rf"<{element}(?: id=\"program\")?>(.*?)</{element}>", html, re.DOTALL)[1]
        assert rules[rule] == f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
    assert rules["default-src"] == "'none'" and "unsafe" not in policy
    assert content_policy(script="a", style="b") != content_policy(script="b", style="a")


def test_the_page_carries_the_weights():
    text = re.search(r'<script type="text/plain" id="weights">(.*?)</script>', page_html(), re.DOTALL)[1]
    assert base64.b64decode(text) == WEIGHTS.read_bytes()


def test_the_markup_needs_no_inline_style_or_handler():
    assert not re.findall(r"<[^>]+\s(?:style|on\w+)=", (WEB / "page.html").read_text())


def test_modules_become_functions_in_the_order_of_their_imports():
    sources = {
        "main": 'import { two } from "./b.js";\nconst three = two + 1;\nexport const done = three;\n',
        "b": '/** A comment. */\nimport {\n  one,\n} from "./a.js";\nexport const two = one + 1; // kept\n',
        "a": "// gone\nexport const one = 1;\nconst two = 5;\n",
    }
    text = program(sources)
    assert [text.index(f"const ${name} =") for name in ("a", "b", "main")] == sorted(
        text.index(f"const ${name} =") for name in ("a", "b", "main")
    )
    assert "A comment" not in text and "gone" not in text
    if NODE:
        done = subprocess.run([NODE, "-p", text + "$main.done"], capture_output=True, text=True)
        assert done.stdout.strip() == "3"


@pytest.mark.parametrize(
    "text",
    [
        'import thing from "./a.js";\n',
        'import * as a from "./a.js";\n',
        "export default 1;\n",
        "export { one };\n",
        'const a = await import("./a.js");\n',
    ],
)
def test_other_forms_of_import_and_export_are_refused(text):
    with pytest.raises(ValueError, match=r"main.js must import as"):
        program({"main": text, "a": "export const one = 1;\n"})


def test_a_module_that_is_missing_or_imports_itself_is_named():
    with pytest.raises(KeyError, match="'a'"):
        program({"main": 'import { one } from "./a.js";\n'})
    with pytest.raises(graphlib.CycleError, match="'main', 'main'"):
        program({"main": 'import { one } from "./main.js";\n'})


def test_a_comment_that_opens_a_line_of_code_is_left_alone():
    source = "/** @type {number} */ (globalThis).x = 1;\n/** gone */\nexport const y = 2;\n"
    assert "(globalThis).x = 1" in program({"main": source}) and "gone" not in program({"main": source})


@needs_node
@pytest.mark.skipif(not TSC.exists() and shutil.which("tsc") is None, reason="npm install in tests/app/page brings tsc")
def test_the_modules_pass_the_type_checker():
    command = [str(TSC) if TSC.exists() else "tsc", "--project", str(HERE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout
