"""Reservations: the load of requests that another program sends, from the choice until their release.

A reservation ends once, by the first of these events:

- Its caller releases it.
- Its caller reports nothing for `expiry` seconds. Each report starts this time again.
- Its worker is removed.

The prefill's share of the load ends with the report of the first token, or at the expected end of the prefill.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Collection
from types import TracebackType
from typing import Final, Self
from uuid import uuid4

from http_api.errors import RequestError
from router.admission.admission import Admission
from router.admission.ticket import Ticket
from router.apis.requests import RoutedRequest
from router.apis.usage import Usage
from router.fleet.fleet import Fleet
from router.fleet.health import Outcome
from router.fleet.worker import Worker
from router.prediction.slo import SLO
from router.routing.assignment import Assignment, Selection
from router.routing.build import Routing
from router.routing.target_directory import unavailable

# Seconds without a report after which a reservation ends.
EXPIRY: Final = 300.0
MOST_RESERVATIONS: Final = 100_000
LONGEST_ID: Final = 512


class Reservation:
    """The reserved load of one request, until `release`. Its methods may be called from any thread, and repeatedly.

    As a context manager it is released at the end of the block.
    """

    def __init__(
        self,
        id: str,
        assignment: Assignment,
        routing: Routing,
        expiry: float,
        forget: Callable[[Reservation], None],
        clock: Callable[[], float],
    ) -> None:
        """Hold an assignment. `forget`: called once, when the reservation ends. `expiry`: seconds without a report."""
        self.id = id
        self.selection: Selection = assignment.selection
        self.assignment = assignment
        self.expiry = expiry
        self.output_tokens = 0
        self.ended = False
        self._routing = routing
        self._forget = forget
        self._clock = clock
        self._loop = loop = asyncio.get_running_loop()
        self._reported_at = clock()
        self._expiring = loop.call_later(expiry, self._check_expiry)
        # Sum of the predicted prefills on the target, its own included.
        self._prefill = loop.call_later(assignment.reservation.backlog, self._prefill_expected)
        assignment.attempt.waits_for_another()  # a worker is not judged by first bytes that no one reports

    @property
    def worker(self) -> Worker:
        return self.assignment.worker

    def first_token(self) -> None:
        """Report the first token, which ends the prefill."""
        self._call(self._first_token)

    def progress(self, output_tokens: int | None = None) -> None:
        """Report that the request runs. `output_tokens`: the tokens of its answer so far; None: not known."""
        self._call(lambda: self._progress(output_tokens))

    def release(
        self, *, prompt_tokens: int | None = None, cached_tokens: int | None = None, failed: bool = False
    ) -> None:
        """Release the load. Only the first call counts.

        - `prompt_tokens`: the tokens of the prompt as the engine counted them; None: as they were counted here.
        - `cached_tokens`: the prompt tokens that the engine had cached; None: not known.
        - `failed`: the worker failed. Several failures eject it.
        """
        outcome = Outcome.FAILED if failed else Outcome.SUCCEEDED
        self._call(lambda: self._end(outcome, prompt_tokens, cached_tokens))

    def drop(self) -> None:
        """Release the load of a request whose outcome is unknown. Only the first call counts."""
        self._call(lambda: self._end(Outcome.NEITHER))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.drop() if kind is not None else self.release()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)

    def _call(self, action: Callable[[], None]) -> None:
        """Call `action` in the event loop of the reservation: at once if this thread runs it."""
        try:
            here = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            here = False
        if here:
            action()
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(action)

    def _first_token(self) -> None:
        if not self.ended:
            now = self._reported()
            self._prefill.cancel()
            self.assignment.first_byte(now)

    def _progress(self, output_tokens: int | None) -> None:
        if not self.ended:
            self._reported()
            if output_tokens is not None:
                self.output_tokens = max(output_tokens, self.output_tokens)

    def _reported(self) -> float:
        self._reported_at = now = self._clock()
        self.assignment.attempt.heard(now)
        return now

    def _prefill_expected(self) -> None:
        self.assignment.reservation.first_byte()

    def _check_expiry(self) -> None:
        left = self._reported_at + self.expiry - self._clock()
        if left <= 0:
            self._end(Outcome.NEITHER)
        else:
            self._expiring = self._loop.call_later(left, self._check_expiry)

    def _end(self, outcome: Outcome, prompt_tokens: int | None = None, cached_tokens: int | None = None) -> None:
        if self.ended:
            return
        self.ended = True
        self._expiring.cancel()
        self._prefill.cancel()
        assignment = self.assignment
        try:
            assignment.attempt.end(outcome, "reported by its caller")
            if outcome is Outcome.SUCCEEDED:
                self._routing.placement.answered(assignment, self._usage(prompt_tokens, cached_tokens))
        finally:
            assignment.release()
            self._forget(self)

    def _usage(self, prompt_tokens: int | None, cached_tokens: int | None) -> Usage | None:
        if cached_tokens is None:
            return None
        prediction = self.assignment.cache_prediction
        if prompt_tokens is None:
            prompt_tokens = prediction.tokens if prediction is not None else cached_tokens
        return Usage(prompt_tokens, self.output_tokens, cached_tokens)


class Reservations:
    """Chooses and reserves for requests that another program sends. One event loop uses it."""

    def __init__(
        self,
        fleet: Fleet,
        routing: Routing,
        admission: Admission,
        expiry: float,
        most: int = MOST_RESERVATIONS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Hold no reservation yet. `expiry`: seconds without a report. `most`: maximum number of reservations."""
        self._fleet = fleet
        self._routing = routing
        self._admission = admission
        self._expiry = expiry
        self._most = most
        self._clock = clock
        self._held: dict[str, Reservation] = {}
        self._claimed: set[str] = set()  # ids of requests that are read or wait
        self._closed = False

    def __len__(self) -> int:
        return len(self._held)

    def get(self, id: str) -> Reservation | None:
        """Return the reservation with this id; None if it does not exist."""
        return self._held.get(id)

    async def select(
        self, request: RoutedRequest, excluded: Collection[Worker] = (), slo: SLO | None = None, size: int = 0
    ) -> Selection:
        """Return the selection for a request, whatever the load. Raises RequestError (404, 503)."""
        await self._read(request, size)
        selection = self._routing.selector.choose(request, excluded, slo=slo)
        assert selection is not None  # only limits make it None
        return selection

    async def reserve(
        self,
        request: RoutedRequest,
        id: str | None = None,
        excluded: Collection[Worker] = (),
        *,
        wait: float = 0.0,
        slo: SLO | None = None,
        size: int = 0,
        expiry: float | None = None,
        limited: bool = True,
    ) -> Reservation:
        """Choose a target for a request and reserve its load in the same step.

        - `id`: the id of the reservation; None: a new one.
        - `wait`: seconds to wait for capacity.
        - `size`: the bytes of its body.
        - `expiry`: seconds without a report; None: as in the settings.
        - `limited`: whether the limits of targets count.

        Raises RequestError: 404 for an unknown model, 409 for an id that is held, 429 without capacity, 503 without
        a worker.
        """
        expiry = self._expiry if expiry is None else expiry
        _check_seconds("wait", wait, least=0.0)
        _check_seconds("expiry", expiry, least=0.001)
        id = self._claim(id)
        try:
            await self._read(request, size)
            if limited:
                assignment = await self._placed(request, excluded, wait, slo, size)
            else:
                assignment = self._routing.placement.place(request, excluded)
            # No await from here on: a cancelled caller leaves nothing behind.
            try:
                return self._hold(id, request, assignment, expiry)
            except BaseException:
                assignment.release()
                raise
        finally:
            self._claimed.discard(id)

    def _hold(self, id: str, request: RoutedRequest, assignment: Assignment, expiry: float) -> Reservation:
        if self._closed:
            raise RequestError("The selector is closed.", status=503, type="service_unavailable", code="closed")
        gone = [worker.name for worker in _workers(assignment) if self._fleet.at(worker.url) is not worker]
        if gone:  # removed between the end of the wait and now
            raise unavailable(f"Worker {gone[0]!r} was removed.")
        self._routing.placement.record_in_flight(request, assignment)
        held = Reservation(id, assignment, self._routing, expiry, self._forget, self._clock)
        self._held[id] = held
        return held

    def worker_removed(self, worker: Worker) -> None:
        """End the reservations of a worker that was removed. A later release has no effect."""
        for held in [held for held in self._held.values() if worker in _workers(held.assignment)]:
            held.drop()

    def close(self) -> None:
        """End all reservations, and refuse new ones."""
        self._closed = True
        for held in list(self._held.values()):
            held.drop()

    def _claim(self, id: str | None) -> str:
        id = uuid4().hex if id is None else id
        if not 0 < len(id) <= LONGEST_ID:
            raise RequestError(f"id: {len(id)} characters are not from 1 to {LONGEST_ID}.", param="id")
        if id in self._held or id in self._claimed:
            raise RequestError(
                f"Reservation {id!r} is held. Release it first, or choose another id.",
                status=409,
                param="id",
                code="reservation_held",
            )
        if len(self._held) + len(self._claimed) >= self._most:
            raise RequestError(
                f"{self._most} reservations are held. Release some of them first.",
                status=429,
                type="rate_limit_error",
                code="too_many_reservations",
                retry_after=1,
            )
        self._claimed.add(id)
        return id

    async def _read(self, request: RoutedRequest, size: int) -> None:
        """Tokenize a request's prompt. Raises RequestError (400) if that needs a tokenizer that is not known."""
        await self._routing.reader.read(request, size)
        untokenized = request.prompt is not None and not request.token_ids
        if request.by_text or (untokenized and self._routing.state.needs_prompts):
            raise RequestError(
                f"The prompt has no token ids, and no tokenizer of model {request.name!r} is loaded. Send token_ids, "
                f"or set models.{request.name}.tokenizer.",
                param="prompt",
                code="tokens_needed",
            )
        request.prompt = None  # its texts are no longer needed

    async def _placed(
        self, request: RoutedRequest, excluded: Collection[Worker], wait: float, slo: SLO | None, size: int
    ) -> Assignment:
        """Return the assignment of a request, within the limits of targets. Raises RequestError."""
        ticket = Ticket(request.priority, "", None, request.tokens, size, self._clock(), slo=slo, hints=request.hints)
        assignment = self._admission.place(request, excluded, ticket)
        if assignment is not None:
            return assignment
        if wait:
            try:
                async with asyncio.timeout(wait) as limit:
                    return await self._admission.wait(request, excluded, ticket)
            except TimeoutError:
                if not limit.expired():
                    raise
        # Late binding holds a request although its target has capacity.
        selection = self._routing.selector.choose(request, excluded, self._admission.limits, slo=ticket.slo)
        if selection is None:
            queue = self._admission.queue
            ahead = queue.ahead_of(ticket.priority)
            raise self._admission.refusals.too_many("saturated", request.name, ticket, queue.length, ahead)
        return self._routing.placement.reserve(request, selection)

    def _forget(self, held: Reservation) -> None:
        self._held.pop(held.id, None)


def _workers(assignment: Assignment) -> list[Worker]:
    prefill = assignment.prefill
    return [assignment.worker] if prefill is None else [assignment.worker, prefill.worker]


def _check_seconds(name: str, seconds: float, least: float) -> None:
    if not (math.isfinite(seconds) and least <= seconds <= 604_800):
        raise RequestError(f"{name}: {seconds} is not from {least:g} to 604800 seconds.", param=name)
