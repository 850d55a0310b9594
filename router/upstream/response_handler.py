"""Who gets a worker's answer, and how it may fail to come."""

from __future__ import annotations

from mypy_extensions import mypyc_attr

from router.http.headers import ResponseHead


class UpstreamError(Exception):
    """A worker's answer did not come, or not to its end."""


class UnreachableError(UpstreamError):
    """No connection could be made."""


class UpstreamTimeoutError(UpstreamError):
    """A worker said nothing for too long."""


@mypyc_attr(allow_interpreted_subclasses=True)
class ResponseHandler:
    """Gets an answer. After `ended` or `on_failed`, or once it aborted the request, nothing more is called."""

    __slots__ = ()

    def on_head(self, head: ResponseHead, data: bytes, ended: bool) -> None:
        """The head came, and as much of the body as came with it."""
        raise NotImplementedError

    def on_body(self, data: bytes, ended: bool) -> None:
        """More of the body came."""
        raise NotImplementedError

    def on_failed(self, error: UpstreamError) -> None:
        """The answer did not come, or will not go on."""
        raise NotImplementedError


@mypyc_attr(allow_interpreted_subclasses=True)
class ChunkForwarder:
    """Where whole chunks of an answer's body go as they come, of whole lines."""

    __slots__ = ()

    def forward(self, chunks: bytes) -> bool:
        """Chunks came; false when they have to be looked at, and were not passed on."""
        raise NotImplementedError
