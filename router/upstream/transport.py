"""Who takes requests to workers in the router's stead, and what the router asks of it."""

from __future__ import annotations

from typing import Protocol

from router.fleet.worker import Worker
from router.http.headers import Headers
from router.upstream.response_handler import ResponseHandler


class SentRequest(Protocol):
    """A request on its way to a worker, by whatever transport."""

    def abort(self) -> None:
        """Call it off: the answer is not wanted any more."""

    def pause(self) -> None:
        """Read no more of it for now."""

    def resume(self) -> None:
        """Read on."""


class Transport(Protocol):
    """Takes one request to a worker. It sends it once, and passes the answer's head on when it comes."""

    def send(self, worker: Worker, answer: ResponseHandler, headers: Headers, body: bytes) -> SentRequest:
        """Send the request with these headers and this body; `answer` gets what the worker answers."""
