"""Decompression of answers within limits."""

from __future__ import annotations

import gzip
import zlib

import pytest

from router.http.compression import Decompressor, decompressed
from router.http.headers import ResponseHead


@pytest.mark.parametrize("compress", [gzip.compress, zlib.compress])
def test_whole_and_split_answers_are_decompressed(compress: object) -> None:
    assert callable(compress)
    body = compress(b"usage" * 1000)
    assert decompressed(body) == b"usage" * 1000
    reader = Decompressor()
    assert b"".join(reader.read(body[at : at + 7]) for at in range(0, len(body), 7)) == b"usage" * 1000


@pytest.mark.parametrize(
    "body", [b"plain", gzip.compress(b"x" * 100)[:-9], gzip.compress(b"x" * 101)], ids=["invalid", "incomplete", "long"]
)
def test_invalid_incomplete_and_long_answers_are_refused(body: bytes) -> None:
    with pytest.raises(ValueError, match="its compressed answer"):
        decompressed(body, 100)


def test_bomb_is_read_to_its_limit_only() -> None:
    reader, bomb = Decompressor(), gzip.compress(bytes(64 * 2**20))
    assert len(reader.read(bomb)) == 2**20
    assert reader.read(bomb) == b""


@pytest.mark.parametrize(
    ("value", "expected"), [(b"gzip", True), (b" GZIP", True), (b"deflate", True), (b"br", False), (b"identity", False)]
)
def test_only_gzip_and_zlib_are_read(value: bytes, expected: bool) -> None:
    assert ResponseHead(200, [(b"content-encoding", value)]).compressed is expected
