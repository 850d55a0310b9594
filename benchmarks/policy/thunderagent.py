"""ThunderAgent's rule, as NVIDIA Dynamo's plugin has it: programs are paused between their calls, the smallest first.

Every program is bound to a worker, which its calls are sent to. Each 5 s:

    resume   paused programs with a waiting call, then new ones, then idle ones, the smallest first, as many as fit
             below 0.85 of all KV caches; then the largest first, each onto the worker with most tokens left, if it fits
    force    those that have waited for 1,800 s, onto the worker with most room
    pause    on workers above 0.95: idle programs, the smallest first, to 0.80; if that is not enough, each running
             program there after its answer

A program is charged the tokens of its last call and 100 more. A new one waits while any program is paused, or if it
fits on no worker. A final call never waits, and its program is charged no more.

Sources: ai-dynamo/dynamo, lib/router-plugins/builtin/src/thunderagent: request_classifier/scheduler.rs at 862aef42,
and config.rs at 8c8d7353.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from router.admission.admission import Admission
from router.admission.ticket import Ticket
from router.apis.requests import RoutedRequest
from router.fleet.worker import Worker
from router.routing.assignment import Assignment
from router.settings import AdmissionSettings
from simulator.fleet.simulated_router import SimulatedRouter
from simulator.fleet.trace import TracedRequest

_INTERVAL: Final = 5.0
_PAUSE_ABOVE: Final = 0.95
_PAUSE_TO: Final = 0.80
_RESUME_BELOW: Final = 0.85
_LONGEST: Final = 1800.0
_BUFFER: Final = 100


@dataclass(slots=True)
class _Program:
    """A program, which makes one call at a time.

    - `tokens`, `blocks`: those of its last call, with its answer once it has ended.
    - `worker`: where its calls are sent. `acting_since`: when its last answer ended; None while it makes a call.
    - `marked`: it is paused after its answer. `deferred_since`: when its waiting call arrived.
    - `final`: it makes its last call.
    """

    request: TracedRequest
    tokens: int = 0
    blocks: tuple[int, ...] = ()
    worker: Worker | None = None
    acting_since: float | None = None
    paused: bool = False
    marked: bool = False
    final: bool = False
    steps: int = 0
    deferred_since: float = 0.0
    resumed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def group(self) -> tuple[int, int]:
        """The key by which paused programs are sorted."""
        return 1 if self.steps <= 1 else 2 if self.acting_since is not None else 0, self.tokens


class ThunderAgent(Admission):
    """Holds the calls of paused programs before the router's own choice and late binding."""

    def __init__(
        self, router: SimulatedRouter, loop: asyncio.AbstractEventLoop, capacity: int, block_tokens: int, shared: bool
    ) -> None:
        """Create the rule for workers whose caches hold `capacity` tokens.

        - `shared`: blocks that several programs of a worker have are charged once.
        """
        settings = AdmissionSettings(requests=None, programs="off")
        super().__init__(router.selector, router.placement, settings, True, loop.time)
        router.state.load.on_ended.append(self.wake)
        router.state.load.on_first_byte.append(self.wake)
        self._loop = loop
        self._capacity = capacity
        self._block_tokens = block_tokens
        self._shared = shared
        self._workers = router.workers.workers
        self._programs: dict[str, _Program] = {}
        self._paused: set[str] = set()
        loop.call_later(_INTERVAL, self._tick)

    def arrives(self, request: TracedRequest) -> None:
        """Receive the request that is placed next: its program makes a call."""
        program = self._programs.get(request.session)
        if program is None:
            program = self._programs[request.session] = _Program(request)
        program.request = request
        program.steps += 1
        program.tokens, program.blocks = request.input_tokens, request.blocks
        program.acting_since, program.deferred_since = None, self._loop.time()
        program.resumed.clear()
        program.final = request.hints is not None and bool(request.hints.final)
        if program.final:
            program.paused = False
            self._paused.discard(request.session)
        elif not program.paused and program.worker is None:
            free = [each for each in self._workers if self._needs(program, each) <= self._capacity - self._used(each)]
            if (program.steps == 1 and self._paused) or not free:
                program.paused = True
                self._paused.add(request.session)
            else:
                program.worker = min(free, key=self._used)

    def place(
        self, prompt: RoutedRequest, tried: Collection[Worker], ticket: Ticket, now: float | None = None
    ) -> Assignment | None:
        """Return the assignment of a program that is not paused; None if its call waits."""
        if not prompt.session:
            return super().place(prompt, tried, ticket, now)
        program = self._programs[prompt.session or ""]
        if program.paused:
            return None
        return self._bound(program, super().place(prompt, [*tried, *self._others(program)], ticket, now))

    async def wait(self, prompt: RoutedRequest, tried: Collection[Worker], ticket: Ticket) -> Assignment:
        """Return the assignment of a call once its program is resumed and its worker is free."""
        if not prompt.session:
            return await super().wait(prompt, tried, ticket)
        program = self._programs[prompt.session or ""]
        if program.paused:
            await program.resumed.wait()
        assignment = super().place(prompt, [*tried, *self._others(program)], ticket)
        if assignment is None:
            assignment = await super().wait(prompt, [*tried, *self._others(program)], ticket)
        self._bound(program, assignment)
        return assignment

    def _others(self, program: _Program) -> list[Worker]:
        return [] if program.worker is None else [each for each in self._workers if each is not program.worker]

    def _bound(self, program: _Program, assignment: Assignment | None) -> Assignment | None:
        if assignment is not None:
            assignment.on_release.append(partial(self._ended, program))
        return assignment

    def _ended(self, program: _Program, failed: bool = False) -> None:  # noqa: ARG002
        """Let a program act, or forget it after its final call."""
        request = program.request
        if program.final:
            del self._programs[request.session]
            return
        program.tokens = request.input_tokens + request.output_tokens
        program.blocks, program.acting_since = request.finished, self._loop.time()
        if program.marked:
            program.marked = False
            self._pause(request.session, program)

    def _pause(self, session: str, program: _Program) -> None:
        program.paused, program.worker = True, None
        self._paused.add(session)

    def _resume(self, session: str, program: _Program, worker: Worker) -> None:
        program.paused, program.worker = False, worker
        self._paused.discard(session)
        program.resumed.set()

    def _active(self, worker: Worker) -> list[tuple[str, _Program]]:
        programs = self._programs.items()
        return [(name, each) for name, each in programs if each.worker is worker and not each.paused and not each.final]

    def _held(self, worker: Worker) -> set[int]:
        return set().union(*[program.blocks for _, program in self._active(worker)])

    def _used(self, worker: Worker) -> int:
        """Return the tokens that a worker's programs are charged."""
        programs = [program for _, program in self._active(worker)]
        if not self._shared:
            return sum(program.tokens + _BUFFER for program in programs)
        rest = sum(program.tokens - len(program.blocks) * self._block_tokens + _BUFFER for program in programs)
        return len(self._held(worker)) * self._block_tokens + rest

    def _needs(self, program: _Program, worker: Worker) -> int:
        """Return the tokens that a worker would be charged for one more program."""
        shared = len(self._held(worker).intersection(program.blocks)) if self._shared else 0
        return program.tokens + _BUFFER - shared * self._block_tokens

    def _tick(self) -> None:
        self._loop.call_later(_INTERVAL, self._tick)
        now = self._loop.time()
        for name, program in list(self._programs.items()):
            if program.acting_since is not None and now >= program.acting_since + _LONGEST:
                del self._programs[name]
                self._paused.discard(name)
        self._resume_smallest()
        for name in list(self._paused):
            program = self._programs[name]
            if program.acting_since is None and now >= program.deferred_since + _LONGEST:
                self._resume(name, program, min(self._workers, key=self._used))
        for worker in self._workers:
            self._pause_until_safe(worker)

    def _resume_smallest(self) -> None:
        left = [(_RESUME_BELOW * self._capacity - self._used(each), each) for each in self._workers]
        left = [each for each in left if each[0] > _BUFFER]
        total, chosen = sum(tokens for tokens, _ in left), list[str]()
        for name in sorted(self._paused, key=lambda name: self._programs[name].group):
            needed = min([self._needs(self._programs[name], worker) for _, worker in left], default=total + 1)
            if needed <= total:
                total -= needed
                chosen.append(name)
        for name in sorted(chosen, key=lambda name: -self._programs[name].tokens):
            program = self._programs[name]
            left.sort(key=lambda each: -each[0])
            for place, (tokens, worker) in enumerate(left):
                if (needed := self._needs(program, worker)) <= tokens:
                    self._resume(name, program, worker)
                    left[place] = tokens - needed, worker
                    break

    def _pause_until_safe(self, worker: Worker) -> None:
        if self._used(worker) <= _PAUSE_ABOVE * self._capacity:
            return
        active = sorted(self._active(worker), key=lambda each: each[1].tokens)
        for name, program in active:
            if self._used(worker) <= _PAUSE_TO * self._capacity:
                return
            if program.acting_since is not None and not program.marked:
                self._pause(name, program)
        if self._used(worker) > _PAUSE_TO * self._capacity:
            for _, program in active:
                program.marked = program.marked or program.acting_since is None
