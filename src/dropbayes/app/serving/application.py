"""The server's application: routes of the Open Inference Protocol and of plain records, limits, and the models."""

import asyncio
import contextlib
import hmac
import logging
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
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
from dropbayes.app.serving.protocol import InferenceRequest
from dropbayes.app.serving.served import ServedModel, Settings, all_outputs
from dropbayes.estimators.columns import Encoded
from dropbayes.runtime import __version__
from dropbayes.runtime.validation import NumpyArray

# Bodies up to this size are decoded on the event loop, where longer ones would hold up other requests, and are not
# refused when long ones fill the memory.
_SMALL_BODY = 2**16

_Value = TypeVar("_Value")
_log = logging.getLogger("uvicorn.error")


class Service:
    """The models, the batches and the counters that the routes share."""

    def __init__(self, settings: Settings, models: Iterable[ServedModel]) -> None:
        self.settings, self.metrics = settings, Metrics()
        self.batches = Batches(settings.answer_seconds, self.metrics.batch_rows.observe)
        self.models: dict[str, ServedModel] = {}
        for model in models:
            self._take(model)
        self._held_bytes = 0
        self._long_bodies = anyio.CapacityLimiter(1)  # decoded or encoded at a time

    def _take(self, model: ServedModel) -> None:
        self.models[model.name] = model
        self.metrics.take_model(model.name, model.percentiles)

    async def reload(self) -> None:
        """Reloads the models from their folders and modules; keeps a present one where that fails."""
        for path in self.settings.paths:
            try:
                model = await anyio.to_thread.run_sync(ServedModel.load, path)
            except Exception as error:  # of a module it may be any; those after it are still reloaded
                print(f"dropbayes: note: the model was not replaced: {error}", file=sys.stderr, flush=True)
                continue
            self._take(model)
            print(f"dropbayes: note: now serving {model.name}, version {model.version}", file=sys.stderr, flush=True)

    def named_model(self, request: Request) -> ServedModel:
        if (model := self.models.get(request.path_params["model"])) is None:
            raise HTTPException(404, f"there is no model of this name; there are {', '.join(map(repr, self.models))}.")
        if request.path_params.get("version", model.version) != model.version:
            raise HTTPException(404, f"there is no such version; the present one is {model.version!r}.")
        return model

    @contextlib.asynccontextmanager
    async def _body(self, request: Request) -> AsyncIterator[bytes]:
        """The body of a request, charged to the memory of all as it arrives."""
        settings, body = self.settings, bytearray()
        too_long = HTTPException(413, f"the body is longer than {settings.max_body} bytes.")
        if request.headers.get("content-encoding", "identity") != "identity":
            raise HTTPException(415, "compressed bodies are not taken; send it as it is.")
        if int(request.headers.get("content-length", "0")) > settings.max_body:
            raise too_long
        try:
            try:
                async with asyncio.timeout(settings.body_seconds):
                    async for chunk in request.stream():
                        body += chunk
                        self._held_bytes += len(chunk)
                        if len(body) > settings.max_body:
                            raise too_long
                        if len(body) > _SMALL_BODY and self._held_bytes > 8 * settings.max_body:  # eight at once
                            raise HTTPException(429, "too many long requests at once; try again in a moment.")
            except TimeoutError:
                raise HTTPException(408, f"the body took longer than {settings.body_seconds:g} s to arrive.") from None
            yield bytes(body)
        finally:
            self._held_bytes -= len(body)

    async def _off_loop(self, is_long: bool, work: Callable[[], _Value]) -> _Value:
        """The result of some work, done in a thread where it is long."""
        return await anyio.to_thread.run_sync(work, limiter=self._long_bodies) if is_long else work()

    async def _prediction(self, request: Request, predictor: Predictor, x: NumpyArray) -> dict[str, NumpyArray]:
        """The prediction, given up where the client leaves or the time is over before it is made."""
        prediction = asyncio.ensure_future(self.batches.predict(predictor, x))
        departure = asyncio.ensure_future(request.receive())  # after the body, there is only the disconnection
        try:
            either, seconds = {prediction, departure}, self.settings.answer_seconds
            await asyncio.wait(either, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if prediction.done():
                return prediction.result()
            raise ClientDisconnect() if departure.done() else HTTPException(503, "the server is busy; try again later.")
        finally:
            prediction.cancel()
            departure.cancel()

    async def answer(self, request: Request) -> Response:
        """The answer to tensors or to plain records, read and rendered in a thread where it is long."""
        model, limits = self.named_model(request), {"max_rows": self.settings.max_rows}
        length, as_records = request.headers.get(protocol.HEADER_LENGTH), request.url.path.endswith("/records")

        def read() -> tuple[Any, Encoded]:
            asked, columns = model.records(body, **limits) if as_records else model.tensors(body, length, **limits)
            if (allow_new := asked.parameters.allow_new) is None:
                allow_new = self.settings.allow_new or None  # as the model has it
            return asked, model.encode(columns, allow_new=allow_new)

        async with self._body(request) as body:
            asked, rows = await self._off_loop(len(body) > _SMALL_BODY, read)
            given = {name: getattr(asked.parameters, name) for name in ("n_draws", "seed", "coverage")}
            if (given["n_draws"] or 0) > self.settings.max_draws:
                raise ValueError(f"`n_draws` must be at most {self.settings.max_draws}; got {given['n_draws']}.")
            predictor = model.predictor.with_settings(**given, method=asked.parameters.method or self.settings.method)
            prediction = await self._prediction(request, predictor, rows.x)
            outputs = all_outputs(prediction, rows, predictor, defer_above=asked.parameters.defer_above)
            self.metrics.take_rows(model.name, uncertainty(prediction), outputs.get("deferred"))
            names = ["method", *(("n_draws", "seed") if predictor.method == "sampling" else ())]
            names += ["coverage"] if {"lower", "labels"} & outputs.keys() else []  # probabilities alone have none
            used = {name: getattr(predictor, name) for name in names}
            head = {"model_name": model.name, "model_version": model.version, "parameters": used}

            def render() -> Response:
                if not as_records:
                    return protocol.response(asked, head, outputs)
                columns = {name: values.tolist() for name, values in predictor.flat_columns(outputs).items()}
                found = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
                return _json({**head, "records": found})

            return await self._off_loop(len(rows.x) > 1000, render)


def _json(values: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(values), status, media_type="application/json", headers=headers)


def _guarded(app: ASGIApp, metrics: Metrics, token: str | None) -> ASGIApp:
    """The application, for requests whose token and content type are right; the status of every answer is counted."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        begun = time.perf_counter()

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                metrics.requests.labels(str(message["status"])).inc()
                metrics.seconds.observe(time.perf_counter() - begun)
            await send(message)

        await (_refusal(Request(scope), token) or app)(scope, receive, counted)

    return answer


def _refusal(request: Request, token: str | None) -> Response | None:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if request.method == "POST" and kind.startswith(("text/plain", "application/x-www-form", "multipart/form")):
        # A page of another site may have a browser send these, and only these, without asking the server first.
        return _json({"error": f"{kind} is not taken; send the header `Content-Type: application/json`."}, 415)
    if token is None or request.url.path.startswith("/v2/health/"):
        return None
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and hmac.compare_digest(given.encode("utf-8", "surrogateescape"), token.encode()):
        return None
    message = "a token is needed: send the header `Authorization: Bearer TOKEN`."
    return _json({"error": message}, 401, {"WWW-Authenticate": "Bearer"})


async def _refuse(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 400)  # a ValueError is the request's fault
    text = getattr(error, "detail", str(error)).encode("utf-8", "replace").decode()
    if type(error) is ClientDisconnect:
        status, text = 499, "the client has gone."
    headers = {429: {"Retry-After": "1"}, 503: {"Retry-After": "5"}}.get(status, getattr(error, "headers", None))
    _log.info("%s %s refused with %d: %s", request.method, request.url.path, status, text)
    return _json({"error": text}, status, headers)


def openapi(routes: Iterable[Route], models: Iterable[ServedModel]) -> dict[str, Any]:
    """The paths of a server with the requests they take, in the OpenAPI format."""
    kinds = [InferenceRequest, *(model.records_type for model in models)]
    (tensors, *records), components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    bodies = {"infer": tensors, "records": {"anyOf": records}}
    paths: dict[str, Any] = {}
    for route in routes:
        name = {"in": "path", "required": True, "schema": {"type": "string"}}
        names = [{"name": given, **name} for given in route.param_convertors]
        body = bodies.get(route.path.rpartition("/")[2])
        taken = {} if body is None else {"requestBody": {"content": {"application/json": {"schema": body}}}}
        operation = {"parameters": names, **taken, "responses": {"200": {"description": "The answer."}}}
        paths[route.path] = {"get" if body is None else "post": operation}
    info = {"title": "dropbayes", "version": __version__}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": components}}


def application(settings: Settings, models: Iterable[ServedModel]) -> ASGIApp:
    """The application that serves some models; SIGHUP reloads them from their folders."""
    service = Service(settings, models)

    def route(path: str, answer: Callable[[Request], Any]) -> Route:
        async def endpoint(request: Request) -> Response:
            return _json(answer(request))

        return Route(path, endpoint, methods=["GET"])

    async def metrics(request: Request) -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    def of_models(prefix: str) -> list[Route]:
        return [
            route(prefix, lambda request: service.named_model(request).metadata),
            route(f"{prefix}/ready", lambda request: {"name": service.named_model(request).name, "ready": True}),
            *(Route(f"{prefix}/{form}", service.answer, methods=["POST"]) for form in ("infer", "records")),
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
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
        yield
        task.cancel()
        await service.batches.close()

    routes: list[Route] = [
        route("/v2", lambda _: {"name": "dropbayes", "version": __version__, "extensions": ["binary_tensor_data"]}),
        route("/v2/health/live", lambda _: {"live": True}),
        route("/v2/health/ready", lambda _: {"ready": True}),
        *of_models("/v2/models/{model}"),
        *of_models("/v2/models/{model}/versions/{version}"),
        Route("/metrics", metrics, methods=["GET"]),
        route("/openapi.json", lambda _: openapi(routes, service.models.values())),
    ]
    app = Starlette(
        routes=routes,
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=settings.hosts)],
        exception_handlers=dict.fromkeys((HTTPException, ClientDisconnect, ValueError), _refuse),
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    return _guarded(app, service.metrics, settings.token)
