"""The choice to drop the billing line of Claude Code's prompts before they are sent (`router/apis/billing_line.py`).

The router matches prompts without the line, as vLLM computes them. SGLang keeps it. Answers show what another engine
does. One that keeps the line reports few of the predicted cached tokens, or a prompt that is longer by the line.
"""

from __future__ import annotations

from typing import Any, Final

from router.apis.billing_line import SYSTEM_ROLES, has_billing_line, without_billing_line
from router.apis.messages import BILLING_HEADER
from router.apis.requests import UsualChat
from router.apis.usage import Usage
from router.cache_state.target_audit import CachePrediction
from router.fleet.discovery import Engine
from router.fleet.fleet import Fleet
from router.fleet.worker import Worker
from router.settings import BillingLine

# Constants, because each access to a member of an enumeration is a lookup.
_KEEP: Final = BillingLine.KEEP
_STRIP: Final = BillingLine.STRIP
# The answers in a row that show that the line is kept.
_ANSWERS: Final = 3
# The tokens of a predicted hit that is large enough to be judged, and the least tokens of a line.
_LEAST_HIT: Final = 256
_LEAST_LINE: Final = 16


class BillingLines:
    """The choice for all requests, and what answers showed of each engine."""

    def __init__(self, setting: BillingLine, fleet: Fleet) -> None:
        self._setting = setting
        self._fleet = fleet
        self._misses: dict[Worker, tuple[int, int]] = {}  # the worker's starts, and its answers in a row without a hit
        self._version = -1  # of the fleet, when `_watched` was computed
        self._watched = False
        fleet.on_removed.append(self._forget)

    def body_to_send(self, path: str, body: bytes, read: bytes | UsualChat = b"") -> tuple[bytes, bool]:
        """Return the body, without its billing line if it is dropped, and whether the line is still in it.

        `read`: what was read of the body, if it is a usual chat. Then the body is not searched.
        """
        if self._setting is _KEEP or not self._watches():
            return body, False
        if not (_begins_with_line(read[1]) if isinstance(read, tuple) else has_billing_line(path, body)):
            return body, False
        without = without_billing_line(path, body)
        if without is None:
            return body, False
        if self._setting is _STRIP or any(map(self.keeps, self._fleet.workers)):
            return without, False
        return body, True

    def keeps(self, worker: Worker) -> bool:
        """Return whether a worker's engine computes the line as a part of the prompt."""
        if worker.description is None or worker.description.engine is Engine.VLLM:
            return False
        if worker.description.engine is Engine.SGLANG:
            return True
        starts, misses = self._misses.get(worker, (0, 0))
        return misses >= _ANSWERS and starts == worker.starts

    def answered(self, worker: Worker, prediction: CachePrediction | None, usage: Usage | None) -> None:
        """Compare the answer to a request with the line with its prediction."""
        if prediction is None or not prediction.comparable or usage is None or usage.cached is None:
            return
        predicted = prediction.overlap
        if prediction.by_text:
            predicted = round(predicted * usage.prompt / (prediction.tokens or 1))
        longer = not prediction.by_text and usage.prompt >= prediction.tokens + _LEAST_LINE
        if predicted < _LEAST_HIT and not longer:
            return
        starts, misses = self._misses.get(worker, (worker.starts, 0))
        if starts != worker.starts or not (longer or 2 * usage.cached < predicted):
            misses = 0
        else:
            misses += 1
        self._misses[worker] = worker.starts, misses

    def _watches(self) -> bool:
        """Return whether a worker may keep the line: only then are bodies searched for it."""
        if self._setting is _STRIP:
            return True
        if self._version != self._fleet.version:
            self._version = self._fleet.version
            self._watched = any(
                worker.description is not None and worker.description.engine is not Engine.VLLM
                for worker in self._fleet.workers
            )
        return self._watched

    def _forget(self, worker: Worker) -> None:
        self._misses.pop(worker, None)


def _begins_with_line(messages: list[dict[str, Any]]) -> bool:
    """Return whether a system message before the first one of another role may begin with a billing line."""
    for message in messages:
        content = message.get("content")
        if message.get("role") not in SYSTEM_ROLES:
            return False
        if not isinstance(content, str) or content.startswith(BILLING_HEADER):
            return True
    return False
