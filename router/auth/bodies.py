"""Checks of request bodies: one meaning for each JSON body, limits on its work, model aliases.

The router parses a body and an engine parses it again, with another parser. So a body is accepted only if parsers
cannot differ: no duplicate names, no NaN, no lone surrogates. An accepted body in UTF-8 is forwarded byte for byte.
vLLM and SGLang also read a byte order mark, UTF-16 and UTF-32, as Python's `json.loads` does. These bodies are
forwarded in UTF-8, because other parsers refuse them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final

import msgspec

from http_api.errors import RequestError
from indexer.native import native_core
from router.apis.body_fields import AllMediaFields, GenerationFields, ModelFields
from router.apis.endpoints import CHAT, PROMPTED
from router.apis.fields import kind_of
from router.apis.forms import boundary_of, form_field, form_fields, with_form_field
from router.apis.json_edit import (
    LONG,
    Outline,
    SpliceError,
    field,
    read_outline,
    strict_json,
    with_field,
    without_fields,
)
from router.apis.media_parts import media_items
from router.apis.requests import UsualChat
from router.auth.engine_fields import (
    CARRIERS,
    CONTROL_FIELDS,
    PROMPT_IDS_PATHS,
    control_fields,
    control_names,
    refusal,
    without_control_fields,
)
from router.auth.routes import Route
from router.auth.tenants import ADAPTER, NAMES_OF_CACHED, Tenant
from router.settings import EngineFields, LimitSettings, ServerSettings

# An unterminated string matches too. Otherwise the search would start again at each quote inside it.
_STRING: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
# The cost of parsing a name, and a list or an object, in numbers that take as long to parse.
_OF_A_NAME: Final = 4
_OF_A_LIST: Final = 8
_OF_USUAL: Final = ("model", "messages", "stream", "max_tokens", "max_completion_tokens")
# Bytes that can precede the first brace in UTF-8, 16 and 32: spaces, NUL, a byte order mark.
_BEFORE_AN_OBJECT: Final = b" \t\r\n\0\xef\xbb\xbf\xff\xfe"
# Top-level fields that a usual chat does not have: they change its prompt or its placement, or can have media.
_UNUSUAL: Final = sorted({*GenerationFields.__struct_fields__, *AllMediaFields.__struct_fields__} - set(_OF_USUAL))
# Fields with lists of prompts, and fields with lists of messages.
_PROMPTS: Final = ("prompt", "text", "input_ids", "token_ids")
_MESSAGES: Final = ("messages", "input")


class BodyCheck:
    """Checks of bodies against the limits.

    `model_body` and `usual_chat` are quick for most: bodies with nothing to refuse or strip.
    """

    def __init__(self, limits: LimitSettings) -> None:
        self._limits = limits
        self.model_body, self.usual_chat = _quick_checks("", limits)
        self._generate_body, _ = _quick_checks("/generate", limits)

    def checked(
        self,
        route: Route,
        content_type: bytes,
        body: bytes,
        tenant: Tenant | None,
        engine_fields: EngineFields,
        reads_chat: bool = False,
    ) -> tuple[bytes, bytes | UsualChat]:
        """Return the body to forward, with limits and without stripped fields, and what the check has read of it.

        This is a usual chat if `reads_chat`, and else the part for routing by load. Raises RequestError (400, 413).
        """
        if not route.json:
            body = _checked_other(content_type, body, self._limits, engine_fields)
            return body, body
        if reads_chat and route.path == CHAT:
            chat = self.usual_chat(body)
            if isinstance(chat, tuple):  # it has no media
                sent = body if tenant is None else tenant.with_tenant_salt(route.path, body)
                return sent, chat if sent is body else sent
            model_body = chat
        else:
            model_body = (self._generate_body if route.path in PROMPT_IDS_PATHS else self.model_body)(body)
        if model_body is None and (plain := in_utf8(body)) is not body:
            return self.checked(route, content_type, plain, tenant, engine_fields)
        if model_body is not None:
            check_media(body, self._limits)
            return body if tenant is None else tenant.with_tenant_salt(route.path, body), model_body
        fields = read_object(body, self._limits.values)
        if engine_fields is not EngineFields.PASS and (steering := control_fields(fields, control_names(route.path))):
            if engine_fields is EngineFields.REFUSE:
                raise refusal(steering[0])
            body = _without(body, steering)
        if route.path in PROMPTED:
            check_amounts(fields, self._limits)
        check_media(body, self._limits)
        if tenant is not None:
            tenant.check_adapter(fields.get(ADAPTER))
            tenant.check_names(fields)
            body = tenant.with_priority(tenant.with_tenant_salt(route.path, body), fields.get("priority"))
        return body, body

    def clearly_within_limits(self, body: bytes) -> bool:
        """Return whether a quick count shows that `check_amount` accepts a JSON body."""
        if len(body) <= LONG:
            return True
        names, lists = body.count(b":"), body.count(b"[") + body.count(b"{")
        most = len(body) - names - lists  # commas
        return most + _OF_A_NAME * names + _OF_A_LIST * lists <= self._limits.values

    def check_amount(self, body: bytes) -> None:
        """Raise RequestError (413) for a JSON body with too many values. A long body takes milliseconds."""
        with suppress(ValueError):
            _bounded_outline(body, self._limits.values)


def _quick_checks(
    path: str, limits: LimitSettings
) -> tuple[Callable[[bytes], bytes | None], Callable[[bytes], bytes | UsualChat | None]]:
    """Return two checks that answer None for a body of this path that may have something to refuse or strip.

    The first one returns the part for routing by load, the second one also a usual chat.
    """
    native = native_core()
    if native is None:
        return _no_model_body, _no_model_body
    names = [*control_names(path), *CARRIERS, "priority", ADAPTER, *NAMES_OF_CACHED]
    kept = ModelFields.__struct_fields__
    elements = min(limits.prompts, limits.messages)
    check = native.JsonCheck(names, kept, elements, limits.values, LONG, _UNUSUAL)
    return check.named, check.chat


def _no_model_body(_: bytes) -> bytes | None:
    return None


def in_utf8(body: bytes) -> bytes:
    """Return a JSON body in UTF-8 without a byte order mark: the same object if it is already. Raises RequestError."""
    encoding = json.detect_encoding(body)
    if encoding == "utf-8":
        return body
    try:
        return body.decode(encoding).encode()
    except UnicodeDecodeError as error:
        raise RequestError(f"The body is not {encoding}: {error.reason}. Send one JSON object, in UTF-8.") from error


def read_object(body: bytes, most_values: int) -> dict[str, Any]:
    """Parse a JSON object, a long one without its strings. Raises RequestError (400, 413) for another body."""
    try:
        outline = _bounded_outline(body, most_values)
        fields = strict_json(body if outline is None else outline.text)
    except ValueError as error:
        raise RequestError(f"The body is not JSON: {error}. Send one JSON object, in UTF-8.") from error
    if not isinstance(fields, dict):
        raise RequestError(f"The body is {kind_of(fields)}. Send one JSON object.")
    return fields


def _bounded_outline(body: bytes, most_values: int) -> Outline | None:
    """Return the outline of a long body, if there is one. Raises RequestError (413), and ValueError."""
    outline = read_outline(body, most_values)
    if len(body) > LONG:
        values = _values_in(body, most_values) if outline is None else outline.values
        if values > most_values:
            raise RequestError(
                f"The body has more than {most_values} values. Send fewer, or raise limits.values.",
                status=413,
                code="too_much_work",
            )
    return outline


def _values_in(body: bytes, enough: int) -> int:
    """Return an upper bound of the number of a body's values. It is exact enough to compare with `enough`."""
    values = _marks(body)
    return values if values <= enough else _marks(_STRING.sub(b"", body))


def _marks(body: bytes) -> int:
    return body.count(b",") + _OF_A_NAME * body.count(b":") + _OF_A_LIST * (body.count(b"[") + body.count(b"{"))


def check_amounts(fields: dict[str, Any], limits: LimitSettings) -> None:
    """Raise RequestError (413) for a body with too many prompts or messages."""
    for names, kinds, most, setting in (
        (_PROMPTS, (str, list), limits.prompts, "limits.prompts"),
        (_MESSAGES, (dict,), limits.messages, "limits.messages"),
    ):
        for name in names:
            value = fields.get(name)
            if isinstance(value, list) and len(value) > most and isinstance(value[0], kinds):
                raise RequestError(
                    f"{name} has {len(value)} items. Send at most {most}, or raise {setting}.",
                    status=413,
                    param=name,
                    code="too_much_work",
                )


def check_media(body: bytes, limits: LimitSettings) -> None:
    """Raise RequestError (400) for a JSON body with too many media items."""
    found = media_items(body, limits.media_items)
    if found > limits.media_items:
        raise RequestError(
            f"The request has {found} images, audio and video. Send at most {limits.media_items}, or raise "
            "limits.media_items.",
            code="too_many_media",
        )


def _without(body: bytes, steering: list[str]) -> bytes:
    """Return the body without the engine control fields at these paths."""
    body = without_fields(body, {path for path in steering if "." not in path})
    for name in {path.partition(".")[0] for path in steering if "." in path}:
        inside = without_control_fields(strict_json(field(body, name) or b"null"))
        body = with_field(body, name, json.dumps(inside, ensure_ascii=False).encode())
    return body


def _checked_other(content_type: bytes, body: bytes, limits: LimitSettings, engine_fields: EngineFields) -> bytes:
    """Return a checked body that need not be JSON: a form, a file, or a format that only the engine knows."""
    if engine_fields is EngineFields.PASS or not body:
        return body
    if (fields := form_fields(content_type, body, CARRIERS)) is not None:
        for name, value in fields:
            if name in CONTROL_FIELDS:
                raise refusal(name)
            if name in CARRIERS and _seems_object(value) and control_fields({name: read_object(value, limits.values)}):
                raise refusal(name)
    if _seems_object(body):  # whatever its content type, which some engines ignore
        read = read_object(body, limits.values)
        if steering := control_fields(read):
            if engine_fields is EngineFields.REFUSE:
                raise refusal(steering[0])
            return _without(body, steering)
    return body


def _seems_object(body: bytes) -> bool:
    """Return whether an engine might decode a JSON object, in any UTF, whatever the content type."""
    return body.lstrip(_BEFORE_AN_OBJECT)[:1] == b"{"


_decode_named = msgspec.json.Decoder(ModelFields).decode


def with_served_model(body: bytes, aliases: Mapping[str, str]) -> bytes:
    """Return a JSON or form body with its model's alias replaced by the served name; any other body unchanged."""
    if (content_type := boundary_of(body)) is not None:
        model = aliases.get(form_field(content_type, body, "model") or "")
        return body if model is None else with_form_field(content_type, body, "model", model)
    try:
        asked = _decode_named(body).model
        model = aliases.get(asked) if isinstance(asked, str) else None
        return body if model is None else with_field(body, "model", msgspec.json.encode(model))
    except (msgspec.DecodeError, UnicodeError, RecursionError, SpliceError):
        return body  # the body can have any format


def too_large(settings: ServerSettings) -> RequestError:
    """Return the error for a body that exceeds the size limit."""
    return RequestError(
        f"The body is larger than {settings.max_body_bytes} bytes. Send less, or raise server.max_body_bytes.",
        status=413,
    )


def too_slow(settings: ServerSettings) -> RequestError:
    """Return the error for a body that is not received in time."""
    return RequestError(
        f"The body was not received within {settings.body_timeout} s. Send it faster, or raise server.body_timeout.",
        status=408,
        type="timeout_error",
    )
