"""Traces made up: sessions of several turns over shared system prompts, in Mooncake's format.

A session begins at random (Poisson), with one of a few system prompts, the first more popular than the next. Every
turn appends what is new to all that was said before, and the next one comes some time after the answer. A trace begins
without sessions; after some minutes as many end as begin.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from math import log
from random import Random

from simulator.fleet.trace import BLOCK_TOKENS, TraceLine


@dataclass(frozen=True, slots=True)
class Workload:
    """What sessions look like. Lengths in tokens, `pause` in seconds; all means of skewed distributions, but for the
    length of a system prompt that is the only one.

    `first`: what the first turn adds to the system prompt. `longest`: a session ends before its prompt gets longer.
    `beside`: how many sessions of other kinds begin for each of these.
    """

    name: str
    system_prompts: int
    system_tokens: int
    turns: float
    first: int
    turn: int
    output: int
    pause: float
    longest: int = 100_000
    beside: tuple[tuple[float, Workload], ...] = ()


CONVERSATION = Workload("conversation", 32, 1500, 5.0, 2500, 400, 320, 25.0)
AGENT = Workload("agent", 8, 9000, 16.0, 1500, 1100, 130, 4.0)
# Long sessions, whose prompts grow to many times what a turn adds.
LOOP = Workload("loop", 4, 6000, 40.0, 2000, 1500, 200, 3.0, longest=120_000)
# As in a thousand consecutive requests of Mooncake's tool and agent trace: chats, some of them long, beside calls of
# two tools, whose prompts are nearly all the same and whose answers are short.
_LONG_CALL = Workload("long call", 1, 6144, 1.0, 630, 1, 13, 1.0)
_SHORT_CALL = Workload("short call", 1, 2560, 1.0, 680, 1, 19, 1.0)
TOOL = Workload("tool", 1, 512, 1.73, 9300, 3000, 374, 60.0, 130_000, ((1.52, _LONG_CALL), (0.57, _SHORT_CALL)))
# Documents that are asked about once.
SINGLE = Workload("single", 1, 1, 1.0, 9000, 1, 130, 1.0)


def sessions(workload: Workload, rate: float, seconds: float, random: Random) -> list[TraceLine]:
    """A trace of `seconds` seconds with `rate` new sessions a second, and those beside."""
    blocks, numbers = count(), count()
    lines = list(_sessions_of(workload, rate, seconds, random, blocks, numbers))
    for share, other in workload.beside:
        lines += _sessions_of(other, share * rate, seconds, random, blocks, numbers)
    return sorted(lines, key=lambda line: line.timestamp)


def _sessions_of(
    workload: Workload, rate: float, seconds: float, random: Random, ids: Iterator[int], numbers: Iterator[int]
) -> Iterator[TraceLine]:
    """Session after session. `ids`: of blocks; `numbers`: of sessions."""
    spread = 0.4 if workload.system_prompts > 1 else 0.0
    shared = [
        (tokens, [next(ids) for _ in range(tokens // BLOCK_TOKENS)])
        for tokens in (_skewed(workload.system_tokens, spread, random) for _ in range(workload.system_prompts))
    ]
    popularity = [1 / (rank + 1) for rank in range(len(shared))]
    now = 0.0
    while (now := now + random.expovariate(rate)) < seconds:
        session = str(next(numbers))
        tokens, blocks = random.choices(shared, popularity)[0]
        blocks, at = list(blocks), now
        tokens += _skewed(workload.first, 1.0, random)
        while at < seconds and tokens <= workload.longest:
            blocks += [next(ids) for _ in range(tokens // BLOCK_TOKENS - len(blocks))]
            output = _skewed(workload.output, 0.7, random)
            partial = [next(ids)] if tokens % BLOCK_TOKENS else []
            yield TraceLine(at * 1000, tokens, output, blocks + partial, session)
            if random.random() < 1 / workload.turns:
                break
            # An answer takes about 20 ms a token; the trace says when the next turn comes, whatever a router does.
            at += 0.5 + 0.02 * output + random.expovariate(1 / workload.pause)
            tokens += output + _skewed(workload.turn, 1.0, random)


def _skewed(mean: int, sigma: float, random: Random) -> int:
    """A length with this mean, log-normal."""
    return max(round(random.lognormvariate(log(mean) - sigma**2 / 2, sigma)), 1)


def ideal_seconds(lines: list[TraceLine], token: float, output_token: float) -> float:
    """The mean seconds of work of a request in a fleet that forgets nothing: new prompt tokens, and the answer."""
    seen: set[int] = set()
    work = 0.0
    for line in lines:
        new = [block for block in line.hash_ids if block not in seen]
        seen.update(new)
        tail = line.input_length % BLOCK_TOKENS
        work += token * (len(new) * BLOCK_TOKENS + (tail if not new else 0)) + output_token * line.output_length
    return work / max(len(lines), 1)
