"""Keys of a pool's objects: the engine hash in a key, and which part of the block the object is.

The form of keys is not known in advance. The longest run of hexadecimal digits in a key is the block's hash, and the
rest names the part: the model, ranks, cache group, keys or values.
"""

from __future__ import annotations

import re
from typing import Final

from xxhash import xxh32_intdigest

from indexer.pools.blocks import MOST_PARTS, Change

# The digits of a hash are at least 16, and no letter or digit is beside them.
_HASH: Final = re.compile(r"(?<![0-9A-Za-z])[0-9a-f]{16,}(?![0-9A-Za-z])")


class ObjectKeys:
    """The forms of a pool's keys that were seen so far, in the order of their part numbers.

    - `leading`: whether the engine's events have the first 64 bits of a hash (SGLang), and not the last (vLLM).
    - `forms`: the text around the hash, by part.
    - `refused`: whether there are more forms than parts, so that some objects are unknown.
    """

    def __init__(self, leading: bool = False) -> None:
        self.leading = leading
        self.forms: list[str] = []
        self.refused = False
        self._parts: dict[str, int] = {}

    def change(self, key: str, on_disk: bool, stored: bool) -> Change | None:
        """Return the change of an object that is stored or removed; None if its key has no hash."""
        found = max(_HASH.finditer(key), key=lambda match: match.end() - match.start(), default=None)
        if found is None:
            return None
        start, end = found.span()
        part = self._part(f"{key[:start]}*{key[end:]}")
        if part is None:
            return None
        digits = key[start:end]
        name = int(digits[:16] if self.leading else digits[-16:], 16)
        return Change(name, xxh32_intdigest(digits.encode()), part, on_disk, stored)

    def parts_with(self, text: str) -> int:
        """Return the parts whose keys contain a text, one bit each."""
        return sum(1 << part for part, form in enumerate(self.forms) if text in form)

    def _part(self, form: str) -> int | None:
        part = self._parts.get(form)
        if part is None:
            if len(self.forms) >= MOST_PARTS:
                self.refused = True
                return None
            part = self._parts[form] = len(self.forms)
            self.forms.append(form)
        return part
