"""The records of sessions: where each one's context was computed last, and until when it counts as live.

A session is one chain of prompts, of an agent or a thread. It is live while a call is in flight, and for the learned
pause after its last answer. A live session is charged to the target of its last call. It ends by the last header, by
`/finish_session`, or `FORGOTTEN_SECONDS` after its last call.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Final, TypeAlias

from indexer import Target
from router.programs.working_sets import NO_CONTEXT, WorkingSet, common

# Seconds without a call after which a session is forgotten.
FORGOTTEN_SECONDS: Final = 1800.0
# The bounds of the seconds for which an idle session counts as live.
SHORTEST_IDLE: Final = 5.0
LONGEST_IDLE: Final = 60.0
# The share of pauses that end within these seconds, and the pauses that they are read from.
_RETURNS: Final = 0.95
_PAUSES: Final = 256
_FEWEST_PAUSES: Final = 16
_MOST_SESSIONS: Final = 1 << 16
# Overlapping calls under one name that do not extend its prompt: it is the name of many callers, not of a session.
_STRANGERS: Final = 3

# The tenant, the name of the model or adapter, the salt of its prompts, and the session's own name.
SessionKey: TypeAlias = tuple[str, str | None, str | None, str]


class Session:
    """One session.

    - `context`: the marks of its last prompt; `tokens`: their number of tokens, with its last answer.
    - `target`: the target of its last call; None if nothing of it is held there any more.
    - `calls`: its calls in flight. `seen_at`: when the last one arrived. `ended_at`: when the last answer ended.
    - `charged`: the working set that it is charged to; None while it is not live.
    - `shared`: the name turned out to be that of many callers.
    """

    __slots__ = (
        "answer",
        "calls",
        "charged",
        "context",
        "ended_at",
        "key",
        "seen_at",
        "shared",
        "strangers",
        "target",
        "tokens",
        "until",
    )

    def __init__(self, key: SessionKey) -> None:
        self.key = key
        self.context = NO_CONTEXT
        self.tokens = 0
        self.answer = 0
        self.target: Target | None = None
        self.calls = 0
        self.charged: WorkingSet | None = None
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
    - `counted`: its lost tokens are counted.
    - `held`: no target had room for it when it was tried last.
    - `exempt`: it has waited for the longest time, so nothing holds it any more.
    """

    __slots__ = ("counted", "exempt", "final", "held", "output", "session", "sessions", "tokens")

    def __init__(self, sessions: Sessions, session: Session, tokens: int, final: bool) -> None:
        self.sessions = sessions
        self.session = session
        self.tokens = tokens
        self.final = final
        self.counted = False
        self.held = False
        self.exempt = False
        self.output = 0

    def __call__(self, failed: bool = False) -> None:
        self.sessions.ended(self, failed)


class Sessions:
    """The records of the last `_MOST_SESSIONS` sessions, and the working sets of all targets."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.working_sets: dict[Target, WorkingSet] = {}
        self.turn = 0.0  # the mean tokens that a turn adds to a context
        self.answer = 0.0  # the mean tokens of an answer
        self._clock = clock
        self._records: OrderedDict[SessionKey, Session] = OrderedDict()
        self._idle: list[tuple[float, int, Session]] = []
        self._numbers = count()
        self._pauses: deque[float] = deque(maxlen=_PAUSES)
        self._idle_seconds = LONGEST_IDLE

    def __len__(self) -> int:
        return len(self._records)

    def call(self, key: SessionKey, tokens: int, final: bool) -> Call | None:
        """Return a call of a session that arrives now; None for names that many callers share."""
        now = self.expire()
        session = self._records.get(key)
        if session is None:
            session = self._records[key] = Session(key)
            if len(self._records) > _MOST_SESSIONS:
                self.drop(next(iter(self._records)))
        else:
            self._records.move_to_end(key)
        session.seen_at = now
        return None if session.shared else Call(self, session, tokens, final)

    def sent(self, call: Call, target: Target, context: array[int]) -> None:
        """Charge a call's session to the target that it is sent to."""
        session = call.session
        if session.shared or self._records.get(session.key) is not session:
            return
        if session.calls and self._is_stranger(session, context):
            return
        if not session.calls and session.ended_at:
            self._learn_pause(session.seen_at - session.ended_at)
        if session.tokens and not session.calls and call.tokens > session.tokens - session.answer:
            self.turn = _mean(self.turn, call.tokens - session.tokens + session.answer)
        session.calls += 1
        self._charge(session, target, context)
        session.tokens, session.answer = call.tokens, 0

    def ended(self, call: Call, failed: bool) -> None:
        """End a call: its session is idle from now on, or it ends with its final call."""
        session = call.session
        if session.shared or self._records.get(session.key) is not session or not session.calls:
            return
        session.calls -= 1
        if not failed and call.output:
            self.answer = _mean(self.answer, call.output)
            if session.tokens == call.tokens:
                session.answer = call.output
                session.tokens += call.output
                if session.charged is not None:
                    session.charged.answered(call.output)
        session.ended_at = now = self._clock()
        if session.calls:
            return
        if call.final:
            self.drop(session.key)
            return
        session.until = now + self._idle_seconds
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
        if session is not None:
            self._discharge(session)

    def finish(self, name: str) -> None:
        """Forget the sessions of a name, of all tenants and models."""
        for key in [key for key in self._records if key[3] == name]:
            self.drop(key)

    def forget(self, target: Target) -> None:
        """Forget what a target holds, because it was removed or its cache was cleared. Its sessions are cold."""
        working_set = self.working_sets.pop(target, None)
        if working_set is None:
            return
        for session in self._records.values():
            if session.charged is working_set:
                session.charged = None
            if session.target == target:
                session.target = None

    def live(self) -> int:
        """Return the number of live sessions."""
        return sum(working_set.sessions for working_set in self.working_sets.values())

    def _charge(self, session: Session, target: Target, context: array[int]) -> None:
        charged = self.working_sets.get(target)
        if charged is None:
            charged = self.working_sets[target] = WorkingSet()
        if session.charged is charged:
            charged.answered(-session.answer)
            charged.extend(session.context, context)
        else:
            self._discharge(session)
            charged.add(context)
            session.charged = charged
        session.context, session.target = context, target

    def _discharge(self, session: Session) -> None:
        charged, session.charged = session.charged, None
        if charged is not None:
            charged.answered(-session.answer)
            charged.remove(session.context)

    def _is_stranger(self, session: Session, context: array[int]) -> bool:
        """Count a call that overlaps another one and does not go on with it. Return whether the name is now shared."""
        if 2 * common(session.context, context) >= min(len(session.context), len(context)):
            return False
        session.strangers += 1
        if session.strangers < _STRANGERS:
            return False
        session.shared = True
        self._discharge(session)
        return True

    def _learn_pause(self, seconds: float) -> None:
        self._pauses.append(seconds)
        if len(self._pauses) >= _FEWEST_PAUSES:
            usual = sorted(self._pauses)[int(_RETURNS * len(self._pauses))]
            self._idle_seconds = min(max(usual, SHORTEST_IDLE), LONGEST_IDLE)


def _mean(mean: float, value: float) -> float:
    """Return the moving mean with one more value."""
    return mean + (value - mean) / 64 if mean else float(value)
