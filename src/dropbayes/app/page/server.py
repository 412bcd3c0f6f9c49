"""The page served on this machine alone."""

from __future__ import annotations

from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from dropbayes.app.page import page_html


class PageServer(ThreadingHTTPServer):
    """A server of the one page on 127.0.0.1, which nothing outside this machine can reach.

    Args:
        port: The port; 0 takes a free one.

    Example:
        >>> with PageServer(0) as server:
        ...     server.url.startswith("http://127.0.0.1:")
        True
    """

    daemon_threads = True

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
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
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
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """No line for every request: the page makes one."""
