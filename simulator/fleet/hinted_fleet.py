"""The same fleet before a router that agents tell whether and when they come back: the places of their sessions weigh
in what evictions cost, as `router.cache_state.session_locations` has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from indexer import Target
from router.cache_state.session_locations import Place, SessionLocations
from router.policies import Candidate, Policy
from simulator.fleet.engine import Progress
from simulator.fleet.fleet import Fleet, Outcome
from simulator.fleet.profiles import Profile
from simulator.fleet.trace import TracedRequest

# An answer takes about so many seconds a token: what is left until the next request is the pause that is announced.
_TOKEN_SECONDS = 0.02


class HintedFleet(Fleet):
    """One run of a trace whose requests tell whether their sessions go on.

    `pause_error`: announced pauses are off by so much: the standard deviation of their logarithm.
    """

    def __init__(
        self,
        profile: Profile,
        workers: int,
        kv_tokens: int,
        policy: Policy,
        late_binding: bool,
        random: Random,
        requests: Sequence[TracedRequest],
        pause_error: float = 0.5,
    ) -> None:
        super().__init__(profile, workers, kv_tokens, policy, late_binding, random)
        self._kv_tokens = kv_tokens
        self._places = SessionLocations(self._clock)
        self._in_place: dict[int, Place] = {}  # by the identity of the request
        self._next_call = announced(requests, pause_error)

    def _eviction_weight(self, target: Target) -> float:
        self._places.expire(self._now)
        return self._places.weight(target, len(self._targets), self._kv_tokens)

    def _bind(self, outcome: Outcome, choice: Candidate) -> int:
        request = outcome.request
        key, next_call = (None, request.session), self._next_call[id(request)]
        if next_call is None:
            self._places.leave(key)
        else:
            self._in_place[id(request)] = self._places.keep(key, choice.target, request.input_tokens, next_call)
        return super()._bind(outcome, choice)

    def _progress(self, worker: int, progress: Progress) -> set[int]:
        for sequence in progress.ended:
            if place := self._in_place.pop(id(sequence.request), None):
                place()
        return super()._progress(worker, progress)


def announced(requests: Sequence[TracedRequest], error: float) -> dict[int, float | None]:
    """The pause that each request announces, by its identity; None: it is its session's last.

    `error`: the standard deviation of the logarithm by which they are off.
    """
    random = Random(0)  # of its own: the fleet's goes on as without hints
    following: dict[str, TracedRequest] = {}
    pauses: dict[int, float | None] = {}
    for request in reversed(requests):
        after = following.get(request.session)
        pauses[id(request)] = None
        if after is not None:
            pause = after.arrival - request.arrival - _TOKEN_SECONDS * request.output_tokens
            pauses[id(request)] = max(pause, 0.0) * random.lognormvariate(0.0, error)
        following[request.session] = request
    return pauses
