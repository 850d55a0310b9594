"""Policies of one's own (`router.policies.interface`): how their functions decide, and what their failures cost.

A failure costs a request nothing. If a function raises an error, or returns something else than one number for each
candidate, the default policy decides without it. A function that repeatedly exceeds the time limit is switched off
until the router is restarted, because it delays all requests. Findings report both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from inspect import iscoroutine
from itertools import islice
from math import inf, isnan
from random import Random
from traceback import format_tb
from typing import Any, Final

import structlog

from indexer import Target
from router.policies import interface
from router.policies.records import Candidate, CostUnit, Decision, Policy, Request, one_of_lowest
from router.settings.own_code import text_of

log = structlog.get_logger()

# A slow call adds 1 to a sum, and each other call subtracts `_FORGIVEN`. At `_MOST_SLOW` the function is switched off.
_MOST_SLOW: Final = 5.0
_FORGIVEN: Final = 0.05
# Seconds of a choice, for which all requests wait. A function that often exceeds them is switched off.
TIME_LIMIT: Final = 0.005
# Seconds for which an error is reported, and between two log lines on errors.
_REPORTED_SECONDS: Final = 300.0
_LOG_SECONDS: Final = 60.0


class CustomFunction:
    """A function of one's own.

    - `name`: its name in the settings.
    - `errors`, `slow`: how often it failed, and how often it exceeded `time_limit`, in seconds.
    - `switched_off`: true once it was slow too often.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        time_limit: float = TIME_LIMIT,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.name = name
        self.time_limit = time_limit
        self.errors = 0
        self.slow = 0
        self.switched_off = False
        self._function = function
        self._clock = clock
        self._slowness = 0.0
        self._problem = ""
        self._failed_at = -inf
        self._log_from = -inf

    def numbers(self, candidates: Sequence[interface.Candidate], request: interface.Request) -> list[float] | None:
        """Return a number for each candidate; None if the function fails or is switched off."""
        if self.switched_off:
            return None
        begun = self._clock()
        numbers = None
        try:
            numbers = _checked(self._function(candidates, request), len(candidates))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # also CancelledError and GeneratorExit, because the call never awaits
            self._failed(error, begun)
        self._count_time(self._clock() - begun)
        return numbers

    def findings(self) -> list[dict[str, Any]]:
        """Return what is wrong with it: whether it failed lately, and whether it is switched off."""
        found: list[dict[str, Any]] = []
        if self.switched_off:
            detail = f"{self.slow} choices lasted longer than {self.time_limit:g} s"
            found.append({"finding": "policy_switched_off", "policy": self.name, "detail": detail})
        if self._clock() - self._failed_at < _REPORTED_SECONDS:
            detail = f"{self._problem}; {self.errors} failures since the start"
            found.append({"finding": "policy_failed", "policy": self.name, "detail": detail})
        return found

    def _failed(self, error: BaseException, now: float) -> None:
        self.errors += 1
        self._failed_at = now
        self._problem = f"it raised {type(error).__name__}: {text_of(error)}"
        if now >= self._log_from:
            self._log_from = now + _LOG_SECONDS
            # No exc_info: a log renderer reads the error's text, which can raise.
            frames = "".join(format_tb(error.__traceback__))
            log.warning("policy failed, the default decides", policy=self.name, reason=self._problem, exception=frames)

    def _count_time(self, seconds: float) -> None:
        if seconds <= self.time_limit:
            self._slowness = max(self._slowness - _FORGIVEN, 0.0)
            return
        self.slow += 1
        self._slowness += 1
        if self._slowness >= _MOST_SLOW:
            self.switched_off = True
            log.error("policy switched off, because it is slow", policy=self.name, seconds=seconds)


def _checked(numbers: Any, count: int) -> list[float]:
    """Return a function's result as one number for each of `count` candidates. Raises TypeError and ValueError."""
    if iscoroutine(numbers):
        numbers.close()
        raise TypeError("it is a coroutine function, and must be a plain one")
    costs = [float(number) for number in islice(numbers, count + 1)]  # an iterator may have no end
    if len(costs) != count:
        found = f"more than {count}" if len(costs) > count else str(len(costs))
        raise ValueError(f"it returned {found} numbers for {count} candidates")
    for cost in costs:
        if isnan(cost) or cost == -inf:
            raise ValueError(f"it returned {cost}, which is no cost")
    return costs


class CustomPolicy:
    """Functions of one's own in the choice.

    - `replaces`: the costs of the one function replace those of the default. If false, the functions add to them.
    - `near`: the share above the lowest cost within which costs are ties, which `random` breaks.
    """

    def __init__(self, functions: list[CustomFunction], replaces: bool, random: Random, near: float = 0.0) -> None:
        self.functions = functions
        self.replaces = replaces
        self._random = random
        self._near = near

    def decide(
        self,
        usual: Policy,
        candidates: list[Candidate],
        request: Request,
        seen: Sequence[interface.Candidate],
        asked: interface.Request,
    ) -> Decision | None:
        """Return the decision; None if all candidates are excluded.

        - `usual`: the policy that decides if the functions fail, and to whose costs they are added.
        - `seen`, `asked`: the candidates and the request as the functions receive them.
        """
        numbers = {each.name: found for each in self.functions if (found := each.numbers(seen, asked)) is not None}
        if not numbers:
            return usual(candidates, request)
        decision = None if self.replaces else usual(candidates, request)
        unit = CostUnit.SCORE if decision is None else decision.unit
        worth = 1.0 if decision is None else _worth_of_token(unit, candidates)
        terms_of: dict[Target, dict[str, float]] = {}
        left: list[Candidate] = []
        totals: list[float] = []
        excluded: list[tuple[Candidate, str]] = []
        for place, candidate in enumerate(candidates):
            terms = {} if decision is None else decision.terms(candidate)
            added: dict[str, float] = {}
            excluded_by = None
            for name, found in numbers.items():
                if found[place] == inf:
                    excluded_by = excluded_by or name
                elif worth:
                    added[name] = found[place] * worth
            if excluded_by is not None:
                excluded.append((candidate, excluded_by))
                continue
            terms_of[candidate.target] = added
            left.append(candidate)
            totals.append(sum(terms.values()) + sum(added.values()))
        if not left:
            return None

        def all_terms(candidate: Candidate) -> dict[str, float]:
            terms = {} if decision is None else decision.terms(candidate)
            return {**terms, **terms_of[candidate.target]}

        chosen = one_of_lowest(left, totals, self._random, self._near)
        return Decision(chosen, left, all_terms, unit=unit, excluded=excluded)

    def added(self, decision: Decision) -> float:
        """Return what the functions added to the cost of the chosen candidate."""
        terms = decision.terms(decision.chosen)
        return sum([terms.get(each.name, 0.0) for each in self.functions])

    def findings(self) -> list[dict[str, Any]]:
        """Return what is wrong with the functions."""
        return [finding for each in self.functions for finding in each.findings()]


def _worth_of_token(unit: CostUnit, candidates: list[Candidate]) -> float:
    """Return a prefill token in a cost's unit, the same for all candidates; 0 if it has no place in the unit."""
    if unit is CostUnit.TOKENS:
        return 1.0
    rates = [candidate.rates.token for candidate in candidates if candidate.rates is not None]
    return sum(rates) / len(rates) if unit is CostUnit.SECONDS and rates else 0.0
