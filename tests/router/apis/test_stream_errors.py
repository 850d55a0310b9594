"""Errors in the first event of a stream."""

from __future__ import annotations

import pytest

from router.apis.stream_errors import stream_error


@pytest.mark.parametrize(
    ("beginning", "status"),
    [
        (b'data: {"error": {"code": 404}}\n\n', 404),
        (b': ping\ndata: {"error": {"status_code": 429}}\n\n', 429),
        (b'data: {"error": "out of memory"}\n\n', 500),
        (b'event: error\ndata: {"type": "error", "message": "x"}\n\n', 500),
        (b'data: {"error": null, "choices": []}\n\n', None),
        (b'data: {"choices": [{"text": "an \\"error\\" occurred"}]}\n\n', None),
        (b'data: {"error": {"code": 400}', None),
        (b"data: error\n\n", None),
        (b"", None),
    ],
)
def test_status_of_a_first_event(beginning: bytes, status: int | None) -> None:
    assert stream_error(beginning) == status
