"""Pictures in chats."""

from __future__ import annotations

import base64
import struct
import zlib
from typing import Any


def image_part(color: tuple[int, int, int], width: int, height: int) -> dict[str, Any]:
    """The part of a message that is a picture of one color."""
    return {"type": "image_url", "image_url": {"url": _png(color, width, height)}}


def _png(color: tuple[int, int, int], width: int, height: int) -> str:
    """A picture of one color, as a data URL."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = zlib.compress((b"\0" + bytes(color) * width) * height)
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"
