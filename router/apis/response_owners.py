"""Which worker made which response, so that a request that goes on from one finds it there.

Only its worker has a response. Its id is read from the first bytes of the answer; the latest ones are remembered.
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

_ID = re.compile(rb'"id"\s*:\s*"(resp_[^"\\]{1,200})"')


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


class ResponseOwners:
    """The workers of the latest responses, by URL. `on_learned` is told of each that was read from an answer."""

    def __init__(self, most: int = MAX_RESPONSES) -> None:
        self.on_learned: list[Callable[[str, str], None]] = []
        self._most = most
        self._owners: OrderedDict[str, str] = OrderedDict()

    def learn(self, beginning: bytes, worker: str) -> bool:
        """Remember the response that an answer, or its first event, begins with. Whether there was one."""
        found = _ID.search(beginning, 0, SEARCHED_BYTES)
        if found is None:
            return False
        response = found.group(1).decode(errors="replace")
        self.remember(response, worker)
        for learned in self.on_learned:
            learned(response, worker)
        return True

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
