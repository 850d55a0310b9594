"""Responses over HTTP/2: a header that HTTP/2 does not have is never sent."""

from __future__ import annotations

import hpack
import pytest

from router.server.http2_requests import header_block


@pytest.mark.parametrize(
    "header",
    [
        (b"X-Upper", b"1"),
        (b"", b"1"),
        (b"x a", b"1"),
        (b"x:a", b"1"),
        (b"x\r\ny", b"1"),
        (b":status", b"200"),
        (b"x-a", b"1\r\nx-b: 2"),
        (b"x-a", b"1\n"),
        (b"x-a", b"\0"),
        (b"connection", b"close"),
        (b"content-length", b"x"),
    ],
)
def test_what_http2_does_not_have_is_refused(header: tuple[bytes, bytes]) -> None:
    with pytest.raises(ValueError, match="does not exist in HTTP/2"):
        header_block(200, [(b"x-good", b"1"), header])


def test_values_lose_outer_spaces() -> None:
    block = header_block(404, [(b"x-a", b" \ta b\xe4 "), (b"x-long", b"x" * 500), (b"content-length", b"5")])
    assert hpack.Decoder().decode(block, raw=True) == [
        (b":status", b"404"),
        (b"x-a", b"a b\xe4"),
        (b"x-long", b"x" * 500),
        (b"content-length", b"5"),
    ]
