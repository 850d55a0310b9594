"""What requests with aiohttp share: redirects are refused, bodies are bounded, and errors are put in words."""

from __future__ import annotations

import re
import ssl
from errno import ECONNREFUSED, ECONNRESET, EHOSTUNREACH, ENETUNREACH, EPIPE, ETIMEDOUT
from socket import gaierror

import aiohttp

_REDIRECTS = range(300, 400)


async def refuse_redirects(
    request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
) -> aiohttp.ClientResponse:
    """Send a request as aiohttp's middlewares do. Raises ClientResponseError for an answer that leads elsewhere."""
    response = await handler(request)
    if response.status in _REDIRECTS:
        response.close()
        raise aiohttp.ClientResponseError(
            response.request_info,
            (),
            status=response.status,
            message="it leads elsewhere, and redirects are not followed",
            headers=response.headers,
        )
    return response


_AT_A_TIME = 64 * 1024


async def read_answer(response: aiohttp.ClientResponse, most_bytes: int) -> bytes:
    """The body of an answer. Raises ValueError when it is longer than `most_bytes`; the connection is then closed."""
    body = bytearray()
    async for part in response.content.iter_chunked(_AT_A_TIME):
        body += part
        if len(body) > most_bytes:
            response.close()
            raise ValueError(f"{response.url.path} answers with more than {most_bytes} bytes (fleet.max_answer_bytes)")
    return bytes(body)


_SAID = {
    ECONNREFUSED: "refused the connection",
    ECONNRESET: "closed the connection",
    EPIPE: "closed the connection",
    EHOSTUNREACH: "cannot be reached: no route to it",
    ENETUNREACH: "cannot be reached: no route to it",
    ETIMEDOUT: "did not answer in time",
}


def connection_problem(error: BaseException) -> str:
    """What went wrong, to be said after the server's address or name."""
    inner = error
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        inner = error.certificate_error
    elif isinstance(error, aiohttp.ClientConnectorError):
        inner = error.os_error
    if isinstance(inner, ssl.SSLCertVerificationError):
        return f"has a certificate that is not trusted: {inner.verify_message}"
    if isinstance(inner, gaierror):
        return "has a name that no address is known for"
    if isinstance(inner, aiohttp.ServerDisconnectedError):
        return "closed the connection"
    if isinstance(inner, aiohttp.ClientResponseError):
        return f"answers {inner.status} {inner.message}".rstrip()
    if isinstance(inner, OSError) and (said := _SAID.get(_errno(inner))):
        return said
    if isinstance(inner, TimeoutError):
        return "did not answer in time"
    return str(inner) or type(inner).__name__


def _errno(error: OSError) -> int:
    """Its number. An error of several addresses has none of its own, but tells those of each."""
    several = re.match(r"Multiple exceptions: \[Errno (\d+)\]", str(error))
    return error.errno or (int(several[1]) if several else 0)
