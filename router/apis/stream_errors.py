"""Errors in the first event of a stream: how engines refuse a request after they sent the head of a stream."""

from __future__ import annotations

from typing import Any, Final

import msgspec

_SEARCHED_BYTES: Final = 256  # the start of an event, which names an error
_REFUSALS: Final = ("badrequest", "invalid_request", "not_found", "notfound")

_decode = msgspec.json.Decoder(dict[str, Any]).decode


def stream_error(beginning: bytes) -> int | None:
    """Return the status of the error in a stream's first event; None if it is no error, or incomplete.

    It is 400 for a refusal without a status, and 500 for any other error without one.
    """
    if beginning.find(b"error", 0, _SEARCHED_BYTES) < 0:
        return None
    event, end, _ = beginning.replace(b"\r\n", b"\n").partition(b"\n\n")
    data = b"".join(line[len(b"data:") :] for line in event.split(b"\n") if line.startswith(b"data:"))
    if not end or not data:
        return None
    try:
        found = _decode(data)
    except (msgspec.DecodeError, UnicodeError):
        return None
    error = found.get("error") or (found if found.get("type") == "error" else None)
    if error is None:
        return None
    fields = error if isinstance(error, dict) else {}
    for name in ("code", "status_code"):
        if type(status := fields.get(name)) is int and 400 <= status < 600:
            return status
    kind = str(fields.get("type", "")).lower()
    return 400 if any(refusal in kind for refusal in _REFUSALS) else 500
