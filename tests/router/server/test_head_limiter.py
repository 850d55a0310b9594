"""The bounds on the heads of a connection's requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from router.http.event_loop import Deadline
from router.server import request_reader
from router.server.request_reader import HEAD_BYTES, HeadLimiter, RefusedRequestError, check_head


@pytest.fixture
async def late() -> asyncio.Event:
    return asyncio.Event()


@pytest.fixture
async def limiter(late: asyncio.Event) -> AsyncIterator[HeadLimiter]:
    deadline = Deadline(asyncio.get_running_loop(), late.set)
    yield HeadLimiter(deadline)
    deadline.close()


async def test_head_of_the_largest_size_is_accepted_and_one_byte_more_refused(limiter: HeadLimiter) -> None:
    limiter.begin()
    limiter.add(HEAD_BYTES)
    with pytest.raises(RefusedRequestError):
        limiter.add(1)


async def test_bytes_kept_by_the_parser_count(limiter: HeadLimiter) -> None:
    limiter.begin()
    assert limiter.fits(limiter.size, HEAD_BYTES - 1)
    assert limiter.fits(limiter.size, 1)
    assert not limiter.fits(limiter.size, 1)


async def test_only_heads_are_counted_each_from_its_own_beginning(limiter: HeadLimiter) -> None:
    for _ in range(3):
        assert limiter.size == 0
        limiter.begin()
        limiter.add(HEAD_BYTES - 10)
        assert limiter.fits(0, HEAD_BYTES - 10)
        limiter.end()
    limiter.begin()
    limiter.end()
    assert limiter.fits(limiter.size, 100 * HEAD_BYTES)


async def test_head_has_one_deadline_for_all_its_parts(
    limiter: HeadLimiter, late: asyncio.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_reader, "HEAD_SECONDS", 0.05)
    limiter.begin()
    monkeypatch.setattr(request_reader, "HEAD_SECONDS", 60.0)
    limiter.begin()  # the parser has seen the first byte
    await asyncio.wait_for(late.wait(), 60)


async def test_complete_head_is_not_late(
    limiter: HeadLimiter, late: asyncio.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_reader, "HEAD_SECONDS", 0.05)
    limiter.begin()
    limiter.end()
    await asyncio.sleep(0.2)
    assert not late.is_set()


@pytest.mark.parametrize("target", [b"", b"*", b"http://other.example/", b"other.example:80", b"@other.example/x"])
def test_targets_without_a_path_are_refused(target: bytes) -> None:
    headers = [(b"host", b"h")]
    check_head(b"/" + target, "1.1", headers)
    with pytest.raises(RefusedRequestError):
        check_head(target, "1.1", headers)


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"host", b"h"), (b"host", b"h")],
        [(b"host", b"h"), (b"transfer-encoding", b"gzip, chunked")],
        [(b"host", b"h"), (b"transfer-encoding", b"chunked"), (b"content-length", b"1")],
        [(b"host", b"h"), (b"content-length", b"1"), (b"content-length", b"1")],
    ],
)
def test_ambiguous_heads_are_refused(headers: list[tuple[bytes, bytes]]) -> None:
    with pytest.raises(RefusedRequestError):
        check_head(b"/", "1.1", headers)
