"""`dropbayes serve`: a model behind a port."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

from dropbayes.app.cli.messages import note

__all__ = ["serve"]


def serve(
    model_paths: Sequence[str],
    *,
    host: str,
    port: int,
    workers: int,
    max_body: int,
    max_rows: int,
    max_draws: int,
    token_file: str | None,
    allow_new: bool,
    allowed_hosts: Sequence[str],
    log_level: str,
) -> None:
    """Serves models until the process is signalled to stop; see `dropbayes serve --help`."""
    try:
        from dropbayes.app import serving
    except ModuleNotFoundError as error:
        raise ImportError(f"{error.name} is not installed: pip install 'dropbayes[serve]'.") from None
    token = None if token_file is None else _token(pathlib.Path(token_file))
    settings = serving.Settings(
        [pathlib.Path(path) for path in model_paths],
        host=host,
        port=port,
        workers=workers,
        token=token,
        allow_new=allow_new,
        further_hosts=allowed_hosts,
        log_level=log_level,
        limits=serving.Limits(max_body=max_body, max_rows=max_rows, max_draws=max_draws),
    )
    if token is None and not settings.is_local:
        note(f"whoever can reach {host} can ask this server; --token-file asks for a token.")
    serving.serve(settings, announce=_announce)


def _token(path: pathlib.Path) -> str:
    try:
        token = path.read_text(encoding="ascii").strip()
    except UnicodeDecodeError:
        token = ""
    if not token or not token.isprintable() or " " in token:
        raise ValueError(f"{str(path)!r} must hold a token: one line of plain characters without spaces.")
    return token


def _announce(url: str, model: Any) -> None:
    print(f"serving {model.name}, version {model.version}, at {url}/v2/models/{model.name}", flush=True)
