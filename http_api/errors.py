"""Errors of the HTTP APIs: refused requests, with their JSON body in OpenAI's form, and addresses that are not free."""

from __future__ import annotations

from errno import EACCES, EADDRINUSE, EADDRNOTAVAIL
from socket import gaierror

import msgspec


class ListenError(OSError):
    """An address that cannot be bound. The message names what to change."""

    @classmethod
    def of(cls, error: OSError, host: str, port: int, option: str) -> ListenError:
        """Describe a failed bind. `option`: what sets the port, on the command line or in the settings."""
        match error.errno:
            case _ if isinstance(error, gaierror):
                return cls(f"{host} is a name that no address is known for: choose another one with --host")
            case number if number == EADDRINUSE:
                return cls(f"port {port} of {host} is in use by another process: choose another one with {option}")
            case number if number == EADDRNOTAVAIL:
                return cls(f"{host} is no address of this machine: choose another one with --host")
            case number if number == EACCES:
                return cls(f"port {port} needs more rights: choose one above 1023 with {option}")
        return cls(f"{host}:{port} cannot be bound: {error.strerror}")


class RequestError(Exception):
    """A request that the service refuses, with the response to send.

    - `param`: name of the wrong field; None if the whole body is wrong, or no field is.
    - `code`: machine-readable reason in OpenAI's body.
    - `retry_after`: seconds after which the client may try again; None leaves the header out.
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
    """Return the JSON body of an error: `{"error": {"message", "type", "param", "code"}}`."""
    return msgspec.json.encode(
        {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}
    )


# The reasons of llm-d for a request that reaches no worker, by the code of its error.
_DROPPED = {
    "queue_full": b"rejected-saturated",
    "shed": b"rejected-saturated",
    "slo_not_met": b"rejected-saturated",
    "working_set": b"rejected-ttl-expired",
    "queue_timeout": b"rejected-ttl-expired",
    "deadline_exceeded": b"rejected-ttl-expired",
    "no_worker_available": b"rejected-no-endpoints",
    "saturated": b"rejected-saturated",
    "stopping": b"rejected-shutting-down",
}


def error_headers(error: RequestError, body: bytes) -> list[tuple[bytes, bytes]]:
    """Return the headers of an error response with this body."""
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if error.retry_after is not None:
        headers.append((b"retry-after", b"%d" % error.retry_after))
    if (reason := _DROPPED.get(error.code or "")) is not None:
        headers.append((b"x-llm-d-request-dropped-reason", reason))
    return headers


def named_first(error: ValueError) -> str:
    """Return the field name that the text of a ValueError begins with, as in `dp_rank: -1 is negative`."""
    return str(error).partition(":")[0]
