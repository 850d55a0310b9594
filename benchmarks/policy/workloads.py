"""Traces made up: sessions of several turns over shared system prompts, in Mooncake's format.

A session begins at random (Poisson), with one of a few system prompts, the first more popular than the next. Every
turn appends what is new to all that was said before, and the next one comes some time after the answer. A trace begins
without sessions; after some minutes as many end as begin.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from math import log
from random import Random

from kvrouter.tools.simulation.trace import BLOCK_TOKENS, TraceLine


@dataclass(frozen=True, slots=True)
class Workload:
    """What sessions look like. Lengths in tokens, `pause` in seconds; all means of skewed distributions.

    `first`: what the first turn adds to the system prompt. `longest`: a session ends before its prompt gets longer.
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


CONVERSATION = Workload("conversation", 32, 1500, 5.0, 2500, 400, 320, 25.0)
AGENT = Workload("agent", 8, 9000, 16.0, 1500, 1100, 130, 4.0)
# Long sessions, whose prompts grow to many times what a turn adds.
LOOP = Workload("loop", 4, 6000, 40.0, 2000, 1500, 200, 3.0, longest=120_000)
# Prompts and answers about as long as those of Mooncake's tool and agent trace in the mean, 8600 and 182 tokens.
TOOL = Workload("tool", 64, 5000, 2.0, 2600, 900, 182, 8.0)
# Documents that are asked about once.
SINGLE = Workload("single", 1, 1, 1.0, 9000, 1, 130, 1.0)


def sessions(workload: Workload, rate: float, seconds: float, random: Random) -> list[TraceLine]:
    """A trace of `seconds` seconds with `rate` new sessions a second."""
    ids = count()
    shared = [
        (tokens, [next(ids) for _ in range(tokens // BLOCK_TOKENS)])
        for tokens in (_skewed(workload.system_tokens, 0.4, random) for _ in range(workload.system_prompts))
    ]
    popularity = [1 / (rank + 1) for rank in range(len(shared))]
    lines: list[TraceLine] = []
    now = 0.0
    for session in count():
        now += random.expovariate(rate)
        if now >= seconds:
            break
        tokens, blocks = random.choices(shared, popularity)[0]
        blocks, at = list(blocks), now
        tokens += _skewed(workload.first, 1.0, random)
        while at < seconds and tokens <= workload.longest:
            blocks += [next(ids) for _ in range(tokens // BLOCK_TOKENS - len(blocks))]
            output = _skewed(workload.output, 0.7, random)
            partial = [next(ids)] if tokens % BLOCK_TOKENS else []
            lines.append(TraceLine(at * 1000, tokens, output, blocks + partial, str(session)))
            if random.random() < 1 / workload.turns:
                break
            # An answer takes about 20 ms a token; the trace says when the next turn comes, whatever a router does.
            at += 0.5 + 0.02 * output + random.expovariate(1 / workload.pause)
            tokens += output + _skewed(workload.turn, 1.0, random)
    return sorted(lines, key=lambda line: line.timestamp)


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
