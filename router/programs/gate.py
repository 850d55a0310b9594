"""The gate: calls that would evict the context of a live session wait, so that caches do not thrash.

    working set   the union of the contexts of the live sessions of a target
    room          working set + a turn for each live session + the call's other tokens + an answer and a turn
                  at most `ROOM` of the target's KV; a target without a live session has room for any call
                  Both workers of a pair need room. Other routers report what their sessions need.
    cold          no target holds all but `LITTLE_LOST` tokens of the session's last context

While the contexts of all live sessions fit, nothing is held. The gate closes when more than `PRESSURE` of the prompt
tokens were context that a session had and lost. It opens when nothing waits for it and less is lost. While it is
closed, a new session and a cold return wait until a target has room. A prompt that shares less than half with its
session's context counts as a new session, unless it needs no more room. Never held: a session whose context is still
held somewhere, a session with another call in flight, its final call, and a call without a session.

So the engine chooses which session pauses: it evicts, and the return that finds its context evicted waits.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from indexer import Target
from router.load.load_messages import SHARED_TOKENS, SentPrompt
from router.programs.records import Call
from router.programs.sessions import Sessions
from router.programs.working_sets import MARK_TOKENS, WorkingSet, common, continues, marks_of

ROOM: Final = 0.8
LITTLE_LOST: Final = 8192
PRESSURE: Final = 0.01
_HALF_LIFE: Final = 30.0  # seconds
_ROUNDING: Final = 1024  # tokens: engines hold whole blocks, and compute the last one again
_SHARED: Final = MARK_TOKENS // SHARED_TOKENS
_NOTHING: Final = WorkingSet()


class RankCapacity(NamedTuple):
    """A target, and the tokens of its KV cache; None if they are not known."""

    target: Target
    tokens: int | None


class Gate:
    """Decides which calls of sessions wait."""

    def __init__(
        self,
        clock: Callable[[], float],
        reports_evictions: Callable[[Target], bool],
        others: Callable[[str, int], float] = lambda *_: 0.0,
        parts: Callable[[], float] = lambda: 1.0,
    ) -> None:
        """Create a gate.

        - `reports_evictions`: whether a target's events show now what it holds.
        - `others`: returns the tokens that the sessions of other routers need on a DP rank of a worker.
        - `parts`: returns into how many parts the room is divided, because other routers may be unheard.
        """
        self.sessions = Sessions(clock)
        self.closed = False
        self.lost_tokens = 0
        self.cold_returns = 0
        self._clock = clock
        self._reports_evictions = reports_evictions
        self._others = others
        self._parts = parts
        self._lost = self._asked = 0.0
        self._decayed = 0.0

    def passes(self, call: Call, hashes: array[int], best_overlap: int, waiting: bool) -> bool:
        """Return whether a call may go to any target.

        - `hashes`: those of its prompt's chunks.
        - `best_overlap`: the most tokens of its prompt that a target holds.
        - `waiting`: whether other calls wait for room.
        """
        session = call.session
        lost = self._lost_context(call, hashes, best_overlap)
        self._count(call, lost, waiting)
        if not self.closed or call.exempt or call.final or session.calls or session.shared:
            return True
        if not session.tokens or lost > LITTLE_LOST:
            return False
        fits_its_place = session.charged is not None and call.tokens <= session.tokens
        return fits_its_place or continues(session.context, marks_of(hashes))

    def has_room(self, rank: RankCapacity, context: array[int]) -> bool:
        """Return whether a target has room for a call with a context."""
        left = self.room_left(rank, context)
        return left is None or left >= 0

    def room_left(self, rank: RankCapacity, context: array[int]) -> float | None:
        """Return the tokens of its room that a target has left beside a call; None if it has room for any call."""
        needed = self._needed(rank.target)
        if rank.tokens is None or not needed:
            return None
        missing = self.sessions.working_sets.get(rank.target, _NOTHING).missing(context)
        return self._room(rank.tokens) - needed - missing - self.sessions.turn

    def fits_alone(self, ranks: Iterable[RankCapacity], tokens: int) -> bool:
        """Return whether a target has room for a call of `tokens` tokens beside another session that needs little."""
        needed = tokens + self.sessions.turn
        return any(rank.tokens is None or needed <= self._room(rank.tokens) for rank in ranks)

    def more_sessions(self, model: str, ranks: Iterable[RankCapacity]) -> int | None:
        """Return how many sessions of the mean size fit beside the live ones of a model; None if that is not known."""
        sessions = self.sessions
        size, more = sessions.size(model), 0
        if not size:
            return None
        for target, capacity in ranks:
            if capacity is None:
                return None
            left = self._room(capacity) - self._needed(target)
            more += max(int(left / (size + sessions.turn)), 0)
        return more

    def live_tokens(self, worker: str, dp_rank: int) -> float:
        """Return the tokens that live sessions of this router need on a DP rank, for other routers."""
        self.sessions.expire()
        return self.sessions.needs(worker, dp_rank)

    def without_room(self, ranks: Iterable[RankCapacity], hashes: array[int]) -> set[tuple[str, int]]:
        """Return the workers and DP ranks that have no room for a call. `hashes`: those of its prompt's chunks."""
        self.sessions.expire()
        context = marks_of(hashes)
        return {(rank.target.worker, rank.target.dp_rank) for rank in ranks if not self.has_room(rank, context)}

    def heard(self, prompt: SentPrompt) -> None:
        """Record a call of a session that another router sent."""
        context = array("Q", prompt.prefixes)[_SHARED - 1 :: _SHARED]
        target = Target(prompt.worker, prompt.dp_rank, prompt.model)
        self.sessions.heard(prompt.session, target, prompt.tokens, context)

    def sent(self, call: Call, target: Target, hashes: array[int], prefill: Target | None = None) -> None:
        """Charge a call's session to the target that it is sent to. Call the call when its request ends.

        `prefill`: the target that computes the prompt, if that is another one.
        """
        self.sessions.sent(call, target, marks_of(hashes), prefill)

    def _room(self, capacity: int) -> float:
        """Return the tokens of a cache that contexts may need beside an answer, in this router's part of it."""
        return ROOM * capacity / self._parts() - self.sessions.answer

    def _needed(self, target: Target) -> float:
        """Return the tokens that live sessions of all routers need on a target's DP rank, with a turn of each."""
        worker, dp_rank = target.worker, target.dp_rank
        return self.sessions.needs(worker, dp_rank) + self._others(worker, dp_rank)

    def _lost_context(self, call: Call, hashes: array[int], best_overlap: int) -> int:
        """Return the tokens of a session's last context that a call asks for and no target holds, as events show it.

        Fewer than `_ROUNDING` count as none.
        """
        session = call.session
        lost = min(session.tokens - session.answer, call.tokens) - best_overlap
        if lost < _ROUNDING or (session.target is not None and not self._reports_evictions(session.target)):
            return 0
        asked = common(session.context, marks_of(hashes)) * MARK_TOKENS
        return asked - best_overlap if asked >= best_overlap + _ROUNDING else 0

    def _count(self, call: Call, lost: int, waiting: bool) -> None:
        """Count a call's prompt tokens, once, and open or close the gate."""
        if not call.counted:
            call.counted = True
            now = self._clock()
            factor = 0.5 ** ((now - self._decayed) / _HALF_LIFE)
            self._decayed = now
            self._lost = self._lost * factor + lost
            self._asked = self._asked * factor + call.tokens
            self.lost_tokens += lost
            self.cold_returns += call.session.tokens > 0 and lost > LITTLE_LOST
        pressed = self._lost > PRESSURE * self._asked
        if pressed or not waiting:
            self.closed = pressed
