"""The process, or processes, in which a model is served."""

from __future__ import annotations

import functools
import os
import pathlib
import signal
import socket
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.supervisors.multiprocess import Multiprocess, Process

from dropbayes.app.serving.application import Limits, ServedModel, application
from dropbayes.app.serving.metrics import MULTIPROCESS_FOLDER
from dropbayes.runtime.devices import share_cores

__all__ = ["Settings", "serve"]

_MOST_CONNECTIONS = 1000
_IDLE_SECONDS = 10  # that a connection is kept open between requests
_HEADER_SECONDS = 20.0  # that the head of a request may take, or the rest of a body that is not read
_DRAIN_SECONDS = 60
_BACKLOG = 2048


@dataclass(frozen=True)
class Settings:
    """How a model is served.

    Attributes:
        path: The model folder.
        host: The address to listen on.
        port: The port; 0 takes a free one.
        workers: The number of processes.
        token: The bearer token that requests must carry, if any.
        limits: The limits of one request.
    """

    path: pathlib.Path
    host: str = "127.0.0.1"
    port: int = 8000
    workers: int = 1
    token: str | None = None
    limits: Limits = field(default_factory=Limits)


def serve(settings: Settings, *, announce: Callable[[str, ServedModel], None] = lambda url, model: None) -> None:
    """Serves a model until the process is signalled to stop (SIGTERM, SIGINT), then finishes the requests under way.

    Args:
        settings: The model, the address and the limits.
        announce: Called with the address and the model once the port is open.

    Raises:
        ValueError: The folder holds no model that can be served.
        OSError: The folder cannot be read, or the port is taken.
    """
    model = ServedModel.load(settings.path)
    listener = _listener(settings.host, settings.port)
    host, port = listener.getsockname()[:2]
    config = uvicorn.Config(
        functools.partial(_worker, settings), factory=True, workers=settings.workers, http=Connection, ws="none",
        loop="asyncio", lifespan="on", log_level="error", access_log=False, server_header=False,
        limit_concurrency=_MOST_CONNECTIONS, timeout_keep_alive=_IDLE_SECONDS,
        timeout_graceful_shutdown=_DRAIN_SECONDS, backlog=_BACKLOG,
    )  # fmt: skip
    announce(f"http://{f'[{host}]' if ':' in host else host}:{port}", model)
    previous = signal.signal(signal.SIGTERM, lambda *_: None)  # raised again by uvicorn when all is done: ends in order
    try:
        if settings.workers == 1:
            uvicorn.Server(config).run(sockets=[listener])
        else:
            with tempfile.TemporaryDirectory(prefix="dropbayes-") as folder:
                os.environ[MULTIPROCESS_FOLDER] = folder  # where the workers' counters are added up
                _Supervisor(config, sockets=[listener]).run()
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGTERM, previous)
        listener.close()


def _worker(settings: Settings) -> Any:
    share_cores(settings.workers)
    return application(settings.path, settings.limits, settings.token)


def _listener(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"cannot listen on {host} port {port}: {error.strerror}") from None
    listener.set_inheritable(True)
    return listener


class _Supervisor(Multiprocess):
    """Workers that share a port; one that dies is replaced."""

    def keep_subprocess_alive(self) -> None:
        """Replaces workers that have died; uvicorn's own check takes a worker that is still importing for dead."""
        for index, worker in enumerate(self.processes):
            if not self.should_exit.is_set() and not worker.process.is_alive():
                self.processes[index] = Process(self.config, self.sockets)
                self.processes[index].start()

    def handle_hup(self) -> None:
        """Forwards the signal: each worker reloads the model while it keeps answering."""
        for process in self.processes:
            if process.pid is not None and process.process.is_alive():
                os.kill(process.pid, signal.SIGHUP)


class Connection(H11Protocol):
    """A connection that is closed when a request takes too long to begin, or to end after it was answered."""

    _deadline: Any = None

    def connection_made(self, transport: Any) -> None:
        """Starts to wait for the first request."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Reads on, and waits where no request is being answered."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """Waits for the next request."""
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the waiting."""
        super().connection_lost(exc)
        if self._deadline is not None:
            self._deadline.cancel()

    def _watch(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            if self._deadline is not None:
                self._deadline.cancel()
            self._deadline = None
        elif self._deadline is None and not self.transport.is_closing():
            self._deadline = self.loop.call_later(_HEADER_SECONDS, self._give_up)

    def _give_up(self) -> None:
        if not self.transport.is_closing():
            if self.conn.our_state is h11.IDLE and self.conn.their_state is h11.IDLE:
                self.conn.send(h11.ConnectionClosed())
            self.transport.close()
