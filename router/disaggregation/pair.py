"""Two requests for one: a prompt's prefill on one worker, its decode on another, raced and closed together.

    (asked) ──▶ prefill and decode at once            ──▶ the decode's answer is passed on
            └─▶ prefill ──answered──▶ decode          ──┘

Only the decode's answer is passed on; the prefill's is drained, or read where it tells how to go on. Until the decode's
first byte a failing prefill ends both. What the prefill refuses as the client's fault is the client's answer.
"""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import urlsplit

from router.disaggregation.adapters import Adapter, AnsweredError, Part
from router.fleet.health import Outcome
from router.forwarding.carrier import Carried, Carrier
from router.routing.placement import Placement
from router.upstream import AnswerHead, Leg, Receiver, UpstreamError, Upstreams
from router.upstream.origin import Headers, forwarded_lines

_MAX_ANSWER = 16 * 2**20  # of a prefill, where it is read


class PrefillFailedError(UpstreamError):
    """The prefill worker failed; the decode worker did not.

    `answered`: it can be reached, and said that it failed. `together`: both ran at once, so that the decode worker may
    be why.
    """

    def __init__(self, problem: str, answered: bool, together: bool) -> None:
        super().__init__(problem)
        self.answered = answered
        self.together = together


class Pair(Receiver):
    """The requests to the two workers of a placement. To the exchange it is one request, which `receiver` hears of."""

    def __init__(
        self,
        receiver: Receiver,
        upstreams: Upstreams,
        placement: Placement,
        adapter: Adapter,
        target: bytes,
        headers: Headers,
        prefilled: Callable[[], None],
        carrier: Carrier | None = None,
    ) -> None:
        """`prefilled` is told when the prefill is done, and the decode is what is waited for.

        `carrier`: who sends the decode, if not the router itself.
        """
        assert placement.prefill is not None
        self._receiver: Receiver | None = receiver
        self._upstreams = upstreams
        self._adapter = adapter
        self._target = target
        self._headers = headers
        self._done = prefilled
        self._carrier = carrier
        self._decode_worker = placement.worker
        self._prefill_placement = placement.prefill
        self._prefill: Leg | None = None
        self._decode: Carried | None = None
        self._begun = False  # something of the decode's answer came
        self._paused = False
        self._asking: Leg | None = None

    def start(self) -> None:
        """Send what can be sent now. Raises RequestError for a body that cannot be changed."""
        if question := self._adapter.question:
            self._ask(question)
        else:
            self._send_first()

    def pause(self) -> None:
        """Read no more of the answer for now."""
        self._paused = True
        if self._decode is not None:
            self._decode.pause()

    def resume(self) -> None:
        """Read on."""
        self._paused = False
        if self._decode is not None:
            self._decode.resume()

    @property
    def answering(self) -> Carried | None:
        """The request whose answer is the client's; None while there is none."""
        return self._decode

    def abort(self) -> None:
        """Call both off. The receiver hears nothing more."""
        self._receiver = None
        ended = [
            url
            for url, leg in (
                (self._prefill_placement.worker.url, self._prefill),
                (self._decode_worker.url, self._decode),
            )
            if leg is not None
        ]
        self._close()
        if ended and (part := self._adapter.abort) is not None:
            lines = forwarded_lines(part.headers)
            for url in ended:
                self._upstreams.of(url).send(_Nobody(), "POST", b"/abort_request", lines, part.body)

    def _ask(self, question: str) -> None:
        place = urlsplit(question)
        upstream = self._upstreams.of(f"{place.scheme}://{place.netloc}")

        def learned(head: AnswerHead, body: bytes) -> None:
            self._asking = None
            if head.status != 200:
                self._prefill_failed(f"{question} answers {head.status}")
                return
            try:
                self._adapter.learn(body)
            except ValueError as error:
                self._prefill_failed(f"{question}: an answer that makes no sense: {error}")
                return
            self._send_first()

        def failed(reason: str) -> None:
            self._asking = None
            self._prefill_failed(f"{question}: {reason}")

        self._asking = upstream.send(_Collected(learned, failed), "GET", place.path.encode(), b"", b"")

    def _send_first(self) -> None:
        adapter = self._adapter
        if adapter.prefills:
            self._prefill = self._send(
                self._prefill_placement.worker.url,
                adapter.prefill(),
                _Collected(self._prefilled, self._prefill_failed, kept=not adapter.concurrent),
            )
        if adapter.concurrent:
            self._send_decode(b"")

    def _send_decode(self, prefilled: bytes) -> None:
        part = self._adapter.decode(prefilled)
        if self._carrier is None:
            self._decode = self._send(self._decode_worker.url, part, self)
        else:
            self._decode = self._carrier.send(self._decode_worker, self, self._headers_of(part), part.body)
        if self._paused:
            self._decode.pause()

    def _send(self, url: str, part: Part, receiver: Receiver) -> Leg:
        lines = forwarded_lines(self._headers_of(part))
        return self._upstreams.of(url).send(receiver, "POST", self._target, lines, part.body)

    def _headers_of(self, part: Part) -> Headers:
        return [each for each in self._headers if each[0] not in {name for name, _ in part.headers}] + part.headers

    # What the prefill answers

    def _prefilled(self, head: AnswerHead, body: bytes) -> None:
        self._prefill = None
        placement = self._prefill_placement
        placement.attempt.heard()
        if head.status >= 500:
            if self._adapter.concurrent:  # perhaps because the decode worker failed it
                placement.attempt.end(Outcome.NEITHER, f"status {head.status}")
            self._prefill_failed(f"status {head.status}", answered=True)
            return
        placement.attempt.end(Outcome.SUCCEEDED if head.status < 400 else Outcome.NEITHER, f"status {head.status}")
        placement.first_byte()
        placement.release()
        if self._receiver is None or self._begun:
            return
        if head.status >= 400:
            self._answer(head, body)
            return
        self._done()
        if not self._adapter.concurrent:
            try:
                self._send_decode(body)
            except AnsweredError as answered:
                self._answer(AnswerHead(200, [(b"content-type", answered.content_type)]), answered.body)
            except ValueError as error:
                self._prefill_failed(f"an answer that makes no sense: {error}")

    def _prefill_failed(self, reason: str, answered: bool = False) -> None:
        self._prefill = None
        self._prefill_placement.attempt.end(Outcome.FAILED, reason)
        if self._begun:
            return  # what the decode needed of it has come
        receiver, self._receiver = self._receiver, None
        self._close()
        if receiver is not None:
            problem = f"prefill on {self._prefill_placement.worker.url}: {reason}"
            receiver.failed(PrefillFailedError(problem, answered, self._adapter.concurrent))

    def _answer(self, head: AnswerHead, body: bytes) -> None:
        """The prefill's answer is the client's."""
        receiver, self._receiver = self._receiver, None
        self._close()
        if receiver is not None:
            receiver.answered(head, body, True)

    # What the decode answers

    def answered(self, head: AnswerHead, data: bytes, ended: bool) -> None:
        """The decode's answer begins."""
        self._heard(data, ended)
        if self._receiver is not None:
            self._receiver.answered(head, data, ended)

    def more(self, data: bytes, ended: bool) -> None:
        """More of it came."""
        self._heard(data, ended)
        if self._receiver is not None:
            self._receiver.more(data, ended)

    def failed(self, error: UpstreamError) -> None:
        """The decode worker failed: the prefill is called off too."""
        self._decode = None
        receiver, self._receiver = self._receiver, None
        self._close()
        if receiver is not None:
            receiver.failed(error)

    def _heard(self, data: bytes, ended: bool) -> None:
        if not self._begun and (data or ended):
            self._begun = True
            self._prefill_placement.first_byte()
        if ended:
            self._decode = None
            self._close()

    def _close(self) -> None:
        for leg in (self._asking, self._prefill, self._decode):
            if leg is not None:
                leg.abort()
        self._asking = self._prefill = self._decode = None


class _Collected(Receiver):
    """Gathers an answer; `kept`: its body too, else only that of a refusal."""

    def __init__(
        self,
        done: Callable[[AnswerHead, bytes], None],
        failed: Callable[[str], None],
        kept: bool = True,
    ) -> None:
        self._done = done
        self._failed = failed
        self._kept = kept
        self._head: AnswerHead | None = None
        self._body = bytearray()

    def answered(self, head: AnswerHead, data: bytes, ended: bool) -> None:
        self._head = head
        self.more(data, ended)

    def more(self, data: bytes, ended: bool) -> None:
        assert self._head is not None
        if self._kept or self._head.status >= 400:
            self._body += data
        if len(self._body) > _MAX_ANSWER:
            self._failed(f"an answer of more than {_MAX_ANSWER} bytes")
        elif ended:
            self._done(self._head, bytes(self._body))

    def failed(self, error: UpstreamError) -> None:
        self._failed(str(error))


class _Nobody(Receiver):
    """Does not wait for an answer."""

    def answered(self, head: AnswerHead, data: bytes, ended: bool) -> None:
        """Nothing is done with it."""

    def more(self, data: bytes, ended: bool) -> None:
        """Nothing is done with it."""

    def failed(self, error: UpstreamError) -> None:
        """Nobody minds."""
