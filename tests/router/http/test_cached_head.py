from __future__ import annotations

import httptools
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from router.http.unparsed import CachedHead, RecentHeads

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %b\r\nX-Id: 1\r\n\r\n"


def cached(data: bytes, dated: bool = False) -> CachedHead[str]:
    head = CachedHead.of(data, "said", dated=dated)
    assert head is not None
    return head


KNOWN = cached(HEAD % b"5" + b"12345")


class _Parsed:
    """The result of the parser for some bytes."""

    def __init__(self, data: bytes) -> None:
        self.begun = 0
        self.complete = False
        self.headers: list[tuple[bytes, bytes]] = []
        self.body = b""
        try:
            httptools.HttpRequestParser(self).feed_data(data)
        except httptools.HttpParserError:
            self.complete = False

    def on_message_begin(self) -> None:
        self.begun += 1

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value))

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.complete = True


_NUMBERS = [b"0", b"5", b"12", b"+5", b"5 ", b" 5", b"5, 5", b"1_0", b"5\r\nContent-Length: 6", b"5\r\n x", b"\xb2"]
_PIECES = st.sampled_from([*_NUMBERS, b"", b"\r", b"\n"])


@given(_PIECES | st.binary(max_size=6), st.binary(max_size=20), st.binary(max_size=4))
@example(b"5", b"12345", b"")
@example(b"005", b"12345", b"")
def test_cached_head_equals_the_parsed_head(length: bytes, body: bytes, rest: bytes) -> None:
    data = HEAD % length + body + rest
    known = KNOWN.read(data)
    if known is not None:
        parsed = _Parsed(data)
        assert (parsed.begun, parsed.complete) == (1, True)
        assert parsed.headers == [(b"Host", b"a"), (b"Content-Length", length.strip(b" \t")), (b"X-Id", b"1")]
        assert parsed.body == known


def test_cached_head_matches_another_length() -> None:
    assert KNOWN.parsed == "said"
    assert KNOWN.read(HEAD % b"12" + b"123456789012") == b"123456789012"
    assert KNOWN.read(HEAD % b"0") == b""


@pytest.mark.parametrize(
    "data",
    [
        HEAD % b"5" + b"1234",
        HEAD % b"5" + b"123456",
        (HEAD % b"5" + b"12345").replace(b"X-Id: 1", b"X-Id: 2"),
        (HEAD % b"5" + b"12345").replace(b"Host", b"host"),
        HEAD % (b"0" * 16 + b"5") + b"12345",
        HEAD[:40],
        b"",
    ],
)
def test_anything_else_is_not(data: bytes) -> None:
    assert KNOWN.read(data) is None


@pytest.mark.parametrize(
    "data",
    [
        HEAD % b"5" + b"1234",
        b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD % b"5" + b"12345",
        HEAD.replace(b"Content-Length: %b", b"Transfer-Encoding: chunked") + b"0\r\n\r\n",
        HEAD.replace(b"X-Id: 1", b"content-length: 5") % b"5" + b"12345",
    ],
)
def test_only_complete_messages_with_one_length_are_cached(data: bytes) -> None:
    assert CachedHead.of(data, None) is None


def known(name: bytes) -> CachedHead[str]:
    return cached(HEAD.replace(b"Host: a", b"Host: " + name) % b"5" + b"12345")


def test_cached_head_of_one_client_matches_others() -> None:
    recent: RecentHeads[str] = RecentHeads()
    assert recent.read(HEAD % b"0") is None
    first = recent.add(known(b"a"))
    assert recent.read(HEAD % b"2" + b"12") == (first, b"12")
    assert recent.add(known(b"a")) is first
    assert recent.read(HEAD % b"2" + b"1") is None


def test_only_the_latest_heads_are_cached() -> None:
    recent: RecentHeads[str] = RecentHeads()
    for number in range(9):
        recent.add(known(b"%d" % number))
    data = [HEAD.replace(b"Host: a", b"Host: %d" % number) % b"0" for number in range(9)]
    assert [recent.read(each) is not None for each in data] == [False] * 5 + [True] * 4


DATED = b"HTTP/1.1 200 OK\r\ndate: %b\r\nserver: a\r\ncontent-length: %d\r\n\r\n%b"
MONDAY, TUESDAY = b"Mon, 02 Nov 2026 10:00:00 GMT", b"Tue, 03 Nov 2026 10:00:00 GMT"


def test_cached_head_matches_another_date_but_not_one_of_several() -> None:
    answer = cached(DATED % (MONDAY, 2, b"ab"), dated=True)
    assert answer.read(DATED % (TUESDAY, 3, b"abc")) == b"abc"
    assert answer.read(DATED % (MONDAY, 1, b"a")) == b"a"
    exact = cached(DATED % (MONDAY, 2, b"ab"))
    assert exact.read(DATED % (TUESDAY, 3, b"abc")) is None
    both = DATED.replace(b"server: a", b"date: " + MONDAY)
    answer = cached(both % (MONDAY, 2, b"ab"), dated=True)
    assert answer.read(both % (MONDAY, 1, b"a")) == b"a"
    assert answer.read(both % (TUESDAY, 1, b"a")) is None


@pytest.mark.parametrize(
    "data",
    [
        DATED % (TUESDAY[:-1], 2, b"ab"),
        DATED % (TUESDAY + b" ", 2, b"ab"),
        DATED % (b"Tue\r\ntransfer-encoding: chunk", 2, b"ab"),
        DATED % (b"Tue, 03 Nov 2026\ncontent-len:", 2, b"ab"),
        (DATED % (TUESDAY, 2, b"ab")).replace(b"server: a", b"server: b"),
        (DATED % (TUESDAY, 2, b"ab")).replace(b"date", b"data"),
        (DATED % (TUESDAY, 2, b"ab"))[:30],
    ],
)
def test_nothing_but_the_date_may_be_another(data: bytes) -> None:
    answer = cached(DATED % (MONDAY, 2, b"ab"), dated=True)
    assert answer.read(data) is None
