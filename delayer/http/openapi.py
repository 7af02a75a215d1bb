"""The OpenAPI document, made of the declarations of the endpoints."""

from __future__ import annotations

import re
from collections.abc import Mapping
from http import HTTPStatus
from inspect import cleandoc
from typing import Any, Final

from pydantic import TypeAdapter

from delayer import __version__
from delayer.http.access import MAX_BODY
from delayer.http.endpoints import JSON, LINES, Endpoint, Fields
from delayer.http.problems import MEDIA_TYPE, ProblemShape

_REFS: Final = "#/components/schemas/{model}"
_MEANINGS: Final[Mapping[int, str]] = {
    400: "The query, or the JSON of the body, cannot be read.",
    401: "The endpoint needs a token, and there is none, or it is unknown.",
    403: "The token has another role; or a browser sent the request from another site's page.",
    404: "It does not exist; or no store is configured.",
    405: "The path has other methods.",
    406: f"The client does not accept {JSON}.",
    408: "The body did not come in within 20 s.",
    409: "The state of what is there does not allow it.",
    411: "The body has no Content-Length.",
    413: "The body is too large.",
    415: "The body is of another media type.",
    421: "The address is loopback, and the Host header is not.",
    422: "A field is wrong: errors has each. Or the Idempotency-Key belongs to another request.",
    500: "A bug; the daemon has logged it.",
    503: "The broker or the store did not do it, or is out of reach; or there are too many requests, or large bodies.",
}
_HEADERS: Final[Mapping[int, str]] = {401: "WWW-Authenticate", 503: "Retry-After"}


def document(paths: Mapping[str, Mapping[str, Endpoint]], most_bytes: Mapping[str, int]) -> dict[str, Any]:
    """Build the document. ``most_bytes``: the largest body of a path, if not MAX_BODY."""
    schemas: dict[str, Any] = {}
    found: dict[str, Any] = {}
    for path, methods in paths.items():
        operations = {
            method.lower(): _operation(endpoint, schemas, most_bytes.get(path, MAX_BODY))
            for method, endpoint in methods.items()
        }
        found[re.sub(r"\{(\w+):\w+\}", r"{\1}", path)] = operations
    problem = _schema(ProblemShape, schemas)
    statuses = sorted(
        {status for one in paths.values() for endpoint in one.values() for status in endpoint.all_problems}
    )
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "delayer",
            "version": __version__,
            "description": "Delayed messages for RabbitMQ. Instants and durations that end in _ms are milliseconds.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "paths": dict(sorted(found.items())),
        "components": {
            "schemas": dict(sorted(schemas.items())),
            "responses": {f"Problem{status}": _problem(status, problem) for status in statuses},
            "securitySchemes": {
                "token": {"type": "http", "scheme": "bearer", "description": "A token of [http] tokens_file."}
            },
        },
    }


def _operation(endpoint: Endpoint, schemas: dict[str, Any], most_bytes: int) -> dict[str, Any]:
    text = cleandoc(endpoint.handler.__doc__ or "")
    summary, _, rest = text.replace("\n", " ").partition(". ")
    needs = (
        f"Needs a token of the role {endpoint.role}." if endpoint.role else "Needs a token only where the page does."
    )
    operation: dict[str, Any] = {
        "operationId": endpoint.handler.__name__,
        "summary": summary.rstrip("."),
        "description": " ".join(filter(None, (rest, needs))),
        "security": [{"token": []}] if endpoint.role else [{"token": []}, {}],
        "parameters": [
            *_path_parameters(endpoint.path),
            *_query_parameters(endpoint.query, schemas),
            *_headers(endpoint),
        ],
    }
    if endpoint.body is not None:
        schema = _schema(endpoint.body, schemas)
        lines = {"type": "string", "description": "One such object on each line."}
        content = {kind: {"schema": lines if kind == LINES else schema} for kind in endpoint.media_types}
        most = f"At most {most_bytes} bytes."
        operation["requestBody"] = {"required": True, "description": most, "content": content}
    content = {JSON: {"schema": _schema(endpoint.result, schemas)}}
    done = {"description": HTTPStatus(endpoint.status).phrase, "content": content}
    refs = {str(status): {"$ref": f"#/components/responses/Problem{status}"} for status in endpoint.all_problems}
    operation["responses"] = {str(endpoint.status): done, **refs}
    return operation


def _problem(status: int, schema: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"description": _MEANINGS[status], "content": {MEDIA_TYPE: {"schema": schema}}}
    if status in _HEADERS:
        found["headers"] = {_HEADERS[status]: {"required": True, "schema": {"type": "string"}}}
    return found


def _schema(model: Any, schemas: dict[str, Any]) -> dict[str, Any]:
    """Put the schema among ``schemas``, with all those that it refers to, and return a reference."""
    made: dict[str, Any] = _tidy(TypeAdapter(model).json_schema(ref_template=_REFS))
    schemas.update(made.pop("$defs", {}))
    if "$ref" in made or "title" not in made:
        return made
    name = made.pop("title")
    schemas[name] = made
    return {"$ref": _REFS.format(model=name)}


def _tidy(schema: Any, inside: bool = False) -> Any:
    """Put descriptions on one line. Drop the defaults that stand for an absent field, and the titles that repeat a
    field's name."""
    if isinstance(schema, list):
        return [_tidy(one, inside) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for name, one in schema.items():
        if name == "properties" and isinstance(one, dict):
            found[name] = {key: _tidy(value, True) for key, value in one.items()}
        elif name == "description":
            found[name] = " ".join(one.split())
        elif not ((name == "default" and one is None) or (name == "title" and inside and isinstance(one, str))):
            found[name] = _tidy(one, inside and name != "$defs")
    return found


def _path_parameters(path: str) -> list[dict[str, Any]]:
    names = re.findall(r"\{(\w+)", path)
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}} for name in names
    ]


def _query_parameters(model: type[Fields], schemas: dict[str, Any]) -> list[dict[str, Any]]:
    schema = _tidy(model.model_json_schema(ref_template=_REFS))
    schemas.update(schema.pop("$defs", {}))
    found = []
    for name, one in schema.get("properties", {}).items():
        described = {"description": one.pop("description")} if "description" in one else {}
        required = name in schema.get("required", ())
        found.append({"name": name, "in": "query", "required": required, **described, "schema": one})
    return found


def _headers(endpoint: Endpoint) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "header", "required": False, "description": text, "schema": {"type": "string"}}
        for name, text in endpoint.headers
    ]
