"""The interactive page: one HTML file from modules, a style sheet and weights in `web/`, the same bytes every time.

It needs no network connection; `dropbayes page` serves it on this machine alone. Each ES module becomes a function that
returns its exports, in the order of imports. The modules use one form of import and of export, and anything else is
refused; so no bundler is needed, and nothing that is generated is kept.
"""

import base64
import graphlib
import hashlib
import pathlib
import re
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

__all__ = ["PageServer", "content_policy", "page_html", "program"]

_IMPORT = re.compile(r'^import \{([^}]*)\} from "\./(\w+)\.js";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async function|function|class|const) (\w+))", re.MULTILINE)
_MODULE_SYNTAX = re.compile(r"^import\b.*[\"'].*$|^export\b.*$|\bimport\(.*$", re.MULTILINE)
_COMMENT = re.compile(r"^ */\*\*(?:(?!\*/)[\s\S])*\*/\n|^ *//.*\n", re.MULTILINE)


def program(sources: dict[str, str]) -> str:
    """The modules, given by name, as one script that needs no module loader: each after those it imports."""
    imports = {name: [module for _, module in _IMPORT.findall(text)] for name, text in sorted(sources.items())}
    order = graphlib.TopologicalSorter(imports).static_order()
    return '"use strict";\n' + "".join(_as_function(name, sources[name]) for name in order)


def _as_function(name: str, text: str) -> str:
    """A module as `const $name = (() => { ...; return { its exports }; })();`, without comments between its lines."""
    exports = [exported for _, exported in _EXPORT.findall(text)]
    body = _EXPORT.sub(r"\1", _IMPORT.sub(r"const {\1} = $\2;\n", _COMMENT.sub("", text)))
    if unknown := _MODULE_SYNTAX.search(body):
        rule = 'must import as `import { a } from "./b.js";` and export declarations'
        raise ValueError(f"{name}.js {rule}; got {unknown[0]!r}.")
    return f"const ${name} = (() => {{\n{body.strip()}\nreturn {{ {', '.join(exports)} }};\n}})();\n"


def content_policy(*, script: str, style: str) -> str:
    """The content security policy: the page's own script and style by digest, a worker made of them, no request."""
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (script, style))
    own_script, own_style = (f"'sha256-{digest}'" for digest in digests)
    sources = f"script-src {own_script}; style-src {own_style}; worker-src blob:; img-src data:"
    return f"default-src 'none'; {sources}; base-uri 'none'; form-action 'none'"


def page_html() -> str:
    """The whole page as one HTML document."""
    web = pathlib.Path(__file__).parent / "web"
    script = program({path.stem: path.read_text(encoding="utf-8") for path in web.glob("*.js")})
    style = (web / "style.css").read_text(encoding="utf-8")
    for text, end in ((script, "</script"), (style, "</style")):
        if end in text.lower():
            raise ValueError(f"the page's sources must not contain {end!r}: it would end their element.")
    parts = {"policy": content_policy(script=script, style=style), "style": style, "script": script}
    parts["weights"] = base64.b64encode((web / "lenet.safetensors").read_bytes()).decode()
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], (web / "page.html").read_text(encoding="utf-8"))


class PageServer(ThreadingHTTPServer):
    """A server of the one page on a port of 127.0.0.1, by default a free one; no other machine can reach it."""

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)

    @property
    def url(self) -> str:
        """The address to open in a browser."""
        return f"http://127.0.0.1:{self.server_port}/"


class _Handler(BaseHTTPRequestHandler):
    server_version = "dropbayes"
    sys_version = ""
    timeout = 20  # seconds of silence after which a connection is closed

    def do_GET(self) -> None:
        if self.headers.get("Host", "").partition(":")[0] not in ("127.0.0.1", "localhost"):
            self.send_error(HTTPStatus.MISDIRECTED_REQUEST)  # a name of another site that leads here
            return
        if self.path.partition("?")[0] != "/":
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        body = page_html().encode()
        self.send_response(HTTPStatus.OK)
        for name, value in (
            ("Content-Type", "text/html; charset=utf-8"),
            ("Content-Length", str(len(body))),
            ("Content-Security-Policy", "frame-ancestors 'none'"),  # the rest is in the page itself
            ("X-Content-Type-Options", "nosniff"),
            ("Referrer-Policy", "no-referrer"),
            ("Cache-Control", "no-store"),
        ):
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """No line for every request: the page makes one."""
