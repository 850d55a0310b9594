"""The interface of custom policies: what their functions receive and return. `kvrouter.policies` exports it.

A function receives all candidates and the request, and returns one number for each candidate, in their order:

- As `policy.name`, the number is the cost of the candidate. The lowest cost wins, ties at random.
- As one of `policy.extra`, it is added to the default's cost. It is in prefill tokens, and may be negative.

`math.inf` excludes a candidate. A function must not block, and must not change what it receives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeAlias

# Fields may be added to a version. A field is removed, or changes its meaning, only in a new version.
VERSION: Final = 1


class Phase(StrEnum):
    """The part of a request that the chosen worker computes."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A DP rank of a worker that may receive the request. Amounts are in tokens unless stated otherwise.

    - `worker`, `url`: the name and the URL of the worker.
    - `labels`: the worker's labels, from the settings or from its pod.
    - `cached`: tokens of the prompt that it has cached.
    - `loadable`: tokens after them that it can load from a pool or a peer.
    - `requests`: its requests in flight.
    - `pending`: uncached tokens that were sent to it and whose first byte was not received.
    - `context`: tokens that its requests in flight hold.
    - `kv_usage`: share of its KV memory in use, 0 to 1; None if unknown.
    - `seconds_per_token`: its time for a computed token; None if unknown, or if all workers are alike.
    """

    worker: str
    url: str
    dp_rank: int
    labels: Mapping[str, str]
    cached: int = 0
    loadable: int = 0
    requests: int = 0
    pending: int = 0
    context: int = 0
    kv_usage: float | None = None
    seconds_per_token: float | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """The request to place.

    - `model`: the name that it asks for; "" for any.
    - `tokens`: tokens of its prompt.
    - `output_tokens`: expected tokens of its answer.
    - `session`: its session; without one, a text that is equal for prompts with an equal beginning; "" if unknown.
    - `tenant`: the tenant whose key it has; "" without tenants.
    - `headers`: its headers, with names in lower case and without credentials.
    - `phase`: the part that the worker computes. Fleets with prefill and decode workers choose once for each part.
    - `program`, `parent`: its whole run, and the session that started its session; "" if unknown.
    """

    model: str
    tokens: int
    output_tokens: float
    session: str
    tenant: str
    headers: Mapping[str, str]
    phase: Phase = Phase.BOTH
    program: str = ""
    parent: str = ""


Function: TypeAlias = Callable[[Sequence[Candidate], Request], Sequence[float]]
