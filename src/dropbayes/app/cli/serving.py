"""`dropbayes serve`: a model behind a port."""

from __future__ import annotations

import ipaddress
import pathlib
from typing import Any

from dropbayes.app.cli.messages import note

__all__ = ["serve"]


def serve(
    model_path: str,
    *,
    host: str,
    port: int,
    workers: int,
    max_body: int,
    max_rows: int,
    max_draws: int,
    token_file: str | None,
) -> None:
    """Serves a model until the process is signalled to stop; see `dropbayes serve --help`."""
    try:
        from dropbayes.app import serving
        from dropbayes.app.serving.application import Limits
    except ModuleNotFoundError as error:
        raise ImportError(f"{error.name} is not installed: pip install 'dropbayes[serve]'.") from None
    token = None if token_file is None else _token(pathlib.Path(token_file))
    if token is None and not _is_loopback(host):
        note(f"whoever can reach {host} can ask this server; --token-file asks for a token.")
    limits = Limits(max_body=max_body, max_rows=max_rows, max_draws=max_draws)
    settings = serving.Settings(pathlib.Path(model_path), host, port, workers, token, limits)
    serving.serve(settings, announce=_announce)


def _token(path: pathlib.Path) -> str:
    try:
        token = path.read_text(encoding="ascii").strip()
    except UnicodeDecodeError:
        token = ""
    if not token or not token.isprintable() or " " in token:
        raise ValueError(f"{str(path)!r} must hold a token: one line of plain characters without spaces.")
    return token


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _announce(url: str, model: Any) -> None:
    print(f"serving {model.name}, version {model.version}, at {url}/v2/models/{model.name}", flush=True)
