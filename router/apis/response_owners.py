"""Owners of stored objects: which worker created a response, conversation, file or batch.

Only its creator can answer requests about a stored object. Ids are found in the first bytes of responses by the
prefixes that OpenAI and engines give them. The latest ids are kept.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import msgspec

from kvevents.decoding import read_json

MAX_RESPONSES = 65536
# The first bytes of a response that are searched: the id is among the first fields.
SEARCHED_BYTES = 4096

_KINDS = ("files", "batches", "uploads", "videos", "conversations", "vector_stores")
_PATHS = re.compile(rf"/v1/(?:responses|{'|'.join(_KINDS)})(?:/([^/]+))?(?:/.*)?")
# What follows /v1/responses/ and is no id.
_OPERATIONS = frozenset({"compact", "input_tokens", "render"})
_ID = re.compile(
    rb'"(?:id|output_file_id|error_file_id)"\s*:\s*'
    rb'"((?:resp|conv|file|batch|upload|video|vs)[_-][^"\\]{1,200})"'
)


class _Stored(msgspec.Struct):
    store: Any = True
    background: Any = None


def asks_to_store(body: bytes) -> bool:
    """Return whether the worker may store this response, or create it in the background."""
    try:
        fields = read_json(body, _Stored)
    except msgspec.DecodeError:
        return True
    return fields.store is not False or bool(fields.background)


def is_about_stored(path: str) -> bool:
    """Return whether requests to a path create or read stored objects."""
    return _PATHS.fullmatch(path) is not None


def stored_in_path(path: str) -> str | None:
    """Return the id of the stored object in a path such as `/v1/responses/{id}`; None without one."""
    found = _PATHS.fullmatch(path)
    return found.group(1) if found is not None and found.group(1) not in _OPERATIONS else None


class StoredFields(msgspec.Struct):
    """The fields of a body that name a stored object."""

    previous_response_id: Any = None
    conversation: Any = None
    input_file_id: Any = None
    file_id: Any = None

    def stored_id(self) -> str | None:
        """Return the id of the stored object that the fields name; None if they name none."""
        conversation = self.conversation.get("id") if isinstance(self.conversation, dict) else self.conversation
        for name in (self.previous_response_id, conversation, self.input_file_id, self.file_id):
            if isinstance(name, str) and name:
                return name
        return None


class ResponseOwners:
    """The URLs of the workers that created the latest stored objects. `on_learned` receives new ids with their URL."""

    def __init__(self, most: int = MAX_RESPONSES) -> None:
        self.on_learned: list[Callable[[str, str], None]] = []
        self._most = most
        self._owners: OrderedDict[str, str] = OrderedDict()

    def learn(self, beginning: bytes, worker: str) -> bool:
        """Register the ids in the first bytes of a response. Return whether there were any."""
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
        """Register a worker as the owner of a stored object."""
        self._owners[response] = worker
        self._owners.move_to_end(response)
        if len(self._owners) > self._most:
            self._owners.popitem(last=False)

    def get(self, response: str) -> str | None:
        """Return the URL of the worker that created an object; None if it is unknown."""
        return self._owners.get(response)

    def __len__(self) -> int:
        return len(self._owners)
