"""One meaning for each JSON body, and a bound on the work it makes.

The router reads a body and an engine reads it again, with another parser. So a body is accepted only where no two
parsers differ: UTF-8 without a byte order mark, no name twice in an object, no NaN, no lone surrogate. What is accepted
goes on as the bytes that came.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from http_api.errors import RequestError
from indexer.cores import native_core
from router.apis.body_fields import NamedFields
from router.apis.endpoints import PROMPTED
from router.apis.fields import kind_of
from router.apis.json_edit import field, with_field, without_fields
from router.apis.strict_json import LONG, Outline, outline_of, strict_json
from router.auth.engine_fields import CARRIERS, FIELDS, refusal, steering_fields, stripped
from router.auth.forms import form_fields
from router.auth.routes import Route
from router.auth.tenants import ADAPTER, Tenant
from router.settings import EngineFields, LimitSettings

# One that does not end is one too: else it would be looked for its end from each quote in it.
_STRING: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
# A name, and a list or an object, take about as long to read as so many numbers.
_OF_A_NAME: Final = 4
_OF_A_LIST: Final = 8
# What UTF-8, 16 and 32 have before its first brace: spaces, NUL, a byte order mark.
_BEFORE_AN_OBJECT: Final = b" \t\r\n\0\xef\xbb\xbf\xff\xfe"
# Lists of prompts, and lists of messages.
_PROMPTS: Final = ("prompt", "text", "input_ids", "token_ids")
_MESSAGES: Final = ("messages", "input")


class BodyCheck:
    """Checks bodies within some limits.

    `named`: knows most JSON bodies for plain at a glance: nothing of them is refused or left out, and they have neither
    a priority nor an adapter. It leaves what routing by load reads of them. Without the native core it knows none.
    """

    def __init__(self, limits: LimitSettings) -> None:
        native = native_core()
        names, kept = [*FIELDS, *CARRIERS, "priority", ADAPTER], NamedFields.__struct_fields__
        elements = min(limits.prompts, limits.messages)
        self._limits = limits
        self.named: Callable[[bytes], bytes | None] = (
            _none_named if native is None else native.JsonCheck(names, kept, elements, limits.values, LONG).named
        )

    def checked(
        self, route: Route, content_type: bytes, body: bytes, tenant: Tenant | None, engine_fields: EngineFields
    ) -> tuple[bytes, bytes]:
        """The body to send on, and what to read of it where its prompt does not count. Raises RequestError (400, 413).

        It is the one that came, but for what a tenant may not say, and for what is to be stripped.
        """
        if not route.json:
            body = _checked_other(content_type, body, self._limits, engine_fields)
            return body, body
        named = self.named(body)
        if named is not None:
            return body if tenant is None else tenant.isolated(route.path, body), named
        fields = read_object(body, self._limits.values)
        if engine_fields is not EngineFields.PASS and (steering := steering_fields(fields)):
            if engine_fields is EngineFields.REFUSE:
                raise refusal(steering[0])
            body = _without(body, fields, steering)
        if route.path in PROMPTED:
            check_amounts(fields, self._limits)
        if tenant is not None:
            tenant.check_adapter(fields.get(ADAPTER))
            body = tenant.with_priority(tenant.isolated(route.path, body), fields.get("priority"))
        return body, body

    def seems_little(self, body: bytes) -> bool:
        """Whether a glance at a JSON body tells that `check_amount` has nothing to say of it."""
        if len(body) <= LONG:
            return True
        names, lists = body.count(b":"), body.count(b"[") + body.count(b"{")
        most = len(body) - names - lists  # commas
        return most + _OF_A_NAME * names + _OF_A_LIST * lists <= self._limits.values

    def check_amount(self, body: bytes) -> None:
        """Refuse a JSON body of too many values: RequestError (413). What is no JSON is refused by who reads it.

        That takes milliseconds for a long one.
        """
        with suppress(ValueError):
            _bounded_outline(body, self._limits.values)


def _none_named(_: bytes) -> bytes | None:
    return None


def read_object(body: bytes, most_values: int) -> dict[str, Any]:
    """The JSON object that a body is to every parser; of a long one the strings may be empty, but for names.

    Raises RequestError (400, 413) when there is none, or one of too many values.
    """
    try:
        outline = _bounded_outline(body, most_values)
        fields = strict_json(body if outline is None else outline.text)
    except ValueError as error:
        raise RequestError(f"The body is not JSON: {error}. Send one JSON object, in UTF-8.") from error
    if not isinstance(fields, dict):
        raise RequestError(f"The body is {kind_of(fields)}. Send one JSON object.")
    return fields


def _bounded_outline(body: bytes, most_values: int) -> Outline | None:
    """The outline of a long body, where there is one. Raises RequestError (413), ValueError as `outline_of` does."""
    outline = outline_of(body, most_values)
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
    """How many values a body has at most, a name, a list or an object as several; what strings hold counts only where
    it is not clear that there are few enough."""
    values = _marks(body)
    return values if values <= enough else _marks(_STRING.sub(b"", body))


def _marks(body: bytes) -> int:
    return body.count(b",") + _OF_A_NAME * body.count(b":") + _OF_A_LIST * (body.count(b"[") + body.count(b"{"))


def check_amounts(fields: dict[str, Any], limits: LimitSettings) -> None:
    """Refuse the body of a request with too many prompts or messages. Raises RequestError (413)."""
    for names, kinds, most, setting in (
        (_PROMPTS, (str, list), limits.prompts, "limits.prompts"),
        (_MESSAGES, (dict,), limits.messages, "limits.messages"),
    ):
        for name in names:
            value = fields.get(name)
            if isinstance(value, list) and len(value) > most and isinstance(value[0], kinds):
                raise RequestError(
                    f"{name} has {len(value)} of them. Send at most {most}, or raise {setting}.",
                    status=413,
                    param=name,
                    code="too_much_work",
                )


def _without(body: bytes, fields: dict[str, Any], steering: list[str]) -> bytes:
    kept = {name for name in fields if name not in FIELDS}
    body = without_fields(body, fields.keys() - kept)
    for name in {path.partition(".")[0] for path in steering} & kept:
        inside = stripped({name: strict_json(field(body, name) or b"null")})
        body = with_field(body, name, json.dumps(inside[name], ensure_ascii=False).encode())
    return body


def _checked_other(content_type: bytes, body: bytes, limits: LimitSettings, engine_fields: EngineFields) -> bytes:
    """A body that need not be JSON: a form, a file, or what an engine alone understands."""
    if engine_fields is EngineFields.PASS or not body:
        return body
    if (fields := form_fields(content_type, body, CARRIERS)) is not None:
        for name, value in fields:
            if name in FIELDS:
                raise refusal(name)
            if name in CARRIERS and _seems_object(value) and steering_fields({name: read_object(value, limits.values)}):
                raise refusal(name)
    if _seems_object(body):  # whatever it is called: not every engine looks
        read = read_object(body, limits.values)
        if steering := steering_fields(read):
            if engine_fields is EngineFields.REFUSE:
                raise refusal(steering[0])
            return _without(body, read, steering)
    return body


def _seems_object(body: bytes) -> bool:
    """Whether some decoder might read a JSON object: engines' take any UTF, whatever the content's type."""
    return body.lstrip(_BEFORE_AN_OBJECT)[:1] == b"{"
