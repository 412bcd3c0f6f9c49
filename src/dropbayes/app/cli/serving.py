"""`dropbayes serve` and `dropbayes page`: a model, or the interactive page, behind a port."""

import contextlib
import json
import pathlib
from typing import Annotated, Literal

import typer

from dropbayes.app.cli import options
from dropbayes.app.cli.messages import note


def serve(
    context: typer.Context,
    models: Annotated[list[str], typer.Argument(help="Folders, or MODULE:NAME of a Predictor.", metavar="MODEL...")],
    host: Annotated[str, typer.Option(help="The address to listen on.", metavar="ADDRESS")] = "127.0.0.1",
    port: Annotated[int, options.port(help="The port; 0 takes a free one.")] = 8000,
    workers: Annotated[int, options.count(help="Processes that answer.")] = 1,
    max_body: Annotated[int, options.count(help="The most bytes of a request.")] = 16 * 2**20,
    max_rows: Annotated[int, options.count(help="The most rows of a request.")] = 10_000,
    max_draws: Annotated[int, options.count(help="The most draws a request may ask for.")] = 1000,
    token_file: Annotated[str | None, options.file(help="A file with the token that requests must bear.")] = None,
    allow_new: options.AllowNew = False,
    method: options.Method | None = None,
    allowed_host: Annotated[
        list[str] | None, typer.Option(help="A further name in the header Host to answer.", metavar="NAME")
    ] = None,
    log_level: Annotated[
        Literal["critical", "error", "warning", "info", "debug"], typer.Option(help="What to log; info logs requests.")
    ] = "warning",
) -> None:
    """Serve models over HTTP (Open Inference Protocol V2).

    SIGTERM ends it after the requests under way; SIGHUP reloads the models from their folders.
    """
    from dropbayes.app import serving

    token = None
    if token_file is not None:
        token = pathlib.Path(token_file).read_text(encoding="ascii", errors="replace").strip()
        if not token or not (token.isascii() and token.isprintable()) or " " in token:
            raise ValueError(f"{token_file!r} must hold a token: one line of plain characters without spaces.")
    given = {name: value for name, value in context.params.items() if hasattr(serving.Settings, name)}
    settings = serving.Settings([*map(pathlib.Path, models)], token=token, further_hosts=allowed_host or (), **given)
    if token is None and not settings.is_local:
        note(f"whoever can reach {host} can use this server; --token-file requires a token.")
    serving.serve(
        settings,
        announce=lambda url, served: print(
            f"serving {served.name}, version {served.version}, at {url}/v2/models/{served.name}", flush=True
        ),
    )


def page(
    out: Annotated[str | None, options.output(help="Write the page to a file; - is standard output.")] = None,
    port: Annotated[int, options.port(help="The port on 127.0.0.1; 0 takes a free one.")] = 0,
    no_browser: Annotated[bool, options.flag("--no-browser", help="Do not open a browser.")] = False,
    as_json: options.Json = False,
) -> None:
    """Draw points and watch what a network does not know.

    One page for a browser that needs no server and no network connection; it is served on 127.0.0.1, or written as one
    HTML file.
    """
    import webbrowser

    from dropbayes.app.page import PageServer, page_html
    from dropbayes.runtime import files

    def announce(kind: str, place: str) -> None:  # unbroken, however narrow the terminal is
        print(json.dumps({kind: place}, indent=1) if as_json else place, flush=True)

    if out == "-":
        options.check_destination(out, as_json)
        print(page_html(), end="")
        return
    if out is not None:
        files.write_text(out, page_html())
        announce("page", out)
        return
    with PageServer(port) as server:
        announce("address", server.url)
        if not no_browser:
            webbrowser.open(server.url)
        note("the page is served on this machine alone; Ctrl+C ends it.")
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
