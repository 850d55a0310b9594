"""The hints of an agent: the length of the answer, and whether the session continues.

- `x-kvrouter-output-tokens`, or `nvext.agent_hints.osl` in the body: expected tokens of the answer; 0 means unknown.
- `x-kvrouter-next-call-ms`: the time from the answer to the session's next request, while a tool runs.
- `x-kvrouter-session-final`, `x-dynamo-session-final`, or `"close"` in `nvext.session_control.action`: the last
  request.

The fields and the last header are Dynamo's (`nvext.rs` and `docs/agents/` of July 2026). A `session_control` without
`"close"` says that more requests follow. Headers take precedence over the body.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from http_api.errors import RequestError
from router.apis.fields import kind_of
from router.http.headers import HeaderItems, number_of

_OUTPUT_HEADER: Final = b"x-kvrouter-output-tokens"
_NEXT_CALL_HEADER: Final = b"x-kvrouter-next-call-ms"
# If both headers are present, the later one in this list counts.
_FINAL_HEADERS: Final = (b"x-dynamo-session-final", b"x-kvrouter-session-final")
HINT_HEADERS: Final = frozenset({_OUTPUT_HEADER, _NEXT_CALL_HEADER, *_FINAL_HEADERS})

_MOST_TOKENS: Final = 2**31
_LONGEST_PAUSE: Final = 86400.0
_FLAGS: Final = {b"true": True, b"1": True, b"false": False, b"0": False}


@dataclass(frozen=True, slots=True)
class AgentHints:
    """Statements of an agent about its request; None in a field means that it was not stated.

    - `output_tokens`: expected tokens of the answer.
    - `next_call`: seconds from the answer to the session's next request.
    - `final`: true for the session's last request.
    """

    output_tokens: int | None = None
    next_call: float | None = None
    final: bool | None = None

    @property
    def returns(self) -> bool:
        """True if the agent stated that the session continues."""
        return not self.final and (self.final is False or self.next_call is not None)

    def before(self, others: AgentHints | None) -> AgentHints:
        """Return these hints, with missing ones taken from `others`."""
        if others is None:
            return self
        return AgentHints(
            others.output_tokens if self.output_tokens is None else self.output_tokens,
            others.next_call if self.next_call is None else self.next_call,
            others.final if self.final is None else self.final,
        )


def hints_in_headers(headers: HeaderItems) -> AgentHints | None:
    """Return the hints of the headers, if there are any. Raises RequestError (400) that names the invalid header."""
    given = {name: value for name, value in headers if name in HINT_HEADERS}
    if not given:
        return None
    output = pause = final = None
    if (value := given.get(_OUTPUT_HEADER)) is not None:
        tokens = number_of(value)
        if tokens is None or tokens > _MOST_TOKENS or not tokens.is_integer():
            raise _refused(_OUTPUT_HEADER, value, "a number of tokens")
        output = int(tokens) or None
    if (value := given.get(_NEXT_CALL_HEADER)) is not None:
        milliseconds = number_of(value)
        if milliseconds is None or milliseconds > 1000 * _LONGEST_PAUSE:
            raise _refused(_NEXT_CALL_HEADER, value, "milliseconds, at most one day")
        pause = milliseconds / 1000
    for name in _FINAL_HEADERS:
        if (value := given.get(name)) is not None:
            final = _FLAGS.get(value.lower())
            if final is None:
                raise _refused(name, value, "true or false")
    return AgentHints(output, pause, final)


def hints_in_body(nvext: Any) -> AgentHints | None:
    """Return the hints of a body's `nvext`, if there are any. Raises RequestError (400) with the invalid field."""

    # The worker checks other types.
    if not isinstance(nvext, dict):
        return None
    hints, control = _object(nvext, "agent_hints"), _object(nvext, "session_control")
    output = final = None
    if (osl := hints.get("osl")) is not None:
        if type(osl) is not int or not 0 <= osl <= _MOST_TOKENS:
            raise RequestError(
                f"nvext.agent_hints.osl is {kind_of(osl)}. Send the expected number of tokens of the answer.",
                param="nvext.agent_hints.osl",
            )
        output = osl or None
    if control:
        action = control.get("action")
        if action not in (None, "open", "close"):
            raise RequestError(
                'nvext.session_control.action must be "open" or "close". Omit it for requests in between.',
                param="nvext.session_control.action",
            )
        final = action == "close"
    return None if output is None and final is None else AgentHints(output, None, final)


def _object(nvext: dict[str, Any], name: str) -> dict[str, Any]:
    value = nvext.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RequestError(f"nvext.{name} is {kind_of(value)}. Send an object.", param=f"nvext.{name}")
    return value


def _refused(name: bytes, value: bytes, wanted: str) -> RequestError:
    header = name.decode()
    return RequestError(
        f"{header} is {value.decode('latin-1')[:64]!r}. Send {wanted}, or omit the header.", param=header
    )
