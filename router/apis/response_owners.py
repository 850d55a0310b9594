"""Which worker made what it alone has: responses, conversations, files, batches. Requests about one find it there.

Its id is read from the first bytes of an answer, and known by how OpenAI and engines begin such ids; the latest ones
are remembered.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import msgspec

MAX_RESPONSES = 65536
# How much of an answer is searched: the id is among the first fields.
SEARCHED_BYTES = 4096

_KINDS = ("files", "batches", "uploads", "videos", "conversations", "vector_stores")
_PATHS = re.compile(rf"/v1/(?:responses|{'|'.join(_KINDS)})(?:/([^/]+))?(?:/.*)?")
_ID = re.compile(
    rb'"(?:id|output_file_id|error_file_id)"\s*:\s*'
    rb'"((?:resp|conv|file|batch|upload|video|vs)[_-][^"\\]{1,200})"'
)


class _Stored(msgspec.Struct):
    store: Any = True
    background: Any = None


def asks_to_store(body: bytes) -> bool:
    """Whether a worker that makes this response may keep it, and perhaps make it although nobody waits."""
    try:
        fields = msgspec.json.decode(body, type=_Stored)
    except msgspec.DecodeError:
        return True
    return fields.store is not False or bool(fields.background)


def is_about_stored(path: str) -> bool:
    """Whether requests to a path make or read what one worker alone has."""
    return _PATHS.fullmatch(path) is not None


def stored_in_path(path: str) -> str | None:
    """The response, file or the like that a path is about: `/v1/responses/{id}`, and what can be done with it."""
    found = _PATHS.fullmatch(path)
    return found.group(1) if found is not None else None


class StoredFields(msgspec.Struct):
    """The fields of a body that name what one worker alone has."""

    previous_response_id: Any = None
    conversation: Any = None
    input_file_id: Any = None
    file_id: Any = None

    def named(self) -> str | None:
        """What they name, if anything."""
        conversation = self.conversation.get("id") if isinstance(self.conversation, dict) else self.conversation
        for name in (self.previous_response_id, conversation, self.input_file_id, self.file_id):
            if isinstance(name, str) and name:
                return name
        return None


class ResponseOwners:
    """The workers of the latest responses and other stored things, by URL. `on_learned` is told of each that was read
    from an answer."""

    def __init__(self, most: int = MAX_RESPONSES) -> None:
        self.on_learned: list[Callable[[str, str], None]] = []
        self._most = most
        self._owners: OrderedDict[str, str] = OrderedDict()

    def learn(self, beginning: bytes, worker: str) -> bool:
        """Remember what an answer, or its first event, begins with. Whether there was anything."""
        found = False
        for match in _ID.finditer(beginning, 0, SEARCHED_BYTES):
            found = True
            stored = match.group(1).decode(errors="replace")
            known = self._owners.get(stored) == worker
            self.remember(stored, worker)
            for learned in () if known else self.on_learned:
                learned(stored, worker)
        return found

    def remember(self, response: str, worker: str) -> None:
        """A worker made a response."""
        self._owners[response] = worker
        self._owners.move_to_end(response)
        if len(self._owners) > self._most:
            self._owners.popitem(last=False)

    def of(self, response: str) -> str | None:
        """The URL of the worker that made a response."""
        return self._owners.get(response)

    def __len__(self) -> int:
        return len(self._owners)
