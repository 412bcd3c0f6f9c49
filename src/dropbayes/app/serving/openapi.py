"""The description of a server in the OpenAPI format, for client generators and interactive pages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from dropbayes.app.serving.protocol import InferenceRequest
from dropbayes.app.serving.served import ServedModel
from dropbayes.runtime.version import __version__

__all__ = ["openapi"]


def openapi(models: Iterable[ServedModel]) -> dict[str, Any]:
    """The paths of a server with the requests they take.

    Args:
        models: The models it serves.
    """
    paths: dict[str, Any] = {
        path: {"get": _operation(summary)}
        for path, summary in (
            ("/v2", "The server's name, version and extensions."),
            ("/v2/health/live", "Whether the server lives."),
            ("/v2/health/ready", "Whether the server answers."),
            ("/metrics", "Counters for Prometheus."),
        )
    }
    models = list(models)
    kinds = [InferenceRequest, *(model.records_type for model in models)]
    schemas, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    for model, records in zip(models, schemas[1:], strict=True):
        prefix = f"/v2/models/{model.name}"
        paths[prefix] = {"get": _operation("The model's inputs, outputs, version and classes.")}
        paths[f"{prefix}/ready"] = {"get": _operation("Whether the model answers.")}
        paths[f"{prefix}/infer"] = {"post": _operation("A prediction by the Open Inference Protocol.", schemas[0])}
        paths[f"{prefix}/records"] = {"post": _operation("A prediction of plain records.", records)}
    info = {"title": "dropbayes", "version": __version__}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": components}}


def _operation(summary: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """An operation that answers with JSON."""
    taken = {} if body is None else {"requestBody": {"content": {"application/json": {"schema": body}}}}
    return {"summary": summary, **taken, "responses": {"200": {"description": "The answer."}}}
