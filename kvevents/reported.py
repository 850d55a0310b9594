"""Fields that a server reports about itself. Invalid fields are skipped, with a note for each."""

from __future__ import annotations

from typing import TypeVar

import msgspec

_LONGEST_FIELD = 8192  # bytes, as JSON
_LONGEST_TEXT = 2048  # characters
_MOST_NOTES = 8  # a report may have thousands of invalid fields

T = TypeVar("T")


class ReportedFields:
    """Reader of fields in raw JSON. `refused` has a note for each invalid field."""

    def __init__(self) -> None:
        self.refused: list[str] = []

    def refuse(self, name: str, reason: str) -> None:
        """Note that a field is invalid."""
        if len(self.refused) < _MOST_NOTES:
            self.refused.append(f"{name}: {reason}")

    def integer(self, name: str, raw: msgspec.Raw, lowest: int, highest: int, missing: int | None = None) -> int | None:
        """Return an integer within limits, which may also be a string of digits; `missing` if it is null or absent."""
        value = self._value(name, raw, int)
        if value is None:
            return missing if _is_missing(raw) else None
        if lowest <= value <= highest:
            return value
        self.refuse(name, f"{_short(value)} is not from {lowest} to {highest}")
        return None

    def text(self, name: str, raw: msgspec.Raw, longest: int = _LONGEST_TEXT) -> str | None:
        """Return a string of printable characters; None if it is null or absent."""
        value = self._value(name, raw, str)
        if value is None or (len(value) <= longest and value.isprintable()):
            return value
        reason = f"it has {len(value)} characters; at most {longest}" if len(value) > longest else "it is not printable"
        self.refuse(name, reason)
        return None

    def struct(self, name: str, raw: msgspec.Raw, kind: type[T]) -> T | None:
        """Return an object; None if it is null or absent."""
        return self._value(name, raw, kind)

    def _value(self, name: str, raw: msgspec.Raw, kind: type[T]) -> T | None:
        if _is_missing(raw):
            return None
        if len(bytes(raw)) > _LONGEST_FIELD:
            self.refuse(name, f"it has {len(bytes(raw))} bytes; at most {_LONGEST_FIELD}")
            return None
        try:
            return msgspec.json.decode(raw, type=kind, strict=False)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            self.refuse(name, str(error))
            return None


def _is_missing(raw: msgspec.Raw) -> bool:
    return bytes(raw) in (b"", b"null")


def _short(number: int) -> str:
    return str(number) if abs(number) < 10**18 else "a number of more than 18 digits"
