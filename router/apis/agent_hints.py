"""What an agent tells of its request beside the prompt: how long the answer gets, and whether the session goes on.

| header | field of the body | tells |
|---|---|---|
| `x-kvrouter-output-tokens` | `nvext.agent_hints.osl` | tokens that the answer is expected to have; 0 tells nothing |
| `x-kvrouter-next-call-ms` | | how long after the answer the session's next request comes: a tool runs meanwhile |
| `x-kvrouter-session-final`, `x-dynamo-session-final` | `nvext.session_control.action`, `"close"` | this is its last |

The fields and the last header are Dynamo's (`nvext.rs` and `docs/agents/` of July 2026). A `session_control` that does
not close says that more requests come. What headers tell goes before what the body does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from http_api.errors import RequestError
from router.apis.fields import kind_of
from router.http.headers import HeaderItems, number_of

_OUTPUT_HEADER: Final = b"x-kvrouter-output-tokens"
_NEXT_CALL_HEADER: Final = b"x-kvrouter-next-call-ms"
# The last of them that is there counts.
_FINAL_HEADERS: Final = (b"x-dynamo-session-final", b"x-kvrouter-session-final")
HINT_HEADERS: Final = frozenset({_OUTPUT_HEADER, _NEXT_CALL_HEADER, *_FINAL_HEADERS})

_MOST_TOKENS: Final = 2**31
_LONGEST_PAUSE: Final = 86400.0
_FLAGS: Final = {b"true": True, b"1": True, b"false": False, b"0": False}


@dataclass(frozen=True, slots=True)
class AgentHints:
    """What was told; None: nothing. `output_tokens`: expected of the answer. `next_call`: seconds from the answer to
    the session's next request. `final`: whether this is its last."""

    output_tokens: int | None = None
    next_call: float | None = None
    final: bool | None = None

    @property
    def returns(self) -> bool:
        """Whether the session was said to go on."""
        return not self.final and (self.final is False or self.next_call is not None)

    def before(self, others: AgentHints | None) -> AgentHints:
        """These, and of others what these do not tell."""
        if others is None:
            return self
        return AgentHints(
            others.output_tokens if self.output_tokens is None else self.output_tokens,
            others.next_call if self.next_call is None else self.next_call,
            others.final if self.final is None else self.final,
        )


def hints_in_headers(headers: HeaderItems) -> AgentHints | None:
    """What headers tell; None where they tell nothing. Raises RequestError (400) naming the one at fault."""
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
            raise _refused(_NEXT_CALL_HEADER, value, "milliseconds, a day at most")
        pause = milliseconds / 1000
    for name in _FINAL_HEADERS:
        if (value := given.get(name)) is not None:
            final = _FLAGS.get(value.lower())
            if final is None:
                raise _refused(name, value, "true or false")
    return AgentHints(output, pause, final)


def hints_in_body(nvext: Any) -> AgentHints | None:
    """What a body's `nvext` tells; None where that is nothing. Raises RequestError (400) naming the field at fault."""
    if not isinstance(nvext, dict):  # the worker's to judge
        return None
    hints, control = _object(nvext, "agent_hints"), _object(nvext, "session_control")
    output = final = None
    if (osl := hints.get("osl")) is not None:
        if type(osl) is not int or not 0 <= osl <= _MOST_TOKENS:
            raise RequestError(
                f"nvext.agent_hints.osl is {kind_of(osl)}. Send the number of tokens expected of the answer.",
                param="nvext.agent_hints.osl",
            )
        output = osl or None
    if control:
        action = control.get("action")
        if action not in (None, "open", "close"):
            raise RequestError(
                'nvext.session_control.action must be "open" or "close". Leave it out between these.',
                param="nvext.session_control.action",
            )
        final = action == "close"
    return None if output is None and final is None else AgentHints(output, None, final)


def session_in_body(nvext: Any) -> Any:
    """The session that a body's `nvext` names; None where it names none."""
    control = nvext.get("session_control") if isinstance(nvext, dict) else None
    return control.get("session_id") if isinstance(control, dict) else None


def _object(nvext: dict[str, Any], name: str) -> dict[str, Any]:
    value = nvext.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RequestError(f"nvext.{name} is {kind_of(value)}. Send an object.", param=f"nvext.{name}")
    return value


def _refused(name: bytes, value: bytes, wanted: str) -> RequestError:
    header = name.decode()
    return RequestError(f"{header} is {value.decode('latin-1')[:64]!r}. Send {wanted}, or leave it out.", param=header)
