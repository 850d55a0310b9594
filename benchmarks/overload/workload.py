"""The requests of an overloaded fleet: conversations, agents and documents, each turn as a request of its own.

Turns arrive at fixed times, so that a slow or refusing fleet receives no fewer requests. A load of 1 is the highest at
which the default before computed limits answered what arrived within ten minutes. A tenth of it has the highest
priority, and that is the same at every load.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Final

from benchmarks.policy.sessions import AGENTS, CHATS, DOCUMENTS, generated
from simulator.fleet.trace import TracedRequest

BLOCK: Final = 256
KV_TOKENS: Final = 320_000
HIGH: Final = -1
LOW: Final = 1
_KINDS: Final = (CHATS, AGENTS, DOCUMENTS)
_HIGH_SHARE: Final = 0.1
# The rates of `benchmarks.policy.sessions` at a load of 1, and the share of the other requests with low priority.
_LOAD_1: Final = 0.62
_LOW_SHARE: Final = 0.3
# The seconds from a turn's arrival to its answer, before the pause until the next turn.
_ANSWER_SECONDS: Final = 10.0
# The tokens of the longest prompt with its answer. A session ends before it exceeds them.
_LONGEST: Final = 100_000
# The seconds before the first request in which sessions begin, so that as many are under way then as later.
_BEFORE: Final = 400.0


def requests(load: float, workers: int, seconds: float, seed: int) -> list[TracedRequest]:
    """Return the requests that arrive within `seconds` at a constant load."""
    random, found, first = Random(seed), list[TracedRequest](), 0
    high = min(_HIGH_SHARE, load)
    for priority, share in ((HIGH, high), (0, (load - high) * (1 - _LOW_SHARE)), (LOW, (load - high) * _LOW_SHARE)):
        for kind in _KINDS:
            rate = _LOAD_1 * share * workers * kind.rate / len(_KINDS)
            if not rate:
                continue
            for session in generated(kind, rate, _BEFORE + seconds, BLOCK, random):
                found += _turns(session, priority, first, seconds)
            first += 1 << 24
    return sorted(found, key=lambda each: each.arrival)


def _turns(session: TracedRequest, priority: int, first: int, seconds: float) -> list[TracedRequest]:
    """Return the turns of a session, as requests that arrive at fixed times. `first`: is added to the ids of blocks."""
    found, arrival, turn = list[TracedRequest](), session.arrival - _BEFORE, session
    while arrival < seconds and turn.input_tokens + turn.output_tokens <= _LONGEST:
        blocks, finished = (tuple(block + first for block in ids) for ids in (turn.blocks, turn.finished))
        name = f"{first}-{turn.session}"
        if arrival >= 0:
            single = replace(turn, arrival=arrival, blocks=blocks, finished=finished, session=name)
            found.append(replace(single, following=None, priority=priority))
        if turn.following is None:
            break
        arrival += _ANSWER_SECONDS + turn.pause
        turn = turn.following
    return found
