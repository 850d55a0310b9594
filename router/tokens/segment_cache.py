"""The token ids of pieces of text that were seen before, within a bound of memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from threading import Lock

# What an entry takes beside its text and its tokens: the objects themselves, and their share of the table.
_ENTRY_BYTES = 250


class SegmentCache:
    """Packed token ids by text, the least recently used forgotten first. Any number of threads may use one."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._known: OrderedDict[str, bytes] = OrderedDict()
        self._lock = Lock()
        self.bytes = 0

    def get(self, texts: Iterable[str]) -> tuple[dict[str, bytes], list[str]]:
        """The packed token ids of the texts that are known, and the texts that are not, each once."""
        found: dict[str, bytes] = {}
        missing: dict[str, None] = {}
        get, move_to_end = self._known.get, self._known.move_to_end
        with self._lock:
            for text in texts:
                token_ids = get(text)
                if token_ids is None:
                    missing[text] = None
                else:
                    found[text] = token_ids
                    move_to_end(text)
        return found, list(missing)

    def put(self, new: Mapping[str, bytes]) -> None:
        """Remember texts, as far as there is room for them."""
        with self._lock:
            for text, token_ids in new.items():
                size = _size(text, token_ids)
                if text in self._known or size > self._limit:
                    continue
                self._known[text] = token_ids
                self.bytes += size
            while self.bytes > self._limit:
                self.bytes -= _size(*self._known.popitem(last=False))

    def __len__(self) -> int:
        """The number of texts."""
        return len(self._known)


def _size(text: str, token_ids: bytes) -> int:
    # Python keeps other than ASCII in up to 4 bytes a character, and in UTF-8 beside that once it was tokenized.
    return len(text) * (1 if text.isascii() else 8) + len(token_ids) + _ENTRY_BYTES
