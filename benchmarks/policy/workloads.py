"""Generated traces: sessions of several turns over shared system prompts, in Mooncake's format.

Sessions begin at random times (Poisson), each with one of a few system prompts, of which the first is the most popular.
Each turn appends its text to the session so far, and arrives some time after the previous answer. A trace begins
without sessions. After some minutes as many sessions end as begin.
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
    """A kind of sessions. Lengths in tokens and times in seconds are means of skewed distributions.

    - `system_prompts`, `system_tokens`: the number of system prompts, and their length. A single one has exactly it.
    - `turns`: the turns of a session.
    - `first`, `turn`: the tokens that the first turn adds to the system prompt, and that each later turn adds.
    - `output`: the tokens of an answer.
    - `pause`: the time from an answer to the next turn.
    - `longest`: the longest prompt. A session ends before its prompt exceeds this length.
    - `beside`: other kinds of sessions, and how many of them begin for each session of this kind.
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
# Long sessions, whose prompts grow to many times the length of a turn.
LOOP = Workload("loop", 4, 6000, 40.0, 2000, 1500, 200, 3.0, longest=120_000)
# The mix of a thousand consecutive requests of Mooncake's tool and agent trace: chats, some of them long, and calls of
# two tools with nearly equal prompts and short answers.
_LONG_CALL = Workload("long call", 1, 6144, 1.0, 630, 1, 13, 1.0)
_SHORT_CALL = Workload("short call", 1, 2560, 1.0, 680, 1, 19, 1.0)
TOOL = Workload("tool", 1, 512, 1.73, 9300, 3000, 374, 60.0, 130_000, ((1.52, _LONG_CALL), (0.57, _SHORT_CALL)))
# Documents with one question each.
SINGLE = Workload("single", 1, 1, 1.0, 9000, 1, 130, 1.0)


def sessions(workload: Workload, rate: float, seconds: float, random: Random) -> list[TraceLine]:
    """Return a trace of `seconds` seconds with `rate` new sessions a second, and the sessions beside them."""
    blocks, numbers = count(), count()
    lines = list(_sessions_of(workload, rate, seconds, random, blocks, numbers))
    for share, other in workload.beside:
        lines += _sessions_of(other, share * rate, seconds, random, blocks, numbers)
    return sorted(lines, key=lambda line: line.timestamp)


def _sessions_of(
    workload: Workload, rate: float, seconds: float, random: Random, ids: Iterator[int], numbers: Iterator[int]
) -> Iterator[TraceLine]:
    """Yield the lines of session after session. `ids`: new ids of blocks; `numbers`: new names of sessions."""
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
            # An answer takes about 20 ms a token. The next turn arrives at a fixed time, whatever a router does.
            at += 0.5 + 0.02 * output + random.expovariate(1 / workload.pause)
            tokens += output + _skewed(workload.turn, 1.0, random)


def _skewed(mean: int, sigma: float, random: Random) -> int:
    """Return a random length of a log-normal distribution with this mean."""
    return max(round(random.lognormvariate(log(mean) - sigma**2 / 2, sigma)), 1)


def ideal_seconds(lines: list[TraceLine], token: float, output_token: float) -> float:
    """Return the mean seconds of work of a request in a fleet without evictions: new prompt tokens, and the answer."""
    seen: set[int] = set()
    work = 0.0
    for line in lines:
        new = [block for block in line.hash_ids if block not in seen]
        seen.update(new)
        tail = line.input_length % BLOCK_TOKENS
        work += token * (len(new) * BLOCK_TOKENS + (tail if not new else 0)) + output_token * line.output_length
    return work / max(len(lines), 1)
