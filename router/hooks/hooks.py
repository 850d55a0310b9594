"""The calls of hooks, and what their failures cost.

    key_url or jwt ──▶ each function of hooks.before ──▶ the request is routed ──▶ answered ──▶ hooks.after
                        └── within hooks.deadline together; an error or a late one: hooks.on_error

- `on_error: closed`: the request is refused with 503. `open`: it is routed without what failed.
- A function after the answer delays nothing. Its errors are counted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from functools import partial
from math import inf
from threading import Lock
from traceback import format_tb
from typing import Any, Final

import structlog
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from http_api.errors import RequestError
from router.auth.tenants import unknown_key
from router.hooks.hook_threads import BusyError, HookThreads
from router.hooks.interface import Answer, Refusal, Request
from router.hooks.key_check import Check, KeyCheckError
from router.settings.own_code import text_of

log = structlog.get_logger()

RESULTS: Final = ("ok", "refused", "error", "late", "dropped")
_FAILURES: Final = frozenset(("error", "late", "dropped"))
# Seconds for which a failure is reported, and between two log lines on failures.
_REPORTED_SECONDS: Final = 300.0
_LOG_SECONDS: Final = 60.0
# Fields of longer bodies are changed in a thread.
_LONG_BODY: Final = 256 * 1024


class Tally:
    """The calls of one hook by their result, and their seconds. Threads share it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.counts = dict.fromkeys(RESULTS, 0)
        self.seconds = 0.0
        self._lock = Lock()
        self._problem = ""
        self._failed_at = -inf
        self._log_from = -inf

    def add(self, result: str, seconds: float, problem: str = "", error: BaseException | None = None) -> None:
        """Count a call. `problem`, `error`: why it failed."""
        now = time.monotonic()
        with self._lock:
            self.counts[result] += 1
            self.seconds += seconds
            if result not in _FAILURES:
                return
            self._problem, self._failed_at = problem, now
            if now < self._log_from:
                return
            self._log_from = now + _LOG_SECONDS
        # No exc_info: a log renderer reads the error's text, which can raise.
        frames = "".join(format_tb(error.__traceback__)) if error is not None else ""
        log.warning("hook failed", hook=self.name, reason=problem, exception=frames)

    def findings(self) -> list[dict[str, Any]]:
        """Return whether it failed in the last minutes."""
        if time.monotonic() - self._failed_at >= _REPORTED_SECONDS:
            return []
        failures = sum(self.counts[each] for each in _FAILURES)
        return [{"finding": "hook_failed", "hook": self.name, "detail": f"{self._problem}; {failures} since the start"}]


class Hooks:
    """The hooks of the settings.

    - `deadline`: seconds for all functions before a request together, and for each function after an answer.
    - `fails_open`: a request is routed without a function that fails.
    - `key_check`: the check of keys at a URL, or of tokens; None without one.
    - `tenants`: the names of the settings' tenants. With tenants, each key has to belong to one.
    """

    def __init__(
        self,
        before: list[tuple[str, Callable[[Request], Any]]],
        after: list[tuple[str, Callable[[Answer], Any]]],
        deadline: float,
        fails_open: bool,
        key_check: Check | None = None,
        tenants: Collection[str] = (),
    ) -> None:
        self._before = [(Tally(name), function) for name, function in before]
        self._after = [(Tally(name), function) for name, function in after]
        self._deadline = deadline
        self._fails_open = fails_open
        self._key_check = key_check
        self._tenants = frozenset(tenants)
        self._of_keys = Tally("" if key_check is None else key_check.name)
        self._threads = HookThreads()

    @property
    def has_before(self) -> bool:
        """True if something is called before a request is routed."""
        return self._key_check is not None or bool(self._before)

    @property
    def has_after(self) -> bool:
        """True if functions are called after an answer."""
        return bool(self._after)

    @property
    def tallies(self) -> list[Tally]:
        """The calls of each hook."""
        of_keys = [self._of_keys] if self._key_check is not None else []
        return of_keys + [tally for tally, _ in (*self._before, *self._after)]

    async def before(self, request: Request, unknown: bool) -> Request:
        """Return the request as the functions changed it. Raises RequestError for a refusal, and if one fails closed.

        `unknown`: the settings lack its key, so the check or a function has to accept it.
        """
        until = time.monotonic() + self._deadline
        if unknown and self._key_check is not None:
            request.tenant = await self._check_key(self._key_check, request.key)
        for tally, function in self._before:
            given = request.changed()
            if await self._call(tally, function, given, until - time.monotonic(), request.tenant):
                long = given.has_changed_fields and len(given.body) > _LONG_BODY
                request = await asyncio.to_thread(given.changed) if long else given.changed()
        if unknown and not request.tenant and (self._tenants or self._key_check is None):
            raise unknown_key()
        return request

    def after(self, answer: Answer) -> None:
        """Call the functions with an answer. They run after this call."""
        for tally, function in self._after:
            begun = time.monotonic()
            try:
                future = self._threads.submit(function, answer, self._deadline)
            except BusyError as error:
                tally.add("dropped", 0.0, str(error))
            else:
                future.add_done_callback(partial(self._after_ended, tally, begun))

    async def close(self) -> None:
        """Wait for running functions until their deadline, and end the threads."""
        await self._threads.close(self._deadline)
        if self._key_check is not None:
            await self._key_check.close()

    def findings(self) -> list[dict[str, Any]]:
        """Return which hooks failed in the last minutes."""
        return [finding for tally in self.tallies for finding in tally.findings()]

    async def _check_key(self, check: Check, key: str) -> str:
        begun = time.monotonic()
        try:
            async with asyncio.timeout(self._deadline):
                tenant = await check.check(key)
            if tenant not in (self._tenants or ("",)):
                raise KeyCheckError(f"hooks.{check.name} names the tenant {tenant!r}, which tenants.named has not")
        except RequestError:
            self._of_keys.add("refused", time.monotonic() - begun)
            raise
        except (KeyCheckError, TimeoutError) as error:
            late = isinstance(error, TimeoutError)
            problem = f"no answer within {self._deadline:g} s" if late else str(error)
            self._failed(self._of_keys, "late" if late else "error", begun, problem, None)
            return ""
        self._of_keys.add("ok", time.monotonic() - begun)
        return tenant

    async def _call(
        self, tally: Tally, function: Callable[[Request], Any], given: Request, seconds: float, tenant: str
    ) -> bool:
        """Call a function before a request of a tenant. Return whether its changes count. Raises RequestError."""
        begun = time.monotonic()
        try:
            result = await self._threads.call(function, given, max(seconds, 0.0))
            if result is not None and not isinstance(result, Refusal):
                raise TypeError(f"it returned {type(result).__name__}, and not None or a Refusal")
            if given.tenant != tenant and given.tenant not in self._tenants:
                raise ValueError(f"it chose the tenant {given.tenant!r}, which tenants.named has not")
        except asyncio.CancelledError:
            raise
        except TimeoutError as error:
            self._failed(tally, "late", begun, f"not ready within {self._deadline:g} s", error)
            return False
        except BusyError as error:
            self._failed(tally, "dropped", begun, str(error), None)
            return False
        except BaseException as error:
            self._failed(tally, "error", begun, f"it raised {type(error).__name__}: {text_of(error)}", error)
            return False
        tally.add("ok" if result is None else "refused", time.monotonic() - begun)
        if result is not None:
            raise _refused(result)
        return True

    def _failed(self, tally: Tally, result: str, begun: float, problem: str, error: BaseException | None) -> None:
        """Count a failure. Raises RequestError (503) unless requests go on without what failed."""
        tally.add(result, time.monotonic() - begun, problem, error)
        if not self._fails_open:
            raise RequestError(
                "A check of this request failed. Send the request again.",
                status=503,
                type="service_unavailable",
                code="hook_failed",
                retry_after=1,
            )

    def _after_ended(self, tally: Tally, begun: float, future: Future[Any]) -> None:
        seconds = time.monotonic() - begun
        error = future.exception()
        if error is not None and not isinstance(error, TimeoutError):
            tally.add("error", seconds, f"it raised {type(error).__name__}: {text_of(error)}", error)
        elif error is not None or seconds > self._deadline:
            tally.add("late", seconds, f"not ready within {self._deadline:g} s")
        else:
            tally.add("ok", seconds)


_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable",
}


def _refused(refusal: Refusal) -> RequestError:
    kind = "invalid_request_error" if refusal.status < 500 else "internal_error"
    return RequestError(
        refusal.message,
        status=refusal.status,
        type=_TYPES.get(refusal.status, kind),
        code=refusal.code,
        retry_after=refusal.retry_after,
    )


class HookCollector(Collector):
    """The calls of hooks by hook and result, and their seconds."""

    def __init__(self, hooks: Hooks) -> None:
        self._hooks = hooks

    def collect(self) -> Iterator[Metric]:
        calls = CounterMetricFamily("kvrouter_hook_calls", "Calls of hooks, by result", labels=["hook", "result"])
        seconds = CounterMetricFamily("kvrouter_hook_seconds", "Seconds of calls of hooks", labels=["hook"])
        for tally in self._hooks.tallies:
            for result, count in tally.counts.items():
                calls.add_metric([tally.name, result], count)
            seconds.add_metric([tally.name], tally.seconds)
        yield from (calls, seconds)
