"""The process, or processes, in which models are served."""

from __future__ import annotations

import asyncio
import ipaddress
import multiprocessing
import os
import pathlib
import select
import signal
import socket
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from types import FrameType

import h11
import uvicorn
from uvicorn.config import LOGGING_CONFIG
from uvicorn.protocols.http.flow_control import CLOSE_HEADER
from uvicorn.protocols.http.h11_impl import H11Protocol

from dropbayes.app.serving.application import Limits, application
from dropbayes.app.serving.metrics import MULTIPROCESS_FOLDER
from dropbayes.app.serving.served import ServedModel
from dropbayes.runtime.devices import end_with_parent, share_cores

__all__ = ["Settings", "serve"]

_MAX_CONNECTIONS = 1000
_IDLE_SECONDS = 10  # that a connection is kept open between requests
_HEADER_SECONDS = 20.0  # that the head of a request may take, or the rest of a body that is not read
_LINGER_SECONDS = 1.0  # that an open connection may still send a request after the signal to stop
_DRAIN_SECONDS = 60


@dataclass(frozen=True)
class Settings:
    """How models are served.

    Attributes:
        paths: The model folders.
        host: The address to listen on.
        port: The port; 0 takes a free one.
        workers: The number of processes.
        token: The bearer token that requests must carry, if any.
        allow_new: Whether unseen categories are encoded as all zeros where a request does not say.
        hosts: Further names in the header `Host` that are answered. Without a token, a server of this machine alone
            answers those of this machine and these: a page of another site could otherwise read from it.
        log_level: The least severity that is logged; "info" logs every request.
        limits: The limits of one request.
    """

    paths: Sequence[pathlib.Path]
    host: str = "127.0.0.1"
    port: int = 8000
    workers: int = 1
    token: str | None = None
    allow_new: bool = False
    hosts: Sequence[str] = ()
    log_level: str = "warning"
    limits: Limits = field(default_factory=Limits)

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the server."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


def serve(settings: Settings, *, announce: Callable[[str, ServedModel], None] = lambda url, model: None) -> None:
    """Serves models until the process is signalled to stop (SIGTERM, SIGINT), then finishes the requests under way.

    Args:
        settings: The models, the address and the limits.
        announce: Called with the address and each model once the port is open.

    Raises:
        ValueError: A folder holds no model that can be served, or two have the same name.
        OSError: A folder cannot be read, or the port is taken.
    """
    models = {model.name: model for model in map(ServedModel.load, settings.paths)}
    if len(models) < len(settings.paths):
        raise ValueError("the model folders must have different names, by which requests name their models.")
    listener = _listener(settings.host, settings.port)
    host, port = listener.getsockname()[:2]
    for model in models.values():
        announce(f"http://{f'[{host}]' if ':' in host else host}:{port}", model)
    with listener:
        if settings.workers == 1:
            _work(settings, listener)
        else:
            with tempfile.TemporaryDirectory(prefix="dropbayes-") as folder:
                os.environ[MULTIPROCESS_FOLDER] = folder  # where the workers' counters are added up
                _supervise(settings, listener)


def _listener(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(
        family, socket.SOCK_STREAM, socket.IPPROTO_TCP
    )  # named, or asyncio leaves Nagle's delay on
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"cannot listen on {host} port {port}: {error.strerror}") from None
    return listener


def _stop(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _work(settings: Settings, listener: socket.socket) -> None:
    """Serves in this process until it is signalled to stop."""
    end_with_parent()
    signal.signal(signal.SIGTERM, _stop)
    share_cores(settings.workers)
    this_machine = ("localhost", "127.0.0.1", "::1", "[::1]", settings.host)
    is_open = settings.token is not None or not settings.is_local
    app = application(
        settings.paths,
        settings.limits,
        token=settings.token,
        allow_new=settings.allow_new,
        hosts=("*",) if is_open and not settings.hosts else (*settings.hosts, *this_machine),
    )
    handlers = {name: {**handler, "stream": "ext://sys.stderr"} for name, handler in LOGGING_CONFIG["handlers"].items()}
    config = uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        loop="asyncio",
        lifespan="on",
        log_level=settings.log_level,
        log_config={**LOGGING_CONFIG, "handlers": handlers},
        server_header=False,
        timeout_keep_alive=_IDLE_SECONDS,
        timeout_graceful_shutdown=_DRAIN_SECONDS,
    )
    with suppress(KeyboardInterrupt):  # uvicorn repeats the signal when everything is answered
        _Server(config).run(sockets=[listener])


def _supervise(settings: Settings, listener: socket.socket) -> None:
    """Keeps the workers that share a port alive until a signal ends them; SIGHUP, to reload, is passed on to them."""
    spawn = multiprocessing.get_context("spawn")
    workers = [spawn.Process(target=_work, args=(settings, listener)) for _ in range(settings.workers)]

    def pass_on(number: int, frame: FrameType | None) -> None:
        ends = number in (signal.SIGTERM, signal.SIGINT)
        if ends:
            listener.close()  # the last worker to close it refuses new connections
        for worker in workers:
            if worker.pid is not None and worker.is_alive():
                os.kill(worker.pid, signal.SIGTERM if ends else number)

    for name in ("SIGTERM", "SIGINT", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), pass_on)
    for worker in workers:
        worker.start()
    while listener.fileno() >= 0:
        wait([worker.sentinel for worker in workers], timeout=1)
        for index, worker in enumerate(workers):
            if listener.fileno() >= 0 and not worker.is_alive():
                workers[index] = spawn.Process(target=_work, args=(settings, listener))
                workers[index].start()
    pass_on(signal.SIGTERM, None)
    for worker in workers:
        worker.join()


class _Server(uvicorn.Server):
    """A server that answers every connection it has accepted before it stops."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accepts no further connection, and lets those that are open send their requests."""
        last = asyncio.get_running_loop().time() + _LINGER_SECONDS
        while select.select(sockets or [], [], [], 0)[0] and asyncio.get_running_loop().time() < last:
            await asyncio.sleep(0)  # asyncio accepts those that the kernel has accepted
        for server in self.servers:
            server.close()
        headers = [*self.server_state.default_headers, CLOSE_HEADER]
        self.server_state.default_headers = headers
        for connection in self.server_state.connections:
            if isinstance(connection, Connection) and connection.cycle is not None:
                connection.cycle.default_headers = headers
        while self.server_state.connections and asyncio.get_running_loop().time() < last:
            await asyncio.sleep(0.02)
        await super().shutdown(sockets)


class Connection(H11Protocol):
    """A connection that is closed when a request takes too long to begin, or to end after it was answered.

    Above the limit, a new one takes the place of the oldest that is owed no answer: idle or slow ones keep nobody out.
    """

    _deadline: asyncio.TimerHandle | None = None

    @property
    def is_owed(self) -> bool:
        """Whether a whole request has arrived that is not answered yet."""
        return self.cycle is not None and not (self.cycle.response_complete or self.cycle.more_body)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts to wait for the first request."""
        super().connection_made(transport)
        self.opened = self.loop.time()
        self._watch()
        if len(self.connections) > _MAX_CONNECTIONS:
            others = [other for other in self.connections if isinstance(other, Connection) and other is not self]
            free = [other for other in others if not other.is_owed and not other.transport.is_closing()]
            if free:
                min(free, key=lambda other: other.opened).transport.abort()

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
