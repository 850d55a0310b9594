"""Headers as lines of HTTP/1.1, and numbers in headers."""

from __future__ import annotations

import pytest

from router.forwarding.retries import requested_pause
from router.http.headers import length_of, lines_of, whole_number


def test_headers_become_one_line_each() -> None:
    assert lines_of([(b"x-a", b"b"), (b"X-B", b""), (b"c", b" \xff: d")]) == b"x-a: b\r\nX-B: \r\nc:  \xff: d\r\n"


@pytest.mark.parametrize("name", [b"", b"a b", b"a:", b"a\r\nb", b"a\n", b"a\0", b"a\t", b" a", b"\xe4", b"a: b\r\nc"])
def test_name_that_is_no_token_is_no_line(name: bytes) -> None:
    with pytest.raises(ValueError, match="header"):
        lines_of([(b"x-a", b"b"), (name, b"v")])


@pytest.mark.parametrize("value", [b"a\r\nb: c", b"a\n", b"\r", b"a\0"])
def test_value_with_a_line_end_is_no_line(value: bytes) -> None:
    with pytest.raises(ValueError, match="header"):
        lines_of([(b"x-a", value), (b"x-b", b"c")])


def test_numbers_of_any_length_are_read() -> None:
    assert [whole_number(text) for text in (b"0", b"17", b"", b"+1", b"1.0", "²".encode())] == [0, 17] + [None] * 4
    assert whole_number(b"9" * 5000) == length_of(b"9" * 5000) > 10**18
    assert requested_pause(503, b"9" * 5000) == requested_pause(503, b"9" * 400) == 60.0
