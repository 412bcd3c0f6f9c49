"""The description of a server in the OpenAPI format, for client generators and interactive pages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from starlette.routing import BaseRoute, Route

from dropbayes.app.serving.protocol import InferenceRequest
from dropbayes.app.serving.served import ServedModel
from dropbayes.runtime.version import __version__

__all__ = ["openapi"]


def openapi(routes: Iterable[BaseRoute], models: Iterable[ServedModel]) -> dict[str, Any]:
    """The paths of a server with the requests they take.

    Args:
        routes: The routes of the application.
        models: The models it serves.
    """
    kinds = [InferenceRequest, *(model.records_type for model in models)]
    (tensors, *records), components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    bodies = {"infer": tensors, "records": {"anyOf": records}}
    paths: dict[str, Any] = {}
    for route in routes:
        if isinstance(route, Route):
            name = {"in": "path", "required": True, "schema": {"type": "string"}}
            names = [{"name": given, **name} for given in route.param_convertors]
            body = bodies.get(route.path.rpartition("/")[2])
            taken = {} if body is None else {"requestBody": {"content": {"application/json": {"schema": body}}}}
            operation = {"parameters": names, **taken, "responses": {"200": {"description": "The answer."}}}
            paths[route.path] = {"get" if body is None else "post": operation}
    info = {"title": "dropbayes", "version": __version__}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": components}}
