"""The OpenAPI document of an environment server, made from the models that validate its
requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from envs.wire import ErrorReply

REF = "#/components/schemas/{model}"


@dataclass(frozen=True)
class Route:
    """One HTTP route. A GET takes its fields from the query, a POST from the body."""

    method: str
    path: str
    request: type[BaseModel] | None = None
    reply: type[BaseModel] | None = None  # None: any JSON, or text
    summary: str = ""
    errors: type[BaseModel] | None = ErrorReply  # body of replies that are not 200; None: any
    media_type: str = "application/json"


def document(title: str, routes: Sequence[Route], *, bearer: bool) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of the routes. bearer: requests must carry a token."""
    models = {model for route in routes for model in (route.request, route.reply, route.errors)}
    ordered = sorted(filter(None, models), key=lambda model: model.__name__)
    _, definitions = models_json_schema(
        [(model, "validation") for model in ordered], ref_template=REF
    )
    paths: dict[str, Any] = {}
    for route in routes:
        entry: dict[str, Any] = {
            "operationId": f"{route.method.lower()} {route.path}",
            "summary": route.summary,
            "responses": {
                "200": {"description": "done", **_content(route.reply, route.media_type)},
                "default": {"description": "refused", **_content(route.errors)},
            },
        }
        if route.request is not None and route.method == "POST":
            entry["requestBody"] = {"required": True, **_content(route.request)}
        elif route.request is not None:
            query_schema = definitions["$defs"][route.request.__name__]
            entry["parameters"] = [
                {
                    "name": name,
                    "in": "query",
                    "required": name in query_schema.get("required", ()),
                    "schema": schema,
                }
                for name, schema in query_schema["properties"].items()
            ]
        paths.setdefault(route.path, {})[route.method.lower()] = entry
    result: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": title, "version": "1"},
        "paths": paths,
        "components": {"schemas": definitions.get("$defs", {})},
    }
    if bearer:
        result["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        result["security"] = [{"token": []}]
    return result


def _content(model: type[BaseModel] | None, media_type: str = "application/json") -> dict[str, Any]:
    schema = {} if model is None else {"$ref": REF.format(model=model.__name__)}
    return {"content": {media_type: {"schema": schema}}}
