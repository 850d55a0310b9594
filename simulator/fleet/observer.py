"""The notifications that a rule of a simulated router may record, beside what policies read."""

from __future__ import annotations

from indexer import Target
from simulator.fleet.trace import TracedRequest


class Observer:
    """The notifications of a simulated router. A rule that keeps records of its own is an `Observer`, too."""

    def start(self, block_tokens: int, kv_tokens: int) -> None:
        """Receive the tokens of a block, and those that the cache of a worker holds, before the first request."""

    def arrives(self, request: TracedRequest) -> None:
        """Receive the request that is placed next."""

    def sent(self, request: TracedRequest, target: Target) -> None:
        """Receive a request that is sent to a target."""

    def began(self, request: TracedRequest, target: Target, ttft: float) -> None:
        """Receive the seconds until the first token of a request's answer."""

    def ended(self, request: TracedRequest, target: Target, tpot: float) -> None:
        """Receive the mean seconds of each further token of an answer that has ended."""
