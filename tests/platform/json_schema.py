"""The part of JSON Schema that the API's document uses, checked by hand: what makes the document must not check it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,), "array": (list,), "string": (str,), "boolean": (bool,), "null": (type(None),),
    "integer": (int,), "number": (int, float),
}  # fmt: skip
KNOWN = frozenset(
    {
        "$ref", "anyOf", "type", "enum", "const", "properties", "required", "additionalProperties", "items", "minItems",
        "maxItems", "uniqueItems", "minLength", "maxLength", "pattern", "minimum", "maximum", "format", "title",
        "description", "default",
    }
)  # fmt: skip


def faults(value: Any, schema: Mapping[str, Any], document: Mapping[str, Any], at: str = "") -> Iterator[str]:
    """Yield what of a value breaks a schema."""
    assert set(schema) <= KNOWN, f"this checker does not know {set(schema) - KNOWN}"
    if "$ref" in schema:
        yield from faults(value, document["components"]["schemas"][schema["$ref"].rpartition("/")[2]], document, at)
        return
    if "anyOf" in schema:
        if all(any(faults(value, one, document, at)) for one in schema["anyOf"]):
            yield f"{at}: {value!r} is none of {schema['anyOf']}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{at}: {value!r} is not one of {schema['enum']}"
    if "type" in schema and (
        not isinstance(value, _TYPES[schema["type"]]) or (isinstance(value, bool) and schema["type"] != "boolean")
    ):
        yield f"{at}: {value!r} is no {schema['type']}"
        return
    if isinstance(value, dict):
        yield from _object(value, schema, document, at)
    elif isinstance(value, list):
        for number, one in enumerate(value):
            yield from faults(one, schema.get("items", {}), document, f"{at}[{number}]")
    elif isinstance(value, str):
        if "pattern" in schema and not re.search(schema["pattern"], value):
            yield f"{at}: {value!r} does not match {schema['pattern']}"
        if schema.get("format") == "date-time":
            datetime.strptime(value, "%Y-%m-%dT%H:%M:%SZ")
    elif isinstance(value, int | float) and not schema.get("minimum", value) <= value <= schema.get("maximum", value):
        yield f"{at}: {value} is out of range"


def _object(
    value: Mapping[str, Any], schema: Mapping[str, Any], document: Mapping[str, Any], at: str
) -> Iterator[str]:  # fmt: skip
    properties = schema.get("properties", {})
    yield from (f"{at}: {name} is missing" for name in schema.get("required", ()) if name not in value)
    for name, one in value.items():
        if name in properties:
            yield from faults(one, properties[name], document, f"{at}.{name}")
            continue
        rest = schema.get("additionalProperties", {})
        if properties:
            # Told more than the document says: nobody could rely on it, or know that it is there.
            yield f"{at}: {name} is not in the document"
        elif rest is not False and isinstance(rest, dict):
            yield from faults(one, rest, document, f"{at}.{name}")
