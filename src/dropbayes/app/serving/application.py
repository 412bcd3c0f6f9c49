"""The server's application: routes of the Open Inference Protocol, limits, and the model that answers."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import os
import pathlib
import sys
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from dropbayes.app.models.inputs import MATRIX
from dropbayes.app.models.model import load
from dropbayes.app.models.predictor import Predictor, check_finite, uncertainty
from dropbayes.app.models.storage import COLUMNS
from dropbayes.app.serving import protocol
from dropbayes.app.serving.batching import Batches
from dropbayes.app.serving.metrics import Metrics
from dropbayes.app.serving.protocol import RequestError
from dropbayes.runtime.arrays import NumpyArray
from dropbayes.runtime.version import __version__

__all__ = ["Limits", "Service", "application"]

_DATATYPE = {"number": "FP64", "boolean": "BOOL", "category": "BYTES", "date": "BYTES", "array": "FP64"}
# Bodies up to this size are decoded on the event loop; longer ones would block other requests.
_QUICK_BYTES = 2**16
_LOADS, _LOAD_PAUSE = 4, 0.5


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


@dataclass(frozen=True, eq=False)
class ServedModel:
    """A model as it is served: its name is that of its folder, its version a digest of what is in it."""

    name: str
    version: str
    predictor: Predictor
    percentiles: dict[str, float]

    @classmethod
    def load(cls, path: pathlib.Path) -> ServedModel:
        """The model in a folder, checked by a first prediction."""
        version = _version(path) if path.is_dir() else ""
        model = load(path)
        if _version(path) != version:
            raise ValueError(f"{str(path)!r} was replaced while it was read; try again.")
        predictor = Predictor(model)
        check_finite(predictor.predict_inputs(np.zeros((1, len(model.schema.inputs)))))
        return cls(path.resolve().name, version, predictor, model.uncertainty_percentiles)

    @property
    def metadata(self) -> dict[str, Any]:
        """What the protocol says about a model."""
        columns = self.predictor.inputs
        inputs = [{"name": name, "datatype": _DATATYPE[kind], "shape": [-1]} for name, kind in columns.items()]
        if MATRIX not in columns:
            datatype = "BYTES" if {"category", "date"} & set(columns.values()) else "FP64"
            inputs.append({"name": MATRIX, "datatype": datatype, "shape": [-1, len(columns)]})
        classes = self.predictor.classes
        shapes = {"probabilities": [-1, 0 if classes is None else len(classes)]}
        types = {"predicted": "BYTES", "deferred": "BOOL"}
        outputs = [
            {"name": name, "datatype": types.get(name, "FP64"), "shape": shapes.get(name, [-1])}
            for name in (*self.predictor.outputs, "deferred")
        ]
        known = {} if classes is None else {"parameters": {"classes": [str(label) for label in classes]}}
        return {
            "name": self.name, "versions": [self.version], "platform": "dropbayes", "inputs": inputs,
            "outputs": outputs, **known,
        }  # fmt: skip


def _version(path: pathlib.Path) -> str:
    """The description holds the digest of the network's file: its own digest is that of both."""
    try:
        return hashlib.sha256((path / COLUMNS).read_bytes()).hexdigest()[:12]
    except OSError:
        return ""  # loading reports the error


def _load(path: pathlib.Path) -> ServedModel:
    """The model in a folder that may be missing for a moment while it is replaced."""
    for _ in range(_LOADS - 1):
        with contextlib.suppress(ValueError, OSError):
            return ServedModel.load(path)
        time.sleep(_LOAD_PAUSE)
    return ServedModel.load(path)


class Service:
    """The model, the batches and the counters that the routes share.

    Args:
        path: The model folder.
        limits: The limits of one request.
        token: The bearer token that requests must carry, if any.
    """

    def __init__(self, path: pathlib.Path, limits: Limits, token: str | None) -> None:
        self.path, self.limits = path, limits
        self._token = None if token is None else token.encode()
        self.metrics = Metrics()
        self.model = _load(path)
        self.metrics.take_model(self.model.percentiles)
        self.batches = Batches(self.metrics.batch_rows.observe)
        self._held_bytes = 0

    async def reload(self) -> None:
        """Reloads the model from the folder; keeps the present one if that fails."""
        try:
            model = await run_in_threadpool(_load, self.path)
        except (ValueError, OSError) as error:
            print(f"dropbayes: note: the model was not replaced: {error}", file=sys.stderr, flush=True)
            return
        self.model = model
        self.metrics.take_model(model.percentiles)
        print(f"dropbayes: note: now serving version {model.version}", file=sys.stderr, flush=True)

    def authorize(self, request: Request) -> None:
        """Raises unless the request carries the token, compared in constant time."""
        if self._token is None:
            return
        given = request.headers.get("authorization", "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(given, b"Bearer " + self._token):
            raise RequestError(401, "a token is needed: send the header `Authorization: Bearer TOKEN`.")

    def named_model(self, request: Request) -> ServedModel:
        """The model a path names."""
        model = self.model
        name, version = request.path_params["model"], request.path_params.get("version", model.version)
        if name != model.name:
            raise RequestError(404, f"there is no model of this name; {model.name!r} is served.")
        if version != model.version:
            raise RequestError(404, f"there is no such version; the present one is {model.version!r}.")
        return model

    async def body(self, request: Request) -> bytes:
        """The body; raises if it is too long or arrives too slowly."""
        limits = self.limits
        declared = request.headers.get("content-length", "0")
        if request.headers.get("content-encoding", "identity") != "identity":
            raise RequestError(415, "compressed bodies are not taken; send it as it is.")
        too_long = RequestError(413, f"the body is longer than {limits.max_body} bytes.")
        if int(declared) > limits.max_body:
            raise too_long
        body = bytearray()
        try:
            async with asyncio.timeout(limits.body_seconds):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > limits.max_body:
                        raise too_long
        except TimeoutError:
            raise RequestError(408, f"the body took longer than {limits.body_seconds:g} s to arrive.") from None
        return bytes(body)

    @contextlib.contextmanager
    def _memory_for(self, request: Request) -> Any:
        """Counts a body against the memory limit of all requests together."""
        size = min(int(request.headers.get("content-length", "0")) or self.limits.max_body, self.limits.max_body)
        if self._held_bytes and self._held_bytes + size > 8 * self.limits.max_body:
            raise RequestError(429, "too many long requests at once; try again in a moment.")
        self._held_bytes += size
        try:
            yield
        finally:
            self._held_bytes -= size

    async def infer(self, request: Request) -> Response:
        """The answer to a request to predict."""
        model = self.named_model(request)
        with self._memory_for(request):
            body = await self.body(request)
            decode = lambda: self._decode(model, body, request.headers.get(protocol.HEADER_LENGTH))  # noqa: E731
            asked, predictor, x = await run_in_threadpool(decode) if len(body) > _QUICK_BYTES else decode()
            try:
                async with asyncio.timeout(self.limits.answer_seconds):
                    prediction = await self.batches.predict(predictor, x)
            except TimeoutError:
                raise RequestError(503, "the server is busy; try again later.") from None
            encode = lambda: self._encode(model, asked, predictor, prediction)  # noqa: E731
            encoded = await run_in_threadpool(encode) if len(x) > 1000 else encode()
        if encoded.header_length is None:
            return Response(encoded.body, media_type="application/json")
        headers = {protocol.HEADER_LENGTH: str(encoded.header_length)}
        return Response(encoded.body, media_type="application/octet-stream", headers=headers)

    def _decode(
        self, model: ServedModel, body: bytes, header_length: str | None
    ) -> tuple[protocol.InferenceRequest, Predictor, NumpyArray]:
        asked, binary = protocol.decode_request(body, header_length)
        known = [*model.predictor.outputs, "deferred"]
        for output in asked.outputs:
            if output.name not in known:
                raise RequestError(400, f"there is no output {output.name[:40]!r}; there are {', '.join(known)}.")
        settings = asked.parameters
        if settings.n_draws is not None and settings.n_draws > self.limits.max_draws:
            raise RequestError(400, f"`n_draws` must be at most {self.limits.max_draws}; got {settings.n_draws}.")
        columns = protocol.tensors(asked, binary, max_rows=self.limits.max_rows)
        unknown = [name for name in columns if name not in model.predictor.inputs and name != MATRIX]
        if unknown:
            raise RequestError(400, f"the model has no input {unknown[0][:40]!r}; its inputs are in its metadata.")
        try:
            predictor = model.predictor.with_settings(
                n_draws=settings.n_draws, seed=settings.seed, interval=settings.interval
            )
            return asked, predictor, predictor.encode(columns)
        except ValueError as error:
            raise RequestError(400, str(error)) from None

    def _encode(
        self,
        model: ServedModel,
        asked: protocol.InferenceRequest,
        predictor: Predictor,
        prediction: dict[str, NumpyArray],
    ) -> protocol.Encoded:
        try:
            check_finite(prediction)
        except ValueError as error:
            raise RequestError(400, str(error)) from None
        threshold = asked.parameters.defer_above
        deferred = None if threshold is None else uncertainty(prediction) > threshold
        self.metrics.take_rows(uncertainty(prediction), deferred)
        if deferred is not None:
            prediction = {**prediction, "deferred": deferred}
        wanted = [output.name for output in asked.outputs] or list(prediction)
        if "deferred" in wanted and deferred is None:
            raise RequestError(400, "the output 'deferred' needs the parameter `defer_above`.")
        binary = [o.name for o in asked.outputs if o.parameters.get("binary_data", asked.parameters.binary_data_output)]
        if asked.parameters.binary_data_output and not asked.outputs:
            binary = wanted
        head: dict[str, Any] = {"model_name": model.name, "model_version": model.version}
        if asked.id is not None:
            head["id"] = asked.id
        head["parameters"] = {"n_draws": predictor.n_draws, "seed": predictor.seed, "interval": predictor.interval}
        try:
            return protocol.encode_response(head, {name: prediction[name] for name in wanted}, binary=binary)
        except UnicodeError:
            raise RequestError(400, "`id` holds half a character.") from None


# --- routes --------------------------------------------------------------------------------------------------------


def _json(values: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    text = json.dumps(values).encode("utf-8", "replace")
    return Response(text, status, media_type="application/json", headers=headers)


def _endpoint(service: Service, answer: Callable[[Request], Awaitable[Response]], *, open_to_all: bool = False) -> Any:
    """The route's function: with the token checked, refusals as JSON, and the answer counted."""

    async def endpoint(request: Request) -> Response:
        begun = time.perf_counter()
        try:
            if not open_to_all:
                service.authorize(request)
            response = await answer(request)
        except RequestError as error:
            headers = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}, 503: {"Retry-After": "5"}}
            response = _json({"error": str(error)}, error.status, headers.get(error.status))
        except ClientDisconnect:
            response = _json({"error": "the client has gone."}, 400)
        except Exception:
            traceback.print_exc()
            response = _json({"error": "the server failed; its log says how."}, 500)
        service.metrics.requests.labels(str(response.status_code)).inc()
        service.metrics.seconds.observe(time.perf_counter() - begun)
        return response

    return endpoint


def application(path: str | os.PathLike[str], limits: Limits, token: str | None) -> Starlette:
    """The application that serves the model of a folder; SIGHUP reloads it."""
    service = Service(pathlib.Path(path), limits, token)

    async def live(request: Request) -> Response:
        return _json({"live": True})

    async def ready(request: Request) -> Response:
        return _json({"ready": True})

    async def server(request: Request) -> Response:
        return _json({"name": "dropbayes", "version": __version__, "extensions": list(protocol.EXTENSIONS)})

    async def model(request: Request) -> Response:
        return _json(service.named_model(request).metadata)

    async def model_ready(request: Request) -> Response:
        return _json({"name": service.named_model(request).name, "ready": True})

    async def metrics(request: Request) -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    def routes(prefix: str) -> list[Route]:
        return [
            Route(prefix, _endpoint(service, model), methods=["GET"]),
            Route(f"{prefix}/ready", _endpoint(service, model_ready), methods=["GET"]),
            Route(f"{prefix}/infer", _endpoint(service, service.infer), methods=["POST"]),
        ]

    async def refusal(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return _json({"error": str(error.detail)}, error.status_code, dict(error.headers or {}))

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        import signal

        loop = asyncio.get_running_loop()
        reloads: set[asyncio.Task[None]] = set()

        def reload() -> None:
            task = loop.create_task(service.reload())
            reloads.add(task)
            task.add_done_callback(reloads.discard)

        with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):  # not in the main thread
            loop.add_signal_handler(signal.SIGHUP, reload)
        yield
        service.batches.close()

    app = Starlette(
        routes=[
            Route("/v2", _endpoint(service, server), methods=["GET"]),
            Route("/v2/health/live", _endpoint(service, live, open_to_all=True), methods=["GET"]),
            Route("/v2/health/ready", _endpoint(service, ready, open_to_all=True), methods=["GET"]),
            *routes("/v2/models/{model}"),
            *routes("/v2/models/{model}/versions/{version}"),
            Route("/metrics", _endpoint(service, metrics), methods=["GET"]),
        ],
        exception_handlers={HTTPException: refusal},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    return app
