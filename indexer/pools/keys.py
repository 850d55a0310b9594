"""Keys of a pool's objects: the engine hash in a key, and which part of the block the object is.

The form of keys is not known in advance. The longest run of hexadecimal digits in a key is the block's hash, and the
rest names the part: the model, ranks, cache group, keys or values.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from indexer.pools.blocks import MOST_PARTS, REST_BYTES, Change

# The digits of a hash are at least 16, and no letter or digit is beside them.
_HASH: Final = re.compile(r"(?<![0-9A-Za-z])[0-9a-f]{16,}(?![0-9A-Za-z])")
_DIGITS: Final = re.compile(r"[0-9a-f]+")
_NAME_DIGITS: Final = 16
# Maximum number of characters of a key. Engines' keys have 50 to 200; longer ones are not recorded.
MOST_KEY: Final = 512
_MOST_DIGITS: Final = _NAME_DIGITS + 2 * REST_BYTES


class KeyForm(NamedTuple):
    """The text of a key before and after its hash, and the number of the hash's digits."""

    before: str
    after: str
    digits: int


class ObjectKeys:
    """The forms of a pool's keys that were seen so far, in the order of their part numbers.

    - `leading`: whether the engine's events have the first 64 bits of a hash (SGLang), and not the last (vLLM).
    - `forms`: the form of each part's keys.
    - `refused`: whether there are more forms than parts, so that some objects are unknown.
    """

    def __init__(self, leading: bool = False) -> None:
        self.leading = leading
        self.forms: list[KeyForm] = []
        self.refused = False
        self._parts: dict[tuple[str, str, int], int] = {}  # by form
        self._spans: dict[int, list[tuple[int, int]]] = {}  # where the hash is in keys of a length, by known forms

    def change(self, key: str, on_disk: bool, stored: bool) -> Change | None:
        """Return the change of an object that is stored or removed; None if its key has no hash or is too long."""
        if len(key) > MOST_KEY:
            return None
        for start, end in self._spans.get(len(key), ()):
            digits = key[start:end]
            part = self._parts.get((key[:start], key[end:], end - start))
            if part is not None and _DIGITS.fullmatch(digits):
                return self._change(digits, part, on_disk, stored)
        found = max(_HASH.finditer(key), key=lambda match: match.end() - match.start(), default=None)
        if found is None or found.end() - found.start() > _MOST_DIGITS:
            return None
        start, end = found.span()
        part = self._part(KeyForm(key[:start], key[end:], end - start))
        return None if part is None else self._change(key[start:end], part, on_disk, stored)

    def _change(self, digits: str, part: int, on_disk: bool, stored: bool) -> Change:
        name, rest = digits[-_NAME_DIGITS:], digits[:-_NAME_DIGITS]
        if self.leading:
            name, rest = digits[:_NAME_DIGITS], digits[_NAME_DIGITS:]
        return Change(int(name, 16), bytes.fromhex(rest.zfill(2 * REST_BYTES)), part, on_disk, stored)

    def key(self, part: int, name: int, rest: bytes) -> str:
        """Return the key of a block's part, whose engine hash has these two halves."""
        before, after, digits = self.forms[part]
        others = digits - _NAME_DIGITS
        ending = f"{int.from_bytes(rest, 'big'):0{others}x}" if others else ""
        beginning = f"{name:0{_NAME_DIGITS}x}"
        hashed = beginning + ending if self.leading else ending + beginning
        return f"{before}{hashed}{after}"

    def parts_with(self, text: str) -> int:
        """Return the parts whose keys contain a text, one bit each."""
        return sum(1 << part for part, form in enumerate(self.forms) if text in form.before or text in form.after)

    def parts_after(self, prefix: str) -> int:
        """Return the parts whose keys begin with a prefix and the end of its last word, one bit each."""
        begins = re.compile(re.escape(prefix) + r"(?![0-9A-Za-z.-])").match
        return sum(1 << part for part, form in enumerate(self.forms) if begins(form.before))

    def parts_before(self, endings: tuple[str, ...]) -> int:
        """Return the parts whose keys end with one of these texts, one bit each."""
        return sum(1 << part for part, form in enumerate(self.forms) if form.after.endswith(endings))

    def _part(self, form: KeyForm) -> int | None:
        part = self._parts.get(form)
        if part is None:
            if len(self.forms) >= MOST_PARTS:
                self.refused = True
                return None
            part = self._parts[form] = len(self.forms)
            self.forms.append(form)
            start, length = len(form.before), len(form.before) + form.digits + len(form.after)
            spans = self._spans.setdefault(length, [])
            if (start, start + form.digits) not in spans:
                spans.append((start, start + form.digits))
        return part
