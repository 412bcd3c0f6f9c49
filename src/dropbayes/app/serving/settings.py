"""How models are served: the folders, the address, who may ask for what, and how much."""

from __future__ import annotations

import ipaddress
import pathlib
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """How models are served.

    Attributes:
        paths: The model folders; MODULE:NAME is a `Predictor` that a module of Python holds.
        host: The address to listen on.
        port: The port; 0 takes a free one.
        workers: The number of processes.
        token: The bearer token that requests must carry, if any.
        allow_new: Whether unseen categories are encoded as all zeros where a request does not say.
        method: "sampling", "linear" or "moments", where a request does not say.
        further_hosts: Names in the header `Host` to answer besides those of this machine.
        log_level: The least severity that is logged; "info" logs every request.
        max_body: The most bytes of a request's body.
        max_rows: The most rows of a request.
        max_draws: The most draws of each network.
        body_seconds: The longest a body may take to arrive.
        answer_seconds: The longest a request may wait for its prediction.
    """

    paths: Sequence[pathlib.Path]
    host: str = "127.0.0.1"
    port: int = 8000
    workers: int = 1
    token: str | None = None
    allow_new: bool = False
    method: str = "sampling"
    further_hosts: Sequence[str] = ()
    log_level: str = "warning"
    max_body: int = 16 * 2**20
    max_rows: int = 10_000
    max_draws: int = 1000
    body_seconds: float = 20.0
    answer_seconds: float = 60.0

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the server."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def hosts(self) -> list[str]:
        """The names in the header `Host` that are answered.

        A page of another site could read from a server of this machine by a name of its own that leads here, unless
        there is a token it does not know.
        """
        if not self.further_hosts and (self.token is not None or not self.is_local):
            return ["*"]
        return [*self.further_hosts, self.host, "localhost", "127.0.0.1", "::1", "[::1]"]
