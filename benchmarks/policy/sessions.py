"""Sessions whose next turn arrives a pause after the answer, as clients send them. A slow answer delays later turns.

A load of 1 is about where the best rule still answers three quarters of the requests within 2 s and 50 ms a token.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from math import log
from pathlib import Path
from random import Random

import msgspec

from simulator.fleet.trace import TracedRequest


@dataclass(frozen=True, slots=True)
class SessionKind:
    """A kind of sessions. Lengths are in tokens and times in seconds; pairs are the bounds of a uniform distribution.

    - `rate`: new sessions a second and worker at load 1.
    - `prompts`: the number of system prompts; the n-th is used n^-`skew` times as often as the first.
    - `first`, `later`, `output`: mean and sigma (log-normal) of what a first turn, a later turn and an answer add.
    - `pause`: the mean pause (exponential) between an answer and the next turn.
    - `longest`: a session ends before its prompt exceeds this length.
    """

    name: str
    rate: float
    prompts: int
    system: tuple[int, int]
    skew: float
    turns: tuple[int, int]
    first: tuple[int, float]
    later: tuple[int, float]
    output: tuple[int, float]
    pause: float
    longest: int = 100_000


AGENTS = SessionKind("agents", 0.1125, 6, (8000, 16_000), 0.8, (8, 40), (1500, 1.0), (1100, 1.0), (140, 0.8), 3.0)
CHATS = SessionKind("conversations", 0.8, 32, (500, 2500), 1.0, (2, 8), (2500, 1.0), (400, 1.0), (320, 0.7), 25.0)
DOCUMENTS = SessionKind("documents", 1.0, 1, (0, 0), 0.0, (1, 4), (9000, 1.0), (100, 0.5), (200, 0.7), 15.0)
# Questions about documents that many ask about. The documents need several times the caches of 8 workers.
SHARED_DOCUMENTS = SessionKind(
    "shared documents", 1.05, 2000, (4000, 14_000), 0.6, (1, 4), (100, 0.5), (100, 0.5), (200, 0.7), 15.0
)
# Agentic coding: 48,000 shared tokens first, then tool results, with contexts to 200,000 tokens.
CODING = SessionKind(
    "agentic coding", 0.054, 4, (40_000, 56_000), 0.8, (8, 30), (4000, 1.0), (3500, 1.0), (500, 0.7), 13.75, 200_000
)
HOT_PREFIX = SessionKind("one hot prefix", 10.0, 1, (2000, 2000), 0.0, (1, 1), (100, 0.5), (100, 0.5), (150, 0.5), 0.0)

# Sessions of a recorded trace: new ones a second and worker at load 1, and the seconds of sessions under way at first.
_RECORDED_RATE = 0.04
_UNDER_WAY = 300.0


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn: the tokens that it adds to the prompt, those of its answer, and the pause before it."""

    added: int
    output: int
    pause: float = 0.0


def generated(kind: SessionKind, rate: float, seconds: float, block_tokens: int, random: Random) -> list[TracedRequest]:
    """Return the first requests of sessions that begin within `seconds`, `rate` a second. The others follow them."""
    ids = count()
    systems = [random.randint(*kind.system) for _ in range(kind.prompts)]
    prefixes = [_named(tokens // block_tokens, ids) for tokens in systems]
    weights = [(rank + 1) ** -kind.skew for rank in range(kind.prompts)]
    firsts, now = list[TracedRequest](), 0.0
    while (now := now + random.expovariate(rate)) < seconds:
        (prompt,) = random.choices(range(kind.prompts), weights)
        turns, total = list[Turn](), systems[prompt]
        for number in range(random.randint(*kind.turns)):
            added = _skewed(*(kind.later if number else kind.first), random)
            output = _skewed(*kind.output, random)
            total += added
            if turns and total > kind.longest:
                break
            pause = random.expovariate(1 / kind.pause) if number else 0.0
            turns.append(Turn(added if number else added + systems[prompt], output, pause))
            total += output
        firsts.append(chained(now, str(len(firsts)), prefixes[prompt], turns, ids, block_tokens))
    return firsts


def chained(
    arrival: float,
    session: str,
    prefix: Sequence[int],
    turns: Sequence[Turn],
    ids: Iterator[int],
    block_tokens: int,
    skip: int = 0,
) -> TracedRequest:
    """Return a session's first request, which leads to the others. Its first `skip` turns were answered before.

    - `prefix`: the ids of the first blocks, which other sessions share.
    - `ids`: new ids for all other blocks.
    """
    prompts, total = list[int](), 0
    for turn in turns:
        total += turn.added
        prompts.append(total)
        total += turn.output
    blocks = (*prefix, *_named(total // block_tokens - len(prefix), ids))
    following: TracedRequest | None = None
    for number in range(len(turns) - 1, skip - 1, -1):
        turn, tokens = turns[number], prompts[number]
        following = TracedRequest(
            arrival,
            tokens,
            turn.output,
            blocks[: tokens // block_tokens],
            blocks[: (tokens + turn.output) // block_tokens],
            session,
            following=following,
            pause=turns[number + 1].pause if following else 0.0,
        )
    assert following is not None
    return following


def in_turn(
    sessions: int, rounds: int, tokens: int, output: int, block_tokens: int, shared: int = 0, more: int = 0
) -> TracedRequest:
    """Return the first request of sessions that are served one after the other, `rounds` times.

    - `shared`: the first tokens of all prompts.
    - `more`: the tokens that each turn adds to the prompt of the turn before.
    """
    ids, following = count(), None
    prefix, longest = _named(shared // block_tokens, ids), tokens + more * (rounds - 1) + output
    blocks = [(*prefix, *_named(longest // block_tokens - len(prefix), ids)) for _ in range(sessions)]
    for number in reversed(range(rounds)):
        length = tokens + more * number
        for session, named in reversed(list(enumerate(blocks))):
            prompt, finished = named[: length // block_tokens], named[: (length + output) // block_tokens]
            following = TracedRequest(
                0.0, length, output, prompt, finished, str(session), following=following, pause=0.1
            )
    assert following is not None
    return following


class RecordedTurn(msgspec.Struct):
    """A line of a trace of sessions, as NVIDIA AIPerf's generators write it. `delay`: milliseconds after the answer."""

    session_id: str
    input_length: int
    output_length: int
    hash_ids: list[int]
    delay: float = 0.0


def recorded(
    path: Path, load: float, workers: int, seconds: float, random: Random, under_way: float = _UNDER_WAY
) -> list[TracedRequest]:
    """Return the first requests of recorded sessions at a load of a fleet.

    As many as begin within `under_way` seconds are under way at the start.
    """
    decoder = msgspec.json.Decoder(RecordedTurn)
    sessions: dict[str, list[RecordedTurn]] = {}
    with gzip.open(path, "rb") as file:
        for line in file:
            turn = decoder.decode(line)
            sessions.setdefault(turn.session_id, []).append(turn)
    chosen = list(sessions.values())
    random.shuffle(chosen)
    rate, ids, firsts, now = load * workers * _RECORDED_RATE, count(1 << 30), list[TracedRequest](), -under_way
    while (now := now + random.expovariate(rate)) < seconds:
        lines = chosen[len(firsts) % len(chosen)]
        turns = [Turn(each.input_length, each.output_length, each.delay / 1000) for each in lines]
        prefix = lines[0].hash_ids[: lines[0].input_length // 512]
        skip = random.randrange(len(turns)) if now < 0 else 0
        first = chained(max(now, 0.0), str(len(firsts)), prefix, turns, ids, 512, skip)
        firsts.append(first)
    return sorted(firsts, key=lambda first: first.arrival)


def _named(blocks: int, ids: Iterator[int]) -> list[int]:
    return [next(ids) for _ in range(max(blocks, 0))]


def _skewed(mean: int, sigma: float, random: Random) -> int:
    """Return a random length of a log-normal distribution with this mean."""
    return max(round(random.lognormvariate(log(mean) - sigma**2 / 2, sigma)), 1)
