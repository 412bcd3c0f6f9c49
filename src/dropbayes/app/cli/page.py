"""`dropbayes page`: the interactive page, written as a file or served on this machine."""

from __future__ import annotations

import contextlib
import pathlib
import webbrowser

from dropbayes.app.cli.messages import note, print_json
from dropbayes.app.page import PageServer, page_html
from dropbayes.runtime import files

__all__ = ["serve_page", "write_page"]


def write_page(out: str, *, as_json: bool = False) -> None:
    """Writes the page as one HTML file and prints its path."""
    files.write_text(out, page_html())
    if as_json:
        print_json({"page": out})
    else:
        print(pathlib.Path(out))


def serve_page(*, port: int, open_browser: bool, as_json: bool = False) -> None:
    """Serves the page on 127.0.0.1 until interrupted; prints its address."""
    with PageServer(port) as server:
        if as_json:
            print_json({"address": server.url})
        else:
            print(server.url, flush=True)
        if open_browser:
            webbrowser.open(server.url)
        note("the page is served on this machine alone; Ctrl+C ends it.")
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
