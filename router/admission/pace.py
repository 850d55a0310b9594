"""The pace of prompts while a fleet is saturated: targets compute prompts for a part of the time only.

An engine that always computes prompts generates one token of each answer in each of its long steps. While requests wait
anyway, more prompts at once would only slow running answers down. `TargetLoad.is_paced` has the rule.

Targets are paced while more requests wait than there are targets, and for some time after each refusal of a request
that waited too long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from router.routing.ranks import Limits


class Pace:
    """The time in which the targets of `limits` are paced."""

    def __init__(self, limits: Limits, seconds: float, wake: Callable[[], None], clock: Callable[[], float]) -> None:
        """Create a pace that has not started.

        - `seconds`: how long it lasts after the last refusal.
        - `wake`: lets waiting requests choose again.
        """
        self._limits = limits
        self._seconds = seconds
        self._wake = wake
        self._clock = clock
        self._until = 0.0
        self._planned: asyncio.TimerHandle | None = None

    def refused(self) -> None:
        """Start it, or prolong it, because a request that waited too long for a full fleet is refused."""
        self._until = self._clock() + self._seconds
        self._limits.paced = True

    def see(self, crowded: bool) -> None:
        """Start it or end it. `crowded`: whether more requests wait now than there are targets."""
        self._limits.paced = crowded or self._clock() < self._until

    def plan(self, opens_at: float | None) -> None:
        """Let waiting requests choose again when the first paced target may receive a prompt.

        - `opens_at`: when that is; None if no target is paced or no request waits.
        """
        loop = asyncio.get_running_loop()
        if opens_at is not None and (self._planned is None or self._planned.when() <= loop.time()):
            self._planned = loop.call_later(max(opens_at - self._clock(), 0.0), self._wake)
