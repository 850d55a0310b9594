"""The records of sessions: where each one's context was computed last, and until when it counts as live.

A session is one chain of prompts, of an agent or a thread. It is live while a call is in flight, and for the learned
pause after its last answer. A live session is charged to the target of its last call, by the router that sent it. It
ends by the last header, by `/finish_session`, or `FORGOTTEN_SECONDS` after its last call.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Final

from indexer import Target
from router.apis.requests import RoutedRequest
from router.programs.records import Call, Session, SessionKey, key_of, number_of
from router.programs.working_sets import NO_CONTEXT, WorkingSet, continues, move

# Seconds without a call after which a session is forgotten.
FORGOTTEN_SECONDS: Final = 1800.0
# The bounds of the seconds for which an idle session counts as live.
SHORTEST_IDLE: Final = 5.0
LONGEST_IDLE: Final = 60.0
# The share of pauses that end within these seconds, and the pauses that they are read from.
_RETURNS: Final = 0.95
_PAUSES: Final = 256
_FEWEST_PAUSES: Final = 16
# The most records, and the most marks of all their contexts: 2^22 are a thousand million tokens in 32 MiB.
_MOST_SESSIONS: Final = 1 << 16
_MOST_MARKS: Final = 1 << 22
# Overlapping calls under one name that do not extend its prompt, less those that do: at this number it is the name of
# many callers, not of a session.
_STRANGERS: Final = 3


class Sessions:
    """The records of the last `_MOST_SESSIONS` sessions, and the working sets of all targets."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.working_sets: dict[Target, WorkingSet] = {}
        self.turn = 0.0  # the mean tokens that a turn adds to a context
        self.answer = 0.0  # the mean tokens of an answer
        self._clock = clock
        self._of_rank: dict[tuple[str, int], list[WorkingSet]] = {}
        self._records: OrderedDict[int, Session] = OrderedDict()
        self._named: dict[str, set[int]] = {}
        self._live_programs: Counter[tuple[str, str]] = Counter()  # charged sessions of each
        self._sizes: dict[str, float] = {}  # the last mean size of a session, by model
        self._marks = 0  # of all contexts
        self._idle: list[tuple[float, int, Session]] = []
        self._numbers = count()
        self._pauses: deque[float] = deque(maxlen=_PAUSES)
        self._unread_pauses = 0
        self._idle_seconds = LONGEST_IDLE

    def __len__(self) -> int:
        return len(self._records)

    def call_of(self, prompt: RoutedRequest, tenant: str) -> Call | None:
        """Return a request that arrives now as a call of its session.

        Return None for names of users or of many callers, and where prompts are not known.
        """
        key, identity, hints = key_of(prompt, tenant), prompt.identity, prompt.hints
        if key is None or identity is None:
            return None
        final, next_call = (False, None) if hints is None else (bool(hints.final), hints.next_call)
        call = self.call(key, prompt.tokens, final, next_call, identity.program)
        if call is not None and hints is not None:
            call.returns = hints.returns
        return call

    def call(
        self, key: SessionKey, tokens: int, final: bool, next_call: float | None = None, program: str | None = None
    ) -> Call | None:
        """Return a call of a session that arrives now; None for names that many callers share.

        - `next_call`: the announced seconds from its answer to the session's next call; None: not announced.
        - `program`: the run that the session belongs to; None for its own.
        """
        now, number = self.expire(), number_of(key)
        session = self._records.get(number)
        if session is None:
            session = self._add(number)
        if not session.name:
            session.name, session.program = key[3], (key[0], program or key[3])
            self._named.setdefault(session.name, set()).add(number)
        self._records.move_to_end(number)
        session.seen_at = now
        if session.shared:
            return None
        call = Call(self.ended, session, tokens, final, next_call)
        call.subagent = not session.begun and session.program in self._live_programs
        return call

    def sent(self, call: Call, target: Target, context: array[int], prefill: Target | None = None) -> None:
        """Charge a call's session to the target that it is sent to, and to the `prefill` worker's, if there is one."""
        session = self._records.get(call.session.number)
        if session is None:  # it was dropped while the call waited, perhaps with another call in flight
            session = self._add(call.session.number, call.session.name, call.session.program)
        call.session = session
        if session.shared or (session.calls and self._is_stranger(session, context)):
            return
        if not session.calls and session.ended_at:
            self._learn_pause(session.seen_at - session.ended_at)
        call.known = session.tokens - session.answer
        if session.tokens and not session.calls and call.tokens > call.known:
            self.turn = _mean(self.turn, call.tokens - call.known)
        session.calls += 1
        self._charge(session, target, prefill, context, call.tokens if call.returns else 0)
        session.tokens, session.answer = call.tokens, 0
        self._keep_within_bounds()

    def heard(self, number: int, target: Target, tokens: int, context: array[int]) -> None:
        """Record that another router sent a call of a session, which is charged there from now on."""
        now, session = self._clock(), self._records.get(number)
        if session is None:
            session = self._add(number)
        elif session.shared or session.calls:
            return
        elif session.ended_at:
            self._learn_pause(now - session.ended_at)
        self._records.move_to_end(number)
        self._discharge(session)
        self._replace_context(session, context)
        session.tokens, session.answer, session.target = tokens, 0, target
        session.seen_at, session.ended_at = now, 0.0
        self._keep_within_bounds()

    def ended(self, call: Call, failed: bool) -> None:
        """End a call: its session is idle from now on, or it ends with its final call.

        `failed`: its prompt was not computed, so the session has the context that it had before.
        """
        session = call.session
        if session.shared or self._records.get(session.number) is not session or not session.calls:
            return
        session.calls -= 1
        last = session.tokens == call.tokens
        if failed and last:
            session.tokens = min(call.known, session.tokens)
        elif not failed and call.output:
            self.answer = _mean(self.answer, call.output)
            if last:
                session.answer = call.output
                session.tokens += call.output
                if session.charged is not None:
                    session.charged.answered(call.output)
        session.ended_at = now = self._clock()
        if session.calls:
            return
        if call.final or not session.tokens:
            self.drop(session.number)
            return
        session.until = now + self._idle_after(call.next_call)
        heappush(self._idle, (session.until, next(self._numbers), session))
        if len(self._idle) > 2 * _MOST_SESSIONS:
            self._idle = [each for each in self._idle if each[2].until == each[0] and each[2].charged is not None]
            heapify(self._idle)

    def expire(self) -> float:
        """Stop charging sessions that did not return in time, forget those without a call for long; return the time."""
        now = self._clock()
        while self._idle and self._idle[0][0] <= now:
            until, _, session = heappop(self._idle)
            if session.until == until and not session.calls:
                self._discharge(session)
        while self._records:
            first = next(iter(self._records.values()))
            if first.calls:
                self._records.move_to_end(first.number)
                break
            if first.seen_at + FORGOTTEN_SECONDS > now:
                break
            self.drop(first.number)
        return now

    def drop(self, number: int) -> None:
        """Forget a session."""
        session = self._records.pop(number, None)
        if session is None:
            return
        self._discharge(session)
        self._replace_context(session, NO_CONTEXT)
        session.tokens = session.answer = 0
        if session.name:
            numbers = self._named[session.name]
            numbers.discard(number)
            if not numbers:
                del self._named[session.name]

    def finish(self, name: str) -> None:
        """Forget the sessions of a name, of all tenants and models."""
        for number in list(self._named.get(name, ())):
            self.drop(number)

    def forget(self, targets: Collection[Target]) -> None:
        """Forget what targets hold, because they were removed or their cache was cleared. Their sessions are cold."""
        dropped = [self.working_sets.pop(target) for target in targets if target in self.working_sets]
        if not dropped:
            return
        for target in targets:
            rank = target.worker, target.dp_rank
            if left := [each for each in self._of_rank.pop(rank, ()) if each not in dropped]:
                self._of_rank[rank] = left
        for session in self._records.values():
            if session.charged in dropped:
                self._discharge(session)
            if session.prefill in dropped:
                session.prefill = None
            if session.target in targets:
                session.target = None

    def returning(self, target: Target) -> int:
        """Return the tokens on a target that sessions announced to ask for again."""
        working_set = self.working_sets.get(target)
        return 0 if working_set is None else working_set.announced

    def live(self) -> Counter[str]:
        """Return the number of live sessions by model."""
        live: Counter[str] = Counter()
        for target, working_set in self.working_sets.items():
            if not working_set.prefill:
                live[target.model] += working_set.sessions
        return live

    def needs(self, worker: str, dp_rank: int) -> float:
        """Return the tokens that live sessions need on a DP rank, with a turn of each."""
        sets = self._of_rank.get((worker, dp_rank), ())
        return sum([working_set.tokens + self.turn * working_set.sessions for working_set in sets])

    def size(self, model: str) -> float:
        """Return the mean tokens of a model's live sessions, shared ones once, or of its last ones; 0 for none yet."""
        sets = [each for target, each in self.working_sets.items() if target.model == model and not each.prefill]
        live = sum(working_set.sessions for working_set in sets)
        if live:
            self._sizes[model] = sum(working_set.tokens for working_set in sets) / live
        return self._sizes.get(model, 0.0)

    def state(self, session: Session) -> str:
        """Return the state of a session: new, running, idle while it is charged, lapsed, or shared by many callers."""
        if session.shared:
            return "shared"
        if session.calls:
            return "running"
        if session.charged is not None:
            return "idle"
        return "lapsed" if session.tokens else "new"

    def seen(self, key: SessionKey) -> Session:
        """Return the record of a session, or that of a new one, which is not kept."""
        number = number_of(key)
        return self._records.get(number) or Session(number)

    def _charge(
        self, session: Session, target: Target, prefill: Target | None, context: array[int], announced: int
    ) -> None:
        before, charged = session.charged, self._working_set(target)
        computed = None if prefill is None else self._working_set(prefill, prefill=True)
        if before is None:
            self._live_programs[session.program] += 1
        else:
            before.answered(-session.answer)
            before.announced -= session.announced
        charged.announced += announced
        session.announced = announced
        move(before, charged, session.context, context)
        move(session.prefill, computed, session.context, context)
        session.charged, session.prefill, session.target = charged, computed, target
        self._replace_context(session, context)

    def _discharge(self, session: Session) -> None:
        """Charge a session no more."""
        charged, prefill = session.charged, session.prefill
        if charged is None:
            return
        charged.answered(-session.answer)
        charged.announced -= session.announced
        session.announced = 0
        move(charged, None, session.context, NO_CONTEXT)
        move(prefill, None, session.context, NO_CONTEXT)
        session.charged = session.prefill = None
        self._live_programs[session.program] -= 1
        if not self._live_programs[session.program]:
            del self._live_programs[session.program]

    def _working_set(self, target: Target, prefill: bool = False) -> WorkingSet:
        found = self.working_sets.get(target)
        if found is None:
            found = self.working_sets[target] = WorkingSet(prefill)
            self._of_rank.setdefault((target.worker, target.dp_rank), []).append(found)
        return found

    def _replace_context(self, session: Session, context: array[int]) -> None:
        self._marks += len(context) - len(session.context)
        session.context = context

    def _add(self, number: int, name: str = "", program: tuple[str, str] = ("", "")) -> Session:
        session = self._records[number] = Session(number)
        session.name, session.program = name, program
        if name:
            self._named.setdefault(name, set()).add(number)
        self._keep_within_bounds()
        return session

    def _keep_within_bounds(self) -> None:
        while len(self._records) > _MOST_SESSIONS or (self._marks > _MOST_MARKS and len(self._records) > 1):
            self.drop(next(iter(self._records)))

    def _idle_after(self, next_call: float | None) -> float:
        """Return the seconds for which a session counts as live after its answer.

        A session that announces a longer pause than `LONGEST_IDLE` makes room at once.
        """
        if next_call is None:
            return self._idle_seconds
        return 0.0 if next_call > LONGEST_IDLE else min(max(2 * next_call, SHORTEST_IDLE), LONGEST_IDLE)

    def _is_stranger(self, session: Session, context: array[int]) -> bool:
        """Count a call that overlaps another one and does not go on with it. Return whether the name is now shared."""
        if continues(session.context, context):
            session.strangers = max(session.strangers - 1, 0)
            return False
        session.strangers += 1
        if session.strangers < _STRANGERS:
            return False
        self._discharge(session)
        self._replace_context(session, NO_CONTEXT)
        session.shared, session.calls = True, 0
        return True

    def _learn_pause(self, seconds: float) -> None:
        self._pauses.append(seconds)
        self._unread_pauses += 1
        if self._unread_pauses == _FEWEST_PAUSES:
            self._unread_pauses = 0
            usual = sorted(self._pauses)[int(_RETURNS * len(self._pauses))]
            self._idle_seconds = min(max(usual, SHORTEST_IDLE), LONGEST_IDLE)


def _mean(mean: float, value: float) -> float:
    """Return the moving mean with one more value."""
    return mean + (value - mean) / 64 if mean else float(value)
