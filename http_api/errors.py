"""Errors a client of the HTTP API sees, and the body OpenAI's clients expect of one."""

from __future__ import annotations

import msgspec


class RequestError(Exception):
    """A request that cannot be served: what to answer the client.

    `status` is the HTTP status; `type`, `param` and `code` are those of OpenAI's error body. `param` names the field at
    fault, None when it is the body as a whole or no field at all. `retry_after`: seconds after which it may be served.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.type = type
        self.param = param
        self.code = code
        self.retry_after = retry_after


def error_body(error: RequestError) -> bytes:
    """The JSON of `{"error": {"message", "type", "param", "code"}}`."""
    return msgspec.json.encode(
        {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}
    )


def error_headers(error: RequestError, body: bytes) -> list[tuple[bytes, bytes]]:
    """The headers of an answer with this body."""
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if error.retry_after is not None:
        headers.append((b"retry-after", b"%d" % error.retry_after))
    return headers


def named_first(error: ValueError) -> str:
    """The field that an error of the indexer begins with."""
    return str(error).partition(":")[0]
