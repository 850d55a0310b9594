"""Aliases of models: a request for one is sent on with the name that workers serve."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from router.apis.body_fields import NamedFields
from router.apis.json_edit import SpliceError, with_field
from router.apis.multipart import boundary_of, form_field, with_form_field

_decode = msgspec.json.Decoder(NamedFields).decode


def with_served_model(body: bytes, aliases: Mapping[str, str]) -> bytes:
    """A body that names the model behind its alias: one JSON object, or a form. Any other stays as it is."""
    if (content_type := boundary_of(body)) is not None:
        model = aliases.get(form_field(content_type, body, "model") or "")
        return body if model is None else with_form_field(content_type, body, "model", model)
    try:
        asked = _decode(body).model
        model = aliases.get(asked) if isinstance(asked, str) else None
        return body if model is None else with_field(body, "model", msgspec.json.encode(model))
    except (msgspec.DecodeError, UnicodeError, RecursionError, SpliceError):
        return body  # it may carry anything
