"""Helpers of aiohttp clients: they refuse redirects, bound response bodies, and describe connection errors."""

from __future__ import annotations

import re
import ssl
from errno import ECONNREFUSED, ECONNRESET, EHOSTUNREACH, ENETUNREACH, EPIPE, ETIMEDOUT
from socket import gaierror

import aiohttp
from aiohttp.http_exceptions import HttpProcessingError

from router.http.compression import decompressed
from router.http.headers import is_decompressed

_REDIRECTS = range(300, 400)


async def refuse_redirects(
    request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
) -> aiohttp.ClientResponse:
    """Send a request, and refuse a redirect, by which another server could get a prompt or token.

    This is a middleware of aiohttp's clients. Raises ClientResponseError if the response is a redirect.
    """
    response = await handler(request)
    if response.status in _REDIRECTS:
        response.close()
        raise aiohttp.ClientResponseError(
            response.request_info,
            (),
            status=response.status,
            message="a redirect, which is not followed",
            headers=response.headers,
        )
    return response


# The most bytes of a worker's description, and of its /metrics.
MOST_ANSWER_BYTES = 4 * 2**20
_PART_BYTES = 64 * 1024


async def read_answer(response: aiohttp.ClientResponse, most_bytes: int = MOST_ANSWER_BYTES) -> bytes:
    """Return a response's body, decompressed. Raises ValueError beyond `most_bytes`, and closes the connection."""
    body = bytearray()
    async for part in response.content.iter_chunked(_PART_BYTES):
        body += part
        if len(body) > most_bytes:
            response.close()
            raise ValueError(f"{response.url.path} answers with more than {most_bytes} bytes")
    if is_decompressed(response.headers.get("Content-Encoding", "")):
        return decompressed(bytes(body), most_bytes)
    return bytes(body)


_PROBLEMS = {
    ECONNREFUSED: "refused the connection",
    ECONNRESET: "closed the connection",
    EPIPE: "closed the connection",
    EHOSTUNREACH: "cannot be reached: no route to it",
    ENETUNREACH: "cannot be reached: no route to it",
    ETIMEDOUT: "did not answer in time",
}


def connection_problem(error: BaseException) -> str:
    """Describe a connection error in words that follow the server's name: "refused the connection"."""
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
    if isinstance(inner, ssl.SSLError):
        return "does not speak TLS there: is its URL http://?"
    if isinstance(inner, aiohttp.ClientPayloadError):
        return "broke off its answer"
    if isinstance(inner.__cause__, HttpProcessingError):
        return "does not answer in HTTP there: is its URL https://?"
    if isinstance(inner, aiohttp.InvalidURL | aiohttp.NonHttpUrlClientError):
        return "is no URL: write it as http://10.0.0.1:8000"
    if isinstance(inner, aiohttp.ClientResponseError):
        return f"answers {inner.status} {inner.message}".rstrip()
    if isinstance(inner, OSError) and (problem := _PROBLEMS.get(_errno(inner))):
        return problem
    if isinstance(inner, TimeoutError):
        return "did not answer in time"
    return str(inner) or type(inner).__name__


def _errno(error: OSError) -> int:
    """Return the error's number; the first address's if a connection failed to several addresses."""
    several = re.match(r"Multiple exceptions: \[Errno (\d+)\]", str(error))
    return error.errno or (int(several[1]) if several else 0)
