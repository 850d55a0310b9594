"""Decompression of answers that a proxy compressed although the router asked for identity.

Only gzip and zlib are decompressed, within a limit. Answers in other encodings are forwarded, and not read.
"""

from __future__ import annotations

import zlib
from typing import Final

# The most decompressed bytes of one answer and of one received piece: a few megabytes can hold gigabytes of zeros.
_MOST_BYTES: Final = 64 * 2**20
_MOST_OF_A_PIECE: Final = 2**20
_GZIP_OR_ZLIB: Final = zlib.MAX_WBITS | 32


def decompressed(body: bytes, most_bytes: int = _MOST_BYTES) -> bytes:
    """Return a whole body decompressed. Raises ValueError if it is invalid, incomplete or longer than `most_bytes`."""
    reader = zlib.decompressobj(_GZIP_OR_ZLIB)
    try:
        plain = reader.decompress(body, most_bytes + 1)
    except zlib.error as error:
        raise ValueError(f"its compressed answer is invalid: {error}") from error
    if len(plain) > most_bytes:
        raise ValueError(f"its compressed answer has more than {most_bytes} bytes")
    if not reader.eof:
        raise ValueError("its compressed answer is incomplete")
    return plain


class Decompressor:
    """A reader of one compressed answer that is being forwarded. After an error or the limit it returns nothing."""

    def __init__(self) -> None:
        self._reader = zlib.decompressobj(_GZIP_OR_ZLIB)
        self._left = _MOST_BYTES

    def read(self, piece: bytes) -> bytes:
        """Return what a piece of the answer adds."""
        if self._left <= 0:
            return b""
        try:
            plain = self._reader.decompress(piece, _MOST_OF_A_PIECE)
        except zlib.error:
            self._left = 0
            return b""
        self._left = self._left - len(plain) if not self._reader.unconsumed_tail else 0
        return plain
