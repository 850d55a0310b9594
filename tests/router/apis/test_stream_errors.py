"""Errors at the beginning of a stream."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.apis import stream_errors
from router.apis.stream_errors import StreamBeginning, is_refusal, stream_error

ROLE = b'data: {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": null}]}\n\n'
QUEUE_FULL = b'data: {"error": {"object": "error", "message": "The request queue is full.", "code": 503}}\n\n'


BEGINNINGS: list[tuple[bytes, int | None]] = [
    (b'data: {"error": {"code": 404}}\n\n', 404),
    (b'data: {"error": {"code": "429"}}\n\n', 429),
    (b': ping\ndata: {"error": {"status_code": 429}}\n\n', 429),
    (b'data: {"error": "out of memory"}\n\n', 500),
    (b'data: {"error": {"type": "overloaded_error"}}\n\n', 503),
    (b'data: {"error": {"type": "SERVICE_UNAVAILABLE", "code": null}}\n\n', 503),
    (b'data: {"error": {"type": "rate_limit_error"}}\n\n', 429),
    (b'data: {"error": {"type": "BadRequestError"}}\n\n', 400),
    (b'event: error\ndata: {"type": "error", "message": "x"}\n\n', 500),
    (b'data: {"type": "response.failed", "response": {"error": {"code": "server_error"}}}\n\n', 500),
    (b'data: {"error": null, "choices": []}\n\n', 0),
    (b'data: {"choices": [{"text": "an \\"error\\" occurred"}]}\n\n', 0),
    (b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n', 0),
    (b'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\n', 0),
    (b'data: {"error": {"code": 400}', None),
    (b"data: error\n\n", 0),
    (b"", None),
    (ROLE, None),
    (b": processing\n\n", None),
    (b": processing\r\n\r\n" + ROLE + QUEUE_FULL, 503),
    (b'event: message_start\ndata: {"type": "message_start", "message": {}}\n\n' + QUEUE_FULL, 503),
    (b'data: {"type": "response.created"}\n\ndata: {"type": "response.in_progress"}\n\n' + QUEUE_FULL, 503),
    (b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n' + QUEUE_FULL, 0),
    (b": " + b"x" * 70_000, 0),
]


def status_of(beginning: bytes, ended: bool = False) -> int | None:
    return StreamBeginning().add(beginning, ended)


@pytest.mark.parametrize(("beginning", "status"), BEGINNINGS)
def test_status_of_the_beginning_of_a_stream(beginning: bytes, status: int | None) -> None:
    assert status_of(beginning) == status
    assert stream_error(beginning) == (status or None)


def test_error_that_ends_a_stream_needs_no_blank_line() -> None:
    assert status_of(QUEUE_FULL.rstrip()) is None
    assert status_of(QUEUE_FULL.rstrip(), ended=True) == 503


@pytest.mark.parametrize(("status", "refusal"), [(400, True), (429, True), (503, False), (500, False)])
def test_only_errors_of_the_request_are_refusals(status: int, refusal: bool) -> None:
    assert is_refusal(status) is refusal


@given(st.lists(st.sampled_from([*(beginning for beginning, _ in BEGINNINGS[:-1]), b"\r", b"\n", b"\r\n", b"data: x"])))
def test_chunks_of_any_size_have_the_status_of_the_whole(events: list[bytes]) -> None:
    """The events of the whole are split at blank lines."""
    whole = b"".join(events)[:2000]
    for size in (1, 2, 7, 64):
        beginning, found = StreamBeginning(), None
        for start in range(0, len(whole), size):
            found = beginning.add(whole[start : start + size])
            if found is not None:
                break
        assert found == status_of(whole)
        assert whole.startswith(beginning.received)
    *complete, _ = whole.replace(b"\r\n", b"\n").split(b"\n\n")
    alone = [status_of(event + b"\n\n") for event in complete]
    assert status_of(whole) == next((status for status in alone if status is not None), None)


def test_compressed_chunks_are_read_once() -> None:
    compressor = zlib.compressobj(wbits=31)
    packed = compressor.compress(ROLE + QUEUE_FULL) + compressor.flush()
    beginning = StreamBeginning(compressed=True)
    found = [beginning.add(packed[place : place + 1]) for place in range(len(packed))]
    assert next(status for status in found if status is not None) == 503
    assert (bytes(beginning.received), bytes(beginning.plain)) == (packed, ROLE + QUEUE_FULL)


def test_chunks_do_not_make_a_beginning_longer_than_the_limit() -> None:
    """Every byte of a worker that never sends an event with content is a chunk."""
    beginning = StreamBeginning()
    assert all(beginning.add(b":") is None for _ in range(65_536))
    assert beginning.add(b":") == 0


def test_each_event_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[bytes] = []
    original = stream_errors._event_status
    monkeypatch.setattr(stream_errors, "_event_status", lambda event: parsed.append(event) or original(event))
    beginning = StreamBeginning()
    for place in range(len(ROLE) * 20):
        beginning.add((ROLE * 20)[place : place + 1])
    assert parsed == [ROLE.strip()] * 20
