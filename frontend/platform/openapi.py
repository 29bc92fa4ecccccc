"""The OpenAPI document of the management API, made of the table of its endpoints and the types of its answers. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import msgspec

from frontend.platform.documents import Document, ErrorDocument
from frontend.platform.http_calls import Endpoint
from frontend.version import own_version

OPENAPI: Final = "3.1.0"
REF: Final = "#/components/schemas/{name}"
ABOUT: Final = """\
Batch scheduling of routes, batches of workspaces, incidents and the audit log.

Send a key as `Authorization: Bearer KEY`. A browser session (cookie) may be used instead; calls that change something \
then need an `Origin` of the same host and the session's `X-CSRF-Token`.
"""
FAILURES: Final[dict[int, str]] = {
    400: "Something is wrong with the request; `param` names it where that is one thing. Nothing was changed.",
    401: "No key or session, or one that is not known (any more).",
    403: "The caller's role does not allow this.",
    404: "Nothing of that name, or none of the caller's business.",
    405: "The path has other methods; `Allow` lists them.",
    409: "The state does not allow it (any more). Nothing was changed.",
    412: "`If-Match` names another version than the one that is there. Nothing was changed.",
    413: "The body is too large.",
    415: "The body has an encoding; send it plain.",
    500: "A mistake of the gateway; its log says more.",
    503: "The store cannot be asked now; try again.",
}
ALWAYS: Final = (400, 401, 403, 405, 500, 503)
ETAG: Final[dict[str, Any]] = {
    "description": "Version of the settings; what else is in the answer has none.", "schema": {"type": "string"}
}  # fmt: skip
IF_MATCH: Final[dict[str, Any]] = {
    "name": "If-Match", "in": "header", "required": False, "schema": {"type": "string"},
    "description": "Replace only settings of this version: the `ETag` of an earlier answer.",
}  # fmt: skip


def openapi_document(endpoints: Iterable[Endpoint]) -> dict[str, Any]:
    """Return the whole document."""
    endpoints = list(endpoints)
    types: set[type[Document]] = {ErrorDocument}
    for endpoint in endpoints:
        types |= {endpoint.answer} if endpoint.body is None else {endpoint.answer, endpoint.body}
    _, schemas = msgspec.json.schema_components(sorted(types, key=lambda one: one.__name__), ref_template=REF)
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        item = paths.setdefault(endpoint.path, {})
        if parameters := _path_parameters(endpoint):
            item["parameters"] = parameters
        item[endpoint.method.lower()] = _operation(endpoint)
    return {
        "openapi": OPENAPI,
        "info": {"title": "ringserve management API", "version": own_version(), "description": ABOUT},
        "paths": paths,
        "components": {
            "schemas": {name: _prose(schema) for name, schema in schemas.items()},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
    }


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    fails = set(ALWAYS) | set(endpoint.fails)
    operation: dict[str, Any] = {
        "operationId": _operation_id(endpoint),
        "summary": endpoint.summary,
        "description": f"For {endpoint.who.roles}.",
        "responses": {
            "200": {"description": "Done.", "content": _json(endpoint.answer)},
            **{str(status): {"description": FAILURES[status], "content": _json(ErrorDocument)} for status in fails},
        },
    }
    if endpoint.query:
        operation["parameters"] = [
            {"name": field.name, "in": "query", "required": False, "description": field.about, "schema": field.schema}
            for field in endpoint.query
        ]
    if endpoint.version is not None:
        operation["responses"]["200"]["headers"] = {"ETag": ETAG}
        if endpoint.method == "PUT":
            operation["parameters"] = [*operation.get("parameters", ()), IF_MATCH]
    if endpoint.body is not None:
        operation["requestBody"] = {"required": True, "content": _json(endpoint.body)}
        for status in (413, 415):
            operation["responses"][str(status)] = {
                "description": FAILURES[status], "content": _json(ErrorDocument)
            }  # fmt: skip
    return operation


def _operation_id(endpoint: Endpoint) -> str:
    words = [part for part in endpoint.segments[2:] if not part.startswith("{")]
    given = "" if not endpoint.path.endswith("}") else "_one"
    return "_".join([endpoint.method.lower(), *words]).replace("-", "_") + given


def _path_parameters(endpoint: Endpoint) -> list[dict[str, Any]]:
    return [
        {"name": part[1:-1], "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for part in endpoint.segments
        if part.startswith("{")
    ]


def _json(of: type[Document]) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": REF.format(name=of.__name__)}}}


def _prose(schema: Any) -> Any:
    """Return the schema with the docstrings' marks as Markdown has them."""
    if isinstance(schema, dict):
        return {name: _prose(value) for name, value in schema.items()}
    if isinstance(schema, list):
        return [_prose(value) for value in schema]
    return schema.replace("``", "`") if isinstance(schema, str) else schema
