"""A prompt that is partly computed by another worker, as the worker's API side sees it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from simulator.worker.engine import Answer, Output
from simulator.worker.protocol import GenerationRequest


@dataclass(frozen=True, slots=True)
class Job:
    """The engine's order for one answer."""

    prompt: list[int]
    answer: Answer
    deliver: Callable[[Output], None]
    adapter: str | None
    cache_salt: str | None


class Running(Protocol):
    """A started request."""

    def cancel(self) -> None:
        """Abort the request, unless it has finished."""


class Part(Protocol):
    """One prompt as a request's fields describe it. `rank` is its DP rank, if given."""

    @property
    def rank(self) -> int | None: ...

    def start(self, rank: int, job: Job) -> Running:
        """Start the prompt. Raises QueueFullError and ApiError."""


class Role(Protocol):
    """A worker's role in disaggregation."""

    def parts(self, body: GenerationRequest, prompts: int) -> Sequence[Part | None]:
        """Return the part of each prompt of a request; None for one that this worker computes. Raises ApiError."""
