"""What the OpenAPI document says of bodies that are decoded by hand, and of errors."""

from __future__ import annotations

from typing import Any

import msgspec

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def json_body(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """`openapi_extra` of a route whose body is this struct, which refers to no other."""
    schema = msgspec.json.schema(kind)["$defs"][kind.__name__]
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """`responses` of a route: the errors it answers with, in OpenAI's body."""
    described = {
        400: "The body is not as described.",
        401: "The token is missing or wrong.",
        404: "Nothing of this name is known.",
        503: "No worker can be reached.",
    }
    return {
        status: {"description": described[status], "content": {"application/json": {"schema": _ERROR}}}
        for status in statuses
    }
