"""The server's application: routes of the Open Inference Protocol and of plain records, limits, and the models."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import pathlib
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import anyio
import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dropbayes.app.models.predictor import Predictor, uncertainty
from dropbayes.app.serving import protocol
from dropbayes.app.serving.batching import Batches
from dropbayes.app.serving.metrics import Metrics
from dropbayes.app.serving.openapi import openapi
from dropbayes.app.serving.protocol import Parameters, RequestError
from dropbayes.app.serving.served import ServedModel
from dropbayes.columns import Encoded
from dropbayes.runtime.arrays import NumpyArray
from dropbayes.runtime.version import __version__

__all__ = ["Limits", "Service", "application"]

# Bodies up to this size are decoded on the event loop, where longer ones would hold up other requests, and are not
# refused when long ones fill the memory.
_SMALL_BODY = 2**16
_MAX_BODIES = 8  # longest bodies in memory at once

_Value = TypeVar("_Value")
_log = logging.getLogger("uvicorn.error")


@dataclass(frozen=True)
class Limits:
    """The limits of one request.

    Attributes:
        max_body: The most bytes of a body.
        max_rows: The most rows of a request.
        max_draws: The most draws of each network.
        body_seconds: The longest a body may take to arrive.
        answer_seconds: The longest a request may wait for its prediction.
    """

    max_body: int = 16 * 2**20
    max_rows: int = 10_000
    max_draws: int = 1000
    body_seconds: float = 20.0
    answer_seconds: float = 60.0


def _load(path: pathlib.Path) -> ServedModel:
    """The model in a folder that may be missing for a moment while it is replaced."""
    for _ in range(3):
        with contextlib.suppress(ValueError, OSError):
            return ServedModel.load(path)
        time.sleep(0.5)
    return ServedModel.load(path)


class Service:
    """The models, the batches and the counters that the routes share.

    Args:
        paths: The model folders.
        limits: The limits of one request.
        allow_new: Whether unseen categories are encoded as all zeros where a request does not say.
    """

    def __init__(self, paths: Sequence[pathlib.Path], limits: Limits, *, allow_new: bool = False) -> None:
        self.limits, self.allow_new = limits, allow_new
        self.metrics = Metrics()
        self.batches = Batches(limits.answer_seconds, self.metrics.batch_rows.observe)
        self.models: dict[str, ServedModel] = {}
        self.paths = paths
        for path in paths:
            self._take(_load(path))
        self._held_bytes = 0
        self._long_bodies = anyio.CapacityLimiter(1)  # decoded or encoded at a time

    def _take(self, model: ServedModel) -> None:
        self.models[model.name] = model
        self.metrics.take_model(model.name, model.model.uncertainty_percentiles)

    async def reload(self) -> None:
        """Reloads the models from their folders; keeps a present one where that fails."""
        for path in self.paths:
            try:
                model = await anyio.to_thread.run_sync(_load, path)
            except (ValueError, OSError) as error:
                print(f"dropbayes: note: the model was not replaced: {error}", file=sys.stderr, flush=True)
                continue
            self._take(model)
            print(f"dropbayes: note: now serving version {model.version}", file=sys.stderr, flush=True)

    # --- requests --------------------------------------------------------------------------------------------------

    def named_model(self, request: Request) -> ServedModel:
        """The model a path names."""
        model = self.models.get(request.path_params["model"])
        if model is None:
            raise RequestError(404, f"there is no model of this name; there are {', '.join(map(repr, self.models))}.")
        if request.path_params.get("version", model.version) != model.version:
            raise RequestError(404, f"there is no such version; the present one is {model.version!r}.")
        return model

    @contextlib.asynccontextmanager
    async def _body(self, request: Request) -> AsyncIterator[bytes]:
        """The body of a request, charged to the memory of all as it arrives."""
        limits, body = self.limits, bytearray()
        too_long = RequestError(413, f"the body is longer than {limits.max_body} bytes.")
        if request.headers.get("content-encoding", "identity") != "identity":
            raise RequestError(415, "compressed bodies are not taken; send it as it is.")
        if int(request.headers.get("content-length", "0")) > limits.max_body:
            raise too_long
        try:
            try:
                async with asyncio.timeout(limits.body_seconds):
                    async for chunk in request.stream():
                        body += chunk
                        self._held_bytes += len(chunk)
                        if len(body) > limits.max_body:
                            raise too_long
                        if len(body) > _SMALL_BODY and self._held_bytes > _MAX_BODIES * limits.max_body:
                            raise RequestError(429, "too many long requests at once; try again in a moment.")
            except TimeoutError:
                raise RequestError(408, f"the body took longer than {limits.body_seconds:g} s to arrive.") from None
            yield bytes(body)
        finally:
            self._held_bytes -= len(body)

    async def _off_loop(self, is_long: bool, work: Callable[[], _Value]) -> _Value:
        """The result of some work, done in a thread where it is long; a ValueError is the request's fault."""
        try:
            return await anyio.to_thread.run_sync(work, limiter=self._long_bodies) if is_long else work()
        except ValueError as error:
            raise RequestError(400, str(error)) from None

    async def _outputs(
        self, request: Request, model: ServedModel, settings: Parameters, rows: Encoded
    ) -> tuple[Predictor, dict[str, NumpyArray]]:
        """The outputs for some rows, and the model with the settings of the request."""
        try:
            predictor = model.predictor.with_settings(
                n_draws=settings.n_draws, seed=settings.seed, coverage=settings.coverage
            )
            prediction = await self._prediction(request, predictor, rows.x)
            outputs = model.complete(prediction, rows, predictor, settings.defer_above)
        except ValueError as error:
            raise RequestError(400, str(error)) from None
        self.metrics.take_rows(model.name, uncertainty(prediction), outputs.get("deferred"))
        return predictor, outputs

    async def _prediction(self, request: Request, predictor: Predictor, x: NumpyArray) -> dict[str, NumpyArray]:
        """The prediction, given up where the client leaves or the time is over before it is made."""
        if predictor.n_draws > self.limits.max_draws:
            raise RequestError(400, f"`n_draws` must be at most {self.limits.max_draws}; got {predictor.n_draws}.")
        prediction = asyncio.ensure_future(self.batches.predict(predictor, x))
        departure = asyncio.ensure_future(request.receive())  # after the body, there is only the disconnection
        try:
            first = asyncio.wait({prediction, departure}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait_for(first, self.limits.answer_seconds)
            if prediction.done():
                return prediction.result()
            raise ClientDisconnect
        except TimeoutError:
            raise RequestError(503, "the server is busy; try again later.") from None
        finally:
            prediction.cancel()
            departure.cancel()

    def _decode(self, model: ServedModel, body: bytes, length: str | None) -> tuple[protocol.InferenceRequest, Encoded]:
        asked, binary = protocol.decode_request(body, length)
        for what, given, known in (
            ("name", asked.model_name, model.name),
            ("version", asked.model_version, model.version),
        ):
            if given not in (None, known):
                raise RequestError(400, f"`model_{what}` must be that of the path, {known!r}; got {given[:40]!r}.")
        for output in asked.outputs:
            if output.name not in model.outputs:
                names = ", ".join(model.outputs)
                raise RequestError(400, f"there is no output {output.name[:40]!r}; there are {names}.")
            if output.name == "deferred" and asked.parameters.defer_above is None:
                raise RequestError(400, "the output 'deferred' needs the parameter `defer_above`.")
        columns = protocol.tensors(asked, binary, max_rows=self.limits.max_rows, n_columns=len(model.predictor.inputs))
        return asked, model.encode(columns, allow_new=self._allows_new(asked.parameters))

    def _allows_new(self, settings: Parameters) -> bool:
        return self.allow_new if settings.allow_new is None else settings.allow_new

    async def infer(self, request: Request) -> Response:
        """The answer to a request of the protocol."""
        model = self.named_model(request)
        async with self._body(request) as body:
            length = request.headers.get(protocol.HEADER_LENGTH)
            asked, rows = await self._off_loop(len(body) > _SMALL_BODY, lambda: self._decode(model, body, length))
            predictor, outputs = await self._outputs(request, model, asked.parameters, rows)
            wanted = {output.name: output.parameters.binary_data for output in asked.outputs} or dict.fromkeys(outputs)
            default = asked.parameters.binary_data_output
            binary = [name for name, flag in wanted.items() if (default if flag is None else flag)]
            head = _head(model, predictor) | ({} if asked.id is None else {"id": asked.id})
            named = {name: outputs[name] for name in wanted}
            text, json_length = await self._off_loop(
                len(rows.x) > 1000, lambda: protocol.encode_response(head, named, binary=binary)
            )
        if json_length is None:
            return Response(text, media_type="application/json")
        return Response(text, headers={protocol.HEADER_LENGTH: str(json_length)}, media_type="application/octet-stream")

    async def records(self, request: Request) -> Response:
        """The answer to plain records: a record with the columns that `dropbayes predict` adds for each."""
        model = self.named_model(request)

        def decode(body: bytes) -> tuple[Parameters, Encoded]:
            asked: Any = protocol.decode_json(body, msgspec.json.Decoder(model.records_type), "the body is no records")
            if len(asked.records) > self.limits.max_rows:
                raise RequestError(413, f"{len(asked.records)} records; at most {self.limits.max_rows} are taken.")
            return asked.parameters, model.encode(
                model.columns_of(asked.records), allow_new=self._allows_new(asked.parameters)
            )

        async with self._body(request) as body:
            settings, rows = await self._off_loop(len(body) > _SMALL_BODY, lambda: decode(body))
            predictor, outputs = await self._outputs(request, model, settings, rows)
            columns = {name: values.tolist() for name, values in predictor.flat_columns(outputs).items()}
            found = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        return _json({**_head(model, predictor), "records": found})


def _head(model: ServedModel, predictor: Predictor) -> dict[str, Any]:
    settings = {"n_draws": predictor.n_draws, "seed": predictor.seed, "coverage": predictor.coverage}
    return {"model_name": model.name, "model_version": model.version, "parameters": settings}


# --- routes --------------------------------------------------------------------------------------------------------


def _json(values: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(values), status, media_type="application/json", headers=headers)


class _Door:
    """The way in for every request: its token and content type are checked, and its status is counted."""

    def __init__(self, app: ASGIApp, metrics: Metrics, token: str | None) -> None:
        self._app, self._metrics = app, metrics
        self._token = None if token is None else token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = time.perf_counter()

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.requests.labels(str(message["status"])).inc()
                self._metrics.seconds.observe(time.perf_counter() - begun)
            await send(message)

        refused = self._refusal(Request(scope))
        await (self._app if refused is None else refused)(scope, receive, counted)

    def _refusal(self, request: Request) -> Response | None:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
            # A page of another site may have a browser send these, and only these, without asking the server first.
            return _json({"error": f"{kind} is not taken; send the header `Content-Type: application/json`."}, 415)
        if self._token is None or request.url.path.startswith("/v2/health/"):
            return None
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and hmac.compare_digest(given.encode("utf-8", "surrogateescape"), self._token):
            return None
        message = "a token is needed: send the header `Authorization: Bearer TOKEN`."
        return _json({"error": message}, 401, {"WWW-Authenticate": "Bearer"})


async def _refuse(request: Request, error: Exception) -> Response:
    status = {RequestError: "status", HTTPException: "status_code"}
    code: int = getattr(error, status.get(type(error), ""), 499)  # 499: the client has gone
    headers = {429: {"Retry-After": "1"}, 503: {"Retry-After": "5"}}.get(code)
    text = str(getattr(error, "detail", error)).encode("utf-8", "replace").decode()
    _log.info("%s %s refused with %d: %s", request.method, request.url.path, code, text)
    return _json({"error": text}, code, headers or dict(getattr(error, "headers", None) or {}))


def application(
    paths: Sequence[pathlib.Path],
    limits: Limits,
    *,
    token: str | None = None,
    allow_new: bool = False,
    hosts: Sequence[str] = ("*",),
) -> ASGIApp:
    """The application that serves the models of some folders; SIGHUP reloads them.

    Args:
        paths: The folders.
        limits: The limits of one request.
        token: The bearer token that requests must carry, if any.
        allow_new: Whether unseen categories are encoded as all zeros where a request does not say.
        hosts: The names in the header `Host` that are answered.
    """
    service = Service(paths, limits, allow_new=allow_new)

    def route(path: str, answer: Callable[[Request], Any], method: str = "GET") -> Route:
        async def endpoint(request: Request) -> Response:
            value = answer(request)
            value = await value if asyncio.iscoroutine(value) else value
            return value if isinstance(value, Response) else _json(value)

        return Route(path, endpoint, methods=[method])

    def ready(request: Request) -> Any:
        return {"name": service.named_model(request).name, "ready": True}

    def models(prefix: str) -> list[Route]:
        return [
            route(prefix, lambda request: service.named_model(request).metadata),
            route(f"{prefix}/ready", ready),
            route(f"{prefix}/infer", service.infer, "POST"),
            route(f"{prefix}/records", service.records, "POST"),
        ]

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        wanted = asyncio.Event()

        async def reloads() -> None:  # one at a time; signals during one lead to one more
            while await wanted.wait():
                wanted.clear()
                await service.reload()

        task = asyncio.create_task(reloads())
        with contextlib.suppress(AttributeError, ValueError, RuntimeError, NotImplementedError):  # Windows, or a thread
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, wanted.set)
        yield
        task.cancel()
        service.batches.close()

    metrics_type = "text/plain; version=0.0.4; charset=utf-8"
    about = {"name": "dropbayes", "version": __version__, "extensions": ["binary_tensor_data"]}
    app = Starlette(
        routes=[
            route("/v2", lambda _: about),
            route("/v2/health/live", lambda _: {"live": True}),
            route("/v2/health/ready", lambda _: {"ready": True}),
            *models("/v2/models/{model}"),
            *models("/v2/models/{model}/versions/{version}"),
            route("/metrics", lambda _: Response(service.metrics.text(), media_type=metrics_type)),
            route("/openapi.json", lambda _: openapi(service.models.values())),
        ],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts))],
        exception_handlers=dict.fromkeys((RequestError, HTTPException, ClientDisconnect), _refuse),
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    return _Door(app, service.metrics, token)
