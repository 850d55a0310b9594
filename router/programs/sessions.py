"""The records of sessions: where each one's context was computed last, and until when it counts as live.

A session is one chain of prompts, of an agent or a thread. It is live while a call is in flight, and for the learned
pause after its last answer. A live session is charged to the target of its last call. It ends by the last header, by
`/finish_session`, or `FORGOTTEN_SECONDS` after its last call.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Final, TypeAlias

from indexer import Target
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

# The tenant, the name of the model or adapter, the salt of its prompts, and the session's own name.
SessionKey: TypeAlias = tuple[str, str | None, str | None, str]


class Session:
    """One session.

    - `context`: the marks of its last prompt; `tokens`: their number of tokens, with its last answer.
    - `target`: the target of its last call; None if nothing of it is held there any more.
    - `calls`: its calls in flight. `seen_at`: when the last one arrived. `ended_at`: when the last answer ended.
    - `charged`, `prefill`: the working sets of its target, and of the prefill worker of a pair, that it is charged to;
      None while it is not live.
    - `program`: its tenant, and the name of the run that it belongs to.
    - `shared`: the name turned out to be that of many callers.
    """

    __slots__ = (
        "answer",
        "calls",
        "charged",
        "context",
        "ended_at",
        "key",
        "prefill",
        "program",
        "seen_at",
        "shared",
        "strangers",
        "target",
        "tokens",
        "until",
    )

    def __init__(self, key: SessionKey, program: str | None) -> None:
        self.key = key
        self.program = key[0], program or key[3]
        self.context = NO_CONTEXT
        self.tokens = 0
        self.answer = 0
        self.target: Target | None = None
        self.calls = 0
        self.charged: WorkingSet | None = None
        self.prefill: WorkingSet | None = None
        self.seen_at = 0.0
        self.ended_at = 0.0
        self.until = 0.0
        self.shared = False
        self.strangers = 0

    @property
    def begun(self) -> bool:
        """True once a call of it was answered or is in flight."""
        return self.calls > 0 or self.tokens > 0


class Call:
    """One call of a session, from its arrival to its end. Call it when its request ends.

    - `final`: the session announced that it ends with this call.
    - `next_call`: the announced seconds from the answer to the session's next call; None: not announced.
    - `known`: the tokens of the session's context before it was sent.
    - `counted`: its lost tokens are counted.
    - `held`: no target had room for it when it was tried last.
    - `exempt`: it has waited for the longest time, so nothing holds it any more.
    - `subagent`: it begins a session of a program that has a live one.
    - `output`: the tokens of its answer; 0 if they are not known.
    """

    __slots__ = (
        "counted",
        "exempt",
        "final",
        "held",
        "known",
        "next_call",
        "output",
        "session",
        "sessions",
        "subagent",
        "tokens",
    )

    def __init__(self, sessions: Sessions, session: Session, tokens: int, final: bool, next_call: float | None) -> None:
        self.sessions = sessions
        self.session = session
        self.tokens = tokens
        self.final = final
        self.next_call = next_call
        self.known = 0
        self.counted = False
        self.held = False
        self.exempt = False
        self.subagent = False
        self.output = 0

    def __call__(self, failed: bool = False) -> None:
        """End the call. `failed`: its prompt was not computed."""
        self.sessions.ended(self, failed)


class Sessions:
    """The records of the last `_MOST_SESSIONS` sessions, and the working sets of all targets."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.working_sets: dict[Target, WorkingSet] = {}
        self.turn = 0.0  # the mean tokens that a turn adds to a context
        self.answer = 0.0  # the mean tokens of an answer
        self._clock = clock
        self._of_rank: dict[tuple[str, int], list[WorkingSet]] = {}
        self._records: OrderedDict[SessionKey, Session] = OrderedDict()
        self._keys: dict[str, set[SessionKey]] = {}  # by the session's own name
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

    def call(
        self, key: SessionKey, tokens: int, final: bool, next_call: float | None = None, program: str | None = None
    ) -> Call | None:
        """Return a call of a session that arrives now; None for names that many callers share.

        - `next_call`: the announced seconds from its answer to the session's next call; None: not announced.
        - `program`: the run that the session belongs to; None for its own.
        """
        now = self.expire()
        session = self._records.get(key)
        if session is None:
            session = Session(key, program)
            self._record(session)
        else:
            self._records.move_to_end(key)
        session.seen_at = now
        if session.shared:
            return None
        call = Call(self, session, tokens, final, next_call)
        call.subagent = not session.begun and session.program in self._live_programs
        return call

    def sent(self, call: Call, target: Target, context: array[int], prefill: Target | None = None) -> None:
        """Charge a call's session to the target that it is sent to, and to the `prefill` worker's, if there is one."""
        session = self._records.get(call.session.key)
        if session is None:  # it was dropped while the call waited
            session = call.session
            self._record(session)
        call.session = session
        if session.shared or (session.calls and self._is_stranger(session, context)):
            return
        if not session.calls and session.ended_at:
            self._learn_pause(session.seen_at - session.ended_at)
        call.known = session.tokens - session.answer
        if session.tokens and not session.calls and call.tokens > call.known:
            self.turn = _mean(self.turn, call.tokens - call.known)
        session.calls += 1
        self._charge(session, target, prefill, context)
        session.tokens, session.answer = call.tokens, 0
        self._keep_within_bounds()

    def ended(self, call: Call, failed: bool) -> None:
        """End a call: its session is idle from now on, or it ends with its final call.

        `failed`: its prompt was not computed, so the session has the context that it had before.
        """
        session = call.session
        if session.shared or self._records.get(session.key) is not session or not session.calls:
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
            self.drop(session.key)
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
                self._records.move_to_end(first.key)
                break
            if first.seen_at + FORGOTTEN_SECONDS > now:
                break
            self.drop(first.key)
        return now

    def drop(self, key: SessionKey) -> None:
        """Forget a session."""
        session = self._records.pop(key, None)
        if session is None:
            return
        self._discharge(session)
        self._replace_context(session, NO_CONTEXT)
        session.tokens = session.answer = 0
        keys = self._keys[key[3]]
        keys.discard(key)
        if not keys:
            del self._keys[key[3]]

    def finish(self, name: str) -> None:
        """Forget the sessions of a name, of all tenants and models."""
        for key in list(self._keys.get(name, ())):
            self.drop(key)

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
        return self._records.get(key) or Session(key, None)

    def _charge(self, session: Session, target: Target, prefill: Target | None, context: array[int]) -> None:
        before, charged = session.charged, self._working_set(target)
        computed = None if prefill is None else self._working_set(prefill, prefill=True)
        if before is None:
            self._live_programs[session.program] += 1
        else:
            before.answered(-session.answer)
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

    def _record(self, session: Session) -> None:
        self._records[session.key] = session
        self._keys.setdefault(session.key[3], set()).add(session.key)
        self._keep_within_bounds()

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
