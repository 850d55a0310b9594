"""A request to the index API, which is answered in this process.

It is answered at once, unless its body may cause too much work or its prompt is tokenized in a thread.
"""

from __future__ import annotations

import asyncio
from typing import Final

import structlog

from http_api.errors import RequestError
from indexer.api.questions import Answer
from router.forwarding.exchange import ResponseWriter, ServedRequest
from router.forwarding.request_context import RequestContext
from router.http.headers import ResponseHead

log = structlog.get_logger()

_HEAD: Final = ResponseHead(200, [(b"content-type", b"application/json")])


class AskedQuestion(ServedRequest):
    """One request to the index API. Its response is written as a whole."""

    def __init__(self, context: RequestContext, client: ResponseWriter, answer: Answer) -> None:
        self._context = context
        self._client = client
        self._answer = answer
        self._later: asyncio.Future[bytes] | None = None  # an answer that is not ready yet

    def start(self, body: bytes) -> None:
        try:
            little = self._context.bodies.clearly_within_limits(body)
            answer = self._answer(body) if little else self._check_and_answer(body)
        except RequestError as error:
            self._refuse(error)
        except Exception:
            self._crash()
        else:
            if isinstance(answer, bytes):
                self._client.begin(_HEAD, None, answer, True)
            else:
                with self._context.logging():  # the task copies the context
                    self._later = asyncio.ensure_future(answer)
                self._later.add_done_callback(self._answered)

    async def _check_and_answer(self, body: bytes) -> bytes:
        """Return the answer for a long body. Raises RequestError (413) if it has too many values."""
        await asyncio.to_thread(self._context.bodies.check_amount, body)
        answer = self._answer(body)
        return answer if isinstance(answer, bytes) else await answer

    def _answered(self, later: asyncio.Future[bytes]) -> None:
        if later.cancelled():  # the client disconnected
            return
        try:
            data = later.result()
        except RequestError as error:
            self._refuse(error)
        except Exception:
            self._crash()
        else:
            self._client.begin(_HEAD, None, data, True)

    def _refuse(self, error: RequestError) -> None:
        headers, body = self._context.refusal(error)
        self._client.begin(ResponseHead(error.status, headers), None, body, True)

    def _crash(self) -> None:
        with self._context.logging():
            log.exception("question failed")
        self._refuse(RequestError("The router failed. This is a bug.", status=500, type="internal_error"))

    def client_disconnected(self) -> None:
        if self._later is not None:
            self._later.cancel()

    def pause(self) -> None:
        """Ignore it, because the response is written at once."""

    def resume(self) -> None:
        """Ignore it, because the response is written at once."""

    @property
    def answering(self) -> bool:
        return False
