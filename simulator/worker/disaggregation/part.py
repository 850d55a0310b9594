"""A prompt of which another worker computes a part: what the worker's API side knows of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from simulator.worker.engine import Answer, Output
from simulator.worker.protocol import GenerationRequest


@dataclass(frozen=True, slots=True)
class Job:
    """What the engine is asked for, once per answer."""

    prompt: list[int]
    answer: Answer
    deliver: Callable[[Output], None]
    adapter: str | None
    cache_salt: str | None


class Running(Protocol):
    """A request that was started."""

    def cancel(self) -> None:
        """Abort it, unless it has finished."""


class Part(Protocol):
    """What a request's fields say of one prompt. `rank`: the DP rank that they name."""

    @property
    def rank(self) -> int | None: ...

    def start(self, rank: int, job: Job) -> Running:
        """Begin. Raises QueueFullError, ApiError."""


class Role(Protocol):
    """One worker's way of disaggregation."""

    def parts(self, body: GenerationRequest, prompts: int) -> Sequence[Part | None]:
        """What the request says of each of so many prompts; None for one that it leaves to this worker alone.

        Raises ApiError.
        """
