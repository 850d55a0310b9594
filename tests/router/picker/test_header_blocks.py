"""Which decoded header blocks of HTTP/2 are requests, and which are trailers (RFC 9113, 8.2 and 8.3)."""

from __future__ import annotations

import pytest

from router.picker.http2.headers import RequestHeaders

_PSEUDO = {b":method": b"POST", b":scheme": b"http", b":path": b"/v1/models?a=b", b":authority": b"r:1"}


def _is_request(*headers: tuple[bytes, bytes], **pseudo: bytes) -> bool:
    changed = _PSEUDO | {b":" + name.encode(): value for name, value in pseudo.items()}
    return RequestHeaders([*changed.items(), *headers]).is_request


@pytest.mark.parametrize(
    "name", [b"", b" ", b"a b", b"a:", b"a\r\nb", b"a\n", b"a\0", b"a\t", b"A", b"x-\xe4", b"a\x7f"]
)
def test_header_whose_name_is_no_lower_case_token_is_refused(name: bytes) -> None:
    assert not _is_request((name, b"v"))
    assert not RequestHeaders([(name, b"v")]).are_trailers()


@pytest.mark.parametrize("value", [b"a\r\nb: c", b"\n", b"a\r", b"a\0b", b" a", b"a ", b"\ta", b"a\t"])
def test_header_whose_value_is_no_part_of_a_line_is_refused(value: bytes) -> None:
    assert not _is_request((b"x-a", value))
    assert not RequestHeaders([(b"x-a", value)]).are_trailers()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (b"method", b"POST /x HTTP/1.1\r\n"),
        (b"method", b""),
        (b"scheme", b"ht tp"),
        (b"path", b""),
        (b"path", b"v1"),
        (b"path", b"/a b"),
        (b"path", b"/a HTTP/1.1\r\nx: y"),
        (b"path", b"/a#b"),
        (b"path", b"/\xe4"),
        (b"path", b"*"),
        (b"authority", b"r\r\nx: y"),
        (b"authority", b"user@r"),
        (b"authority", b""),
        (b"authority", b":80"),
        (b"authority", b"%zz:"),
        (b"authority", b"%4"),
        (b"authority", b"[::::]"),
        (b"authority", b"[1.2.3.4]:80"),
        (b"authority", b"[::1"),
        (b"authority", b"r:123456"),
        (b"authority", b"a b"),
        (b"authority", b"r:x"),
        (b"other", b"x"),
    ],
)
def test_pseudo_header_outside_its_grammar_is_refused(name: bytes, value: bytes) -> None:
    assert not _is_request(**{name.decode(): value})


@pytest.mark.parametrize(
    "headers",
    [
        [(b"content-length", b"x")],
        [(b"content-length", b"+1")],
        [(b"content-length", b"")],
        [(b"content-length", b"1, 1")],
        [(b"content-length", b"1"), (b"content-length", b"1")],
        [(b"te", b"gzip")],
        [(b"connection", b"close")],
        [(b"proxy-connection", b"close")],
        [(b"transfer-encoding", b"chunked")],
    ],
)
def test_ambiguous_length_and_headers_of_a_connection_are_refused(headers: list[tuple[bytes, bytes]]) -> None:
    assert not _is_request(*headers)


@pytest.mark.parametrize("authority", [b"[::1]:80", b"r", b"r:", b"10.0.0.1:8080", b"a_b.svc", b"%41.example"])
def test_authority_is_a_host_with_an_optional_port(authority: bytes) -> None:
    assert _is_request(authority=authority)


def test_usual_requests_and_trailers_are_accepted() -> None:
    assert _is_request((b"te", b"trailers"), (b"content-length", b"4"), (b"x_a!", b"b \xe4\tc"), (b"cookie", b""))
    assert _is_request(path=b"*", method=b"OPTIONS")
    assert _is_request(authority=b"[::1]:80", scheme=b"https")
    assert RequestHeaders([(b"grpc-status", b"0")]).are_trailers()
    assert not RequestHeaders([(b":path", b"/")]).are_trailers()
