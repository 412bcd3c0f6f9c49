"""One HTML file from the page's modules, style sheet and weights, the same bytes every time.

Each ES module becomes a function that returns its exports, in the order of imports. The modules use one form of import
and of export, and anything else is refused; so no bundler is needed, and nothing that is generated is kept.
"""

from __future__ import annotations

import base64
import functools
import graphlib
import hashlib
import pathlib
import re

__all__ = ["content_policy", "page_html", "program"]

WEB = pathlib.Path(__file__).parent / "web"
ENTRY = "main"

_IMPORT = re.compile(r'^import \{([^}]*)\} from "\./(\w+)\.js";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async function|function|class|const) (\w+))", re.MULTILINE)
_MODULE_SYNTAX = re.compile(r"^import\b.*[\"'].*$|^export\b.*$|\bimport\(.*$", re.MULTILINE)
_COMMENT = re.compile(r"^ */\*\*(?:(?!\*/)[\s\S])*\*/\n|^ *//.*\n", re.MULTILINE)


def program(sources: dict[str, str], entry: str = ENTRY) -> str:
    """The modules as one script that needs no module loader.

    Args:
        sources: Text of the modules by name.
        entry: Name of the module that starts everything.

    Raises:
        ValueError: A module imports or exports in another form, or imports what is not there.
    """
    imports = {name: [module for _, module in _IMPORT.findall(text)] for name, text in sources.items()}
    for name, modules in imports.items():
        missing = [module for module in modules if module not in sources]
        if missing:
            raise ValueError(f"{name}.js imports {missing[0]}.js, which does not exist.")
    needed = _dependencies(imports, entry)
    order = [name for name in graphlib.TopologicalSorter(imports).static_order() if name in needed]
    return '"use strict";\n' + "".join(_as_function(name, sources[name]) for name in order)


def _dependencies(imports: dict[str, list[str]], entry: str) -> set[str]:
    """The entry and every module that it imports, directly or not."""
    needed: set[str] = set()
    pending = [entry]
    while pending:
        name = pending.pop()
        if name not in needed:
            needed.add(name)
            pending += imports[name]
    return needed


def _as_function(name: str, text: str) -> str:
    """A module as `const $name = (() => { ...; return { its exports }; })();`, without comments between its lines."""
    exports = [exported for _, exported in _EXPORT.findall(text)]
    body = _EXPORT.sub(r"\1", _IMPORT.sub(r"const {\1} = $\2;\n", _COMMENT.sub("", text)))
    unknown = _MODULE_SYNTAX.search(body)
    if unknown:
        raise ValueError(
            f'{name}.js must import as `import {{ a }} from "./b.js";` and export declarations; got {unknown[0]!r}.'
        )
    return f"const ${name} = (() => {{\n{body.strip()}\nreturn {{ {', '.join(exports)} }};\n}})();\n"


def content_policy(*, script: str, style: str) -> str:
    """The content security policy: the page's own script and style by digest, a worker made of them, no request."""

    def digest(text: str) -> str:
        return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"

    return (
        f"default-src 'none'; script-src {digest(script)}; style-src {digest(style)}; worker-src blob:; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


@functools.cache
def page_html() -> str:
    """The whole page as one HTML document."""
    script = program({path.stem: path.read_text(encoding="utf-8") for path in sorted(WEB.glob("*.js"))})
    style = (WEB / "style.css").read_text(encoding="utf-8")
    for text, end in ((script, "</script"), (style, "</style")):
        if end in text.lower():
            raise ValueError(f"the page's sources must not contain {end!r}: it would end their element.")
    parts = {
        "policy": content_policy(script=script, style=style),
        "style": style,
        "script": script,
        "weights": base64.b64encode((WEB / "lenet.safetensors").read_bytes()).decode(),
    }
    template = (WEB / "page.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)
