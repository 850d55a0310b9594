"""Texts for failed connections, from real failures of sockets, and CORS."""

from __future__ import annotations

import asyncio
import ssl

import aiohttp
import pytest
import trustme

from benchmarks.ports import free_port
from router.http.client import connection_problem
from router.http.headers import Cors, without_cors


async def problem(url: str) -> str:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(5)) as session:
        with pytest.raises((aiohttp.ClientError, TimeoutError)) as failed:
            async with session.get(url) as response:
                response.raise_for_status()
    return connection_problem(failed.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_nothing_listens(host: str) -> None:
    assert await problem(f"http://{host}:{free_port()}/") == "refused the connection"


async def test_nothing_listens_at_any_address_of_a_name() -> None:
    with pytest.raises(OSError) as failed:  # noqa: PT011 - whichever of them
        await asyncio.get_running_loop().create_connection(asyncio.Protocol, "localhost", free_port())
    assert connection_problem(failed.value) == "refused the connection"
    several = OSError("Multiple exceptions: [Errno 111] Connect call failed ('::1', 1, 0, 0), [Errno 111] Connect")
    assert connection_problem(several) == "refused the connection"


async def test_problem_of_an_unknown_host() -> None:
    assert await problem("http://nobody.invalid/") == "has a name that no address is known for"


async def problem_of_a_server(answer: bytes, tls: ssl.SSLContext | None = None) -> str:
    """Return the problem with a server that sends these bytes and closes the connection."""

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls) as server:
        return await problem(f"http{'s' if tls else ''}://127.0.0.1:{server.sockets[0].getsockname()[1]}/")


async def test_closed_connection_and_error_status_are_named() -> None:
    assert await problem_of_a_server(b"") == "closed the connection"
    refusal = b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\n\r\n"
    assert await problem_of_a_server(refusal) == "answers 401 Unauthorized"


async def test_its_certificate_is_not_trusted() -> None:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(tls)
    assert (await problem_of_a_server(b"", tls)).startswith("has a certificate that is not trusted: ")


async def test_wrong_scheme_is_named() -> None:
    async with await asyncio.start_server(_answer_any, "127.0.0.1", 0) as server:
        place = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        assert await problem(f"https://{place}/") == "does not speak TLS there: is its URL http://?"
        assert await problem(f"http://{place}/") == "does not answer in HTTP there: is its URL https://?"
    assert await problem("nonsense") == "is no URL: write it as http://10.0.0.1:8000"


async def _answer_any(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(1)
    writer.write(b"what is this?\r\n\r\n")
    writer.close()


def test_problem_without_text_is_the_name_of_its_type() -> None:
    assert connection_problem(TimeoutError()) == "did not answer in time"
    assert connection_problem(ValueError()) == "ValueError"


PAGE = b"https://chat.example.com"
METHODS = ("GET", "POST")


def lines(cors: Cors, origin: bytes | None) -> list[bytes]:
    return cors.lines([] if origin is None else [(b"origin", origin)]).split(b"\r\n")


def test_listed_origin_is_allowed_and_others_are_not_except_by_a_star() -> None:
    cors = Cors([PAGE.decode()], METHODS)
    assert b"access-control-allow-origin: " + PAGE in lines(cors, PAGE)
    for origin in (b"https://elsewhere.example.com", b"null", PAGE + b".evil", None):
        assert not any(line.startswith(b"access-control-allow-origin") for line in lines(cors, origin))
    assert b"vary: Origin" in lines(cors, None)
    assert b"access-control-allow-origin: *" in lines(Cors(["*"], METHODS), PAGE)


@pytest.mark.parametrize(
    ("origin", "method", "status"), [(PAGE, b"POST", 200), (PAGE, b"TRACE", 400), (b"https://elsewhere", b"POST", 400)]
)
def test_preflight_checks_origin_and_method(origin: bytes, method: bytes, status: int) -> None:
    asked = [(b"origin", origin), (b"access-control-request-method", method), (b"access-control-request-headers", b"a")]
    answer = Cors([PAGE.decode()], METHODS).preflight("OPTIONS", asked)
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
