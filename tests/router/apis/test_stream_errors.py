"""Errors at the beginning of a stream."""

from __future__ import annotations

import pytest

from router.apis.stream_errors import is_refusal, stream_beginning, stream_error

ROLE = b'data: {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": null}]}\n\n'
QUEUE_FULL = b'data: {"error": {"object": "error", "message": "The request queue is full.", "code": 503}}\n\n'


@pytest.mark.parametrize(
    ("beginning", "status"),
    [
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
    ],
)
def test_status_of_the_beginning_of_a_stream(beginning: bytes, status: int | None) -> None:
    assert stream_beginning(beginning) == status
    assert stream_error(beginning) == (status or None)


def test_error_that_ends_a_stream_needs_no_blank_line() -> None:
    assert stream_beginning(QUEUE_FULL.rstrip()) is None
    assert stream_beginning(QUEUE_FULL.rstrip(), ended=True) == 503


@pytest.mark.parametrize(("status", "refusal"), [(400, True), (429, True), (503, False), (500, False)])
def test_only_errors_of_the_request_are_refusals(status: int, refusal: bool) -> None:
    assert is_refusal(status) is refusal
