"""Why a request waits."""

from __future__ import annotations

from enum import StrEnum


class WaitReason(StrEnum):
    """All targets are at their limits; its choice is busy; or no worker of its model is there yet."""

    SATURATED = "saturated"
    LATE_BINDING = "late_binding"
    NO_WORKER = "no_worker"
