"""The parts of a form, down to those that have nothing in them."""

from __future__ import annotations

import pytest

from http_api.errors import RequestError
from router.apis.forms import form_fields

CONTENT_TYPE = b"multipart/form-data; boundary=X"


def fields(*parts: bytes) -> list[tuple[str, bytes]]:
    read = form_fields(CONTENT_TYPE, b"--X" + b"\r\n--X".join(parts) + b"\r\n--X--\r\n")
    assert read is not None
    return list(read)


def test_a_part_may_be_empty() -> None:
    head = b'\r\nContent-Disposition: form-data; name="model"\r\n'
    assert fields(head + b"\r\nm") == [("model", b"m")]
    assert fields(head + b"\r\n") == [("model", b"")]
    assert fields(head) == [("model", b"")]  # its empty line is also the next delimiter's


@pytest.mark.parametrize("part", [b"\r\n\r\nvalue", b"\r\n\r\n", b"\r\n"])
def test_a_part_without_a_name_is_refused(part: bytes) -> None:
    with pytest.raises(RequestError, match="form is not accepted"):
        fields(part)
