"""CORS: origins of allowed pages, and the header lines that browsers check."""

from __future__ import annotations

import pytest

from router.http.headers import Cors, without_cors

PAGE = b"https://chat.example.com"
METHODS = ("GET", "POST")


def lines(cors: Cors, origin: bytes | None) -> list[bytes]:
    return cors.lines([] if origin is None else [(b"origin", origin)]).split(b"\r\n")


def test_listed_origin_is_allowed_and_others_are_not() -> None:
    cors = Cors([PAGE.decode()], METHODS)
    assert b"access-control-allow-origin: " + PAGE in lines(cors, PAGE)
    for origin in (b"https://elsewhere.example.com", b"null", PAGE + b".evil", None):
        assert not any(line.startswith(b"access-control-allow-origin") for line in lines(cors, origin))
    assert b"vary: Origin" in lines(cors, None)


def test_star_allows_every_origin() -> None:
    assert b"access-control-allow-origin: *" in lines(Cors(["*"], METHODS), PAGE)


@pytest.mark.parametrize(
    ("origin", "method", "status"), [(PAGE, b"POST", 200), (PAGE, b"TRACE", 400), (b"https://elsewhere", b"POST", 400)]
)
def test_preflight_checks_origin_and_method(origin: bytes, method: bytes, status: int) -> None:
    asked = [(b"origin", origin), (b"access-control-request-method", method), (b"access-control-request-headers", b"a")]
    answer = Cors([PAGE.decode()], METHODS).preflight("OPTIONS", asked)
    assert answer is not None
    assert answer[0] == status
    assert (b"access-control-allow-methods", b"GET, POST") in answer[1]
    assert (b"access-control-allow-headers", b"a") in answer[1]


def test_options_request_that_asks_for_no_method_is_no_preflight() -> None:
    cors = Cors(["*"], METHODS)
    assert cors.preflight("OPTIONS", [(b"origin", PAGE)]) is None
    assert cors.preflight("POST", [(b"origin", PAGE), (b"access-control-request-method", b"POST")]) is None


def test_rules_of_an_engine_are_dropped() -> None:
    headers = [(b"access-control-allow-origin", b"*"), (b"access-control-allow-credentials", b"true"), (b"x-a", b"1")]
    assert without_cors(headers) == [(b"x-a", b"1")]
