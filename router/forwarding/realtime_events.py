"""Models that a client's events of `/v1/realtime` name: `session.update` may change the model of a session.

vLLM reads `model` of the event itself, OpenAI's format has it in `session` and in the transcription inside it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

from router.auth.bodies import read_object

# A name of a model can be written in these ways only: plainly, or with escapes.
_MARKS: Final = (b'"model"', b"\\u")
# Members whose content is the client's own: JSON schemas and messages.
_CONTENT: Final = frozenset({"tools", "item"})
# Values of an event that names a model. Its tools are among them.
_MOST_VALUES: Final = 10_000


def with_served_models(event: bytes, served: Callable[[str], str]) -> bytes:
    """Return an event with the name that `served` returns in place of each model's name.

    Raises RequestError for an event that readers could read in two ways, and what `served` raises.
    """
    if not any(mark in event for mark in _MARKS) or not event.lstrip(b" \t\r\n").startswith(b"{"):
        return event
    fields = read_object(event, _MOST_VALUES)
    if not _replaced(fields, served):
        return event
    return json.dumps(fields, ensure_ascii=False).encode()


def _replaced(fields: dict[str, Any], served: Callable[[str], str]) -> bool:
    changed = False
    for name, value in fields.items():
        if name == "model" and isinstance(value, str):
            fields[name] = model = served(value)
            changed |= model != value
        elif isinstance(value, dict) and name not in _CONTENT:
            changed |= _replaced(value, served)
    return changed
