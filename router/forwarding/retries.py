"""Retries on other workers: the answers that lead to one, their budget, and the errors when none succeeds."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Final

from http_api.errors import RequestError
from router.http.headers import whole_number

_NOT_FOUND: Final = 404
_NO_METHOD: Final = 405
_INVALID: Final = 400
# SGLang refuses an adapter that it does not have as an invalid request.
_SGLANG_ADAPTER: Final = b"LoRA adapter"
_SGLANG_NOT_LOADED: Final = (b"not loaded", b"never been loaded")


# How engines say in a 404 that they lack a model: a code, the parameter's name, or a text. One that names neither means
# a path that the engine does not have, or a stored object.
_NO_MODEL: Final = re.compile(
    rb'"(?:model_not_found|ModelNotFoundError)"'
    rb'|"param"\s*:\s*"model"'
    rb"|\b(?:model|adapter)\b[^{}]{0,512}?(?:does not exist|not found|not loaded)",
    re.IGNORECASE,
)
# The whole bodies of servers without the route: FastAPI's (vLLM, SGLang, TensorRT-LLM), llama.cpp's, and those of
# Go's and nginx' routers. A 405 says the same of a path that takes other methods, such as one with an id.
_NO_ROUTE: Final = re.compile(
    rb'\s*(?:\{"detail"\s*:\s*"(?:Not Found|Method Not Allowed)"\}'
    rb'|\{"error":\s*\{[^{}]{0,128}"File Not Found"[^{}]{0,128}\}\}'
    rb"|404 page not found|Not Found|<html>.{0,64}<title>404 Not Found</title>.{0,512})?\s*",
    re.DOTALL,
)
# How SGLang's prefill and decode workers refuse a request in which they find no fields about the other worker.
_NO_ROOM: Final = b"without bootstrap room id"
# Statuses that are always retried: the worker did not process the request.
ELSEWHERE: Final = frozenset({429, 502, 503})
# Statuses of workers that are overloaded. They may ask for a pause.
OVERLOADED: Final = (429, 503)
_LONGEST_PAUSE: Final = 60.0
WINDOW = 30  # seconds that count as recent


def is_model_missing(status: int, body: bytes) -> bool:
    """Return whether a worker's status, and the beginning of its body, say that it lacks the model or adapter."""
    if status == _NOT_FOUND:
        return _NO_MODEL.search(body) is not None
    return status == _INVALID and _SGLANG_ADAPTER in body and any(words in body for words in _SGLANG_NOT_LOADED)


def is_route_missing(status: int, body: bytes) -> bool:
    """Return whether a worker's status and whole body say that it lacks the route."""
    if status == _NO_METHOD:
        return True
    return status == _NOT_FOUND and _NO_ROUTE.fullmatch(body) is not None


def is_handover_refused(status: int, body: bytes) -> bool:
    """Return whether a worker of a pair says that it found no fields about the other worker in a request."""
    return status == _INVALID and _NO_ROOM in body


def requested_pause(status: int, retry_after: bytes) -> float:
    """Return the seconds, at most 60, that an overloaded worker asks for by `Retry-After`; 0 without a usable one."""
    if status not in OVERLOADED or not retry_after:
        return 0.0
    seconds: float | None = whole_number(retry_after)
    if seconds is None:
        try:
            seconds = parsedate_to_datetime(retry_after.decode()).timestamp() - time.time()
        except (ValueError, OverflowError):
            return 0.0
    return min(max(seconds, 0.0), _LONGEST_PAUSE)


@dataclass(slots=True)
class _Second:
    number: int
    requests: int = 0
    retries: int = 0


class RetryBudget:
    """A limit of `minimum` retries in the last `WINDOW` seconds, plus the share `share` of the requests in them.

    The minimum lets a fleet with few requests retry each of them.
    """

    def __init__(self, share: float, minimum: int = 10, clock: Callable[[], float] = time.monotonic) -> None:
        self._share = share
        self._minimum = minimum
        self._clock = clock
        self._seconds: deque[_Second] = deque(maxlen=WINDOW)

    def request(self, now: float | None = None) -> None:
        """Count a request. `now` is the current time, if the caller just read the clock."""
        self._now(now).requests += 1

    @property
    def allows(self) -> bool:
        """True if a retry is left."""
        now = self._now()
        recent = [second for second in self._seconds if second.number > now.number - WINDOW]
        allowed = self._minimum + self._share * sum(second.requests for second in recent)
        return sum(second.retries for second in recent) + 1 <= allowed

    def take(self) -> bool:
        """Take a retry. Return false if none is left."""
        allowed = self.allows
        self._now().retries += allowed
        return allowed

    def _now(self, now: float | None = None) -> _Second:
        number = int(self._clock() if now is None else now)
        if not self._seconds or self._seconds[-1].number != number:
            self._seconds.append(_Second(number))
        return self._seconds[-1]


def broken_off() -> RequestError:
    """Return the error for a client whose worker did not complete its response."""
    return RequestError("The worker broke off its answer.", status=502, type="upstream_error")


def not_reached(tried: int) -> RequestError:
    """Return the error for a client when no further attempt is allowed, after `tried` attempts."""
    return RequestError(
        f"{tried} workers could not be reached. Retry later.",
        status=503,
        type="service_unavailable",
        code="no_worker_available",
    )
