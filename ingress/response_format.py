"""`response_format`: the form is checked here; only an engine can tell whether a schema can be compiled."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ingress.errors import invalid, missing
from ingress.parse import convert_at

SchemaName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class JsonSchema(msgspec.Struct, frozen=True, kw_only=True):
    """`json_schema` of a `response_format`."""

    name: SchemaName
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


def response_format(form: dict[str, Any] | None) -> dict[str, Any] | None:
    """The form that holds, or None for text. ApiError 400 for one that there isn't."""
    kind = "text" if form is None else form.get("type")
    if form is None or kind == "text":
        return None
    if kind == "json_object":
        return {"type": "json_object"}
    if kind != "json_schema":
        raise invalid(
            "response_format.type", "Invalid value for 'response_format.type': use text, json_object or json_schema."
        )
    if form.get("json_schema") is None:
        raise missing("response_format.json_schema")
    described = convert_at("response_format.json_schema", form["json_schema"], JsonSchema)
    if described.schema is None:
        raise missing("response_format.json_schema.schema")
    return {
        "type": "json_schema",
        "json_schema": {"name": described.name, "schema": described.schema, "strict": bool(described.strict)},
    }
