"""The process, or processes, in which models are served."""

import asyncio
import contextlib
import ctypes
import multiprocessing
import os
import select
import signal
import socket
import struct
import tempfile
from collections.abc import Callable, Iterable
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.config import LOGGING_CONFIG
from uvicorn.protocols.http.flow_control import CLOSE_HEADER
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from dropbayes.app.serving.application import application
from dropbayes.app.serving.metrics import MULTIPROCESS_FOLDER
from dropbayes.app.serving.served import ServedModel, Settings
from dropbayes.runtime.devices import end_with_parent, share_cores

_MAX_CONNECTIONS = 1000
_HEADER_SECONDS = 20.0  # that the head of a request may take, or the rest of a body that is not read


def serve(settings: Settings, *, announce: Callable[[str, ServedModel], None] = lambda url, model: None) -> None:
    """Serves models until the process is signalled to stop (SIGTERM, SIGINT), then finishes the requests under way.

    Calls `announce` with the address and each model once the port is open. Raises ValueError where a folder holds no
    model that can be served or two have the same name, and OSError where one cannot be read or the port is taken.
    """
    models = {model.name: model for model in map(ServedModel.load, settings.paths)}
    if len(models) < len(settings.paths):
        raise ValueError("the model folders must have different names, by which requests name their models.")
    listener = _listener(settings.host, settings.port)
    host, port = listener.getsockname()[:2]
    if hasattr(signal, "SIGHUP"):  # it waits until models can be reloaded; before, it would end the process
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    for model in models.values():
        announce(f"http://{f'[{host}]' if ':' in host else host}:{port}", model)
    with listener:
        if settings.workers == 1:
            _work(settings, listener, models.values())
        else:
            with tempfile.TemporaryDirectory(prefix="dropbayes-") as folder:
                os.environ[MULTIPROCESS_FOLDER] = folder  # where the workers' counters are added up
                _supervise(settings, listener)


def _listener(host: str, port: int) -> socket.socket:
    # The protocol must be named: asyncio turns Nagle's delay off where it is TCP's.
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, proto=socket.IPPROTO_TCP)
    try:
        if os.name == "posix":  # elsewhere it would let another program listen on the same port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"cannot listen on {host} port {port}: {error.strerror}") from None
    return listener


def _work(settings: Settings, listener: socket.socket, models: Iterable[ServedModel] | None = None) -> None:
    end_with_parent()
    share_cores(settings.workers)
    handlers = {name: {**handler, "stream": "ext://sys.stderr"} for name, handler in LOGGING_CONFIG["handlers"].items()}
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        config = uvicorn.Config(
            application(settings, models or map(ServedModel.load, settings.paths)),
            http=Connection,
            ws="none",
            loop="asyncio",
            server_header=False,
            log_level=settings.log_level,
            log_config={**LOGGING_CONFIG, "handlers": handlers},
            timeout_keep_alive=10,  # between requests
            timeout_graceful_shutdown=60,
        )
        server = _Server(config)
        server.is_alone = models is not None
        server.run(sockets=[listener])
    except KeyboardInterrupt:  # before the server ran, or from uvicorn, which repeats the signal at its end
        pass
    finally:
        signal.signal(signal.SIGTERM, previous)


def _supervise(settings: Settings, listener: socket.socket) -> None:
    """Keeps the workers that share a port alive until a signal ends them; SIGHUP, to reload, is passed on to them."""
    workers: list[SpawnProcess] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        if ends := number in (signal.SIGTERM, signal.SIGINT):
            _keep_out(listener)
            listener.close()  # the last worker to close it refuses new connections
        for worker in workers:
            if worker.pid is not None and worker.is_alive():
                os.kill(worker.pid, signal.SIGTERM if ends else number)

    for name in {"SIGTERM", "SIGINT", "SIGHUP"} & set(dir(signal)):
        signal.signal(getattr(signal, name), pass_on)
    while listener.fileno() >= 0:
        workers[:] = [worker for worker in workers if worker.is_alive()]
        while len(workers) < settings.workers and listener.fileno() >= 0:
            worker = multiprocessing.get_context("spawn").Process(target=_work, args=(settings, listener))
            worker.start()
            workers.append(worker)
        if hasattr(signal, "SIGHUP"):  # the workers have begun with it held, and release it themselves
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
        wait([worker.sentinel for worker in workers], timeout=1)
    pass_on(signal.SIGTERM, None)
    for worker in workers:
        worker.join()


def _keep_out(listener: socket.socket) -> None:
    """Has the kernel accept no further connection: one that comes while the port is closed would be lost."""
    nothing = (ctypes.c_uint16 * 4)(6)  # a filter that keeps nothing of a packet
    with contextlib.suppress(OSError):  # not on Linux, or closed
        listener.setsockopt(socket.SOL_SOCKET, 26, struct.pack("HP", 1, ctypes.addressof(nothing)))  # SO_ATTACH_FILTER


class _Server(uvicorn.Server):
    """A server that answers every connection it has accepted before it stops."""

    is_alone = False  #: Whether no other process shares the port.

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accepts no further connection, and lets those that are open send their requests."""
        for listener in sockets if sockets and self.is_alone else ():
            _keep_out(listener)
        clock = asyncio.get_running_loop().time
        last = clock() + 1.0  # in seconds, that an open connection may still send a request
        while select.select(sockets or [], [], [], 0)[0] and clock() < last:
            await asyncio.sleep(0)  # asyncio accepts those that the kernel has accepted
        for server in self.servers:
            server.close()
        self.server_state.default_headers = headers = [*self.server_state.default_headers, CLOSE_HEADER]
        connections: set[Any] = self.server_state.connections
        for cycle in filter(None, (connection.cycle for connection in connections)):
            cycle.default_headers = headers
        while connections and clock() < last:
            await asyncio.sleep(0.02)
        await super().shutdown(sockets)


class Connection(H11Protocol):
    """A connection that is closed where no request begins for long, or its body does not end after it was answered.

    Above the limit, a new one takes the place of the oldest that is owed no answer: idle or slow ones keep nobody out.
    """

    @property
    def is_owed(self) -> bool:
        """Whether a whole request has arrived that is not answered yet."""
        return self.cycle is not None and not (self.cycle.response_complete or self.cycle.more_body)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Makes room for this connection, and starts to watch it."""
        super().connection_made(transport)
        self.opened = self.loop.time()
        self._watch()
        others: set[Any] = self.connections - {self} if len(self.connections) > _MAX_CONNECTIONS else set()
        if free := [other for other in others if not other.is_owed and not other.transport.is_closing()]:
            min(free, key=lambda other: other.opened).transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._timer.cancel()

    def _watch(self) -> None:
        self._timer = self.loop.call_later(_HEADER_SECONDS, self._look, self.cycle)

    def _look(self, last: RequestResponseCycle | None) -> None:
        """Closes the connection where no request has begun since the last look and none is being answered."""
        if self.cycle is last and (last is None or last.response_complete):
            if self.conn.our_state is h11.IDLE and self.conn.their_state is h11.IDLE:
                self.conn.send(h11.ConnectionClosed())
            self.transport.close()
        else:
            self._watch()
