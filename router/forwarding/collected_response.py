"""A response of a worker that the router reads itself, in place of forwarding it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from router.http.compression import decompressed
from router.upstream import ResponseHandler, ResponseHead, UpstreamError

_MOST_BYTES: Final = 16 * 2**20


class CollectedResponse(ResponseHandler):
    """A handler that collects a response and calls one of two functions at its end. A refusal's body is always kept."""

    def __init__(
        self,
        on_answer: Callable[[ResponseHead, bytes], None],
        on_failure: Callable[[UpstreamError], None],
        keep_body: bool = True,
    ) -> None:
        self._on_answer = on_answer
        self._on_failure = on_failure
        self._keep_body = keep_body
        self._head: ResponseHead | None = None
        self._body = bytearray()

    def on_head(self, head: ResponseHead, data: bytes, ended: bool) -> None:
        self._head = head
        self.on_body(data, ended)

    def on_body(self, data: bytes, ended: bool) -> None:
        assert self._head is not None
        if self._keep_body or self._head.status >= 400 or not self._body:
            self._body += data  # of a stream that is not read, the first event may be an error
        if len(self._body) > _MOST_BYTES:
            self._on_failure(UpstreamError(f"an answer of more than {_MOST_BYTES} bytes"))
        elif ended:
            self._answered(self._head, bytes(self._body))

    def _answered(self, head: ResponseHead, body: bytes) -> None:
        """Report a whole answer. A body that is read is decompressed; that of a refusal is forwarded as it is."""
        if self._keep_body and head.status < 400 and head.compressed:
            try:
                body = decompressed(body, _MOST_BYTES)
            except ValueError as error:
                self._on_failure(UpstreamError(str(error)))
                return
        self._on_answer(head, body)

    def on_failed(self, error: UpstreamError) -> None:
        self._on_failure(error)
