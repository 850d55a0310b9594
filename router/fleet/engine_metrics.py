"""The load that engines report in /metrics, which includes requests of other clients.

The names of vLLM's, SGLang's and TensorRT-LLM's metrics are known. Other engines report nothing that is used.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto

_RUNNING = {"vllm:num_requests_running", "sglang:num_running_reqs", "trtllm_num_requests_running"}
_WAITING = {"vllm:num_requests_waiting", "sglang:num_queue_reqs", "trtllm_num_requests_waiting"}
_USAGE = {"vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage", "trtllm_kv_cache_utilization"}
_PREEMPTIONS = {"vllm:num_preemptions_total", "sglang:num_retracted_requests_total"}
_PROGRESS = {
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "sglang:prompt_tokens_total",
    "sglang:generation_tokens_total",
}
# The parser of prometheus_client needs tens of milliseconds for all the histograms of an engine.
_SAMPLE = re.compile(
    rf"^({'|'.join(sorted(_RUNNING | _WAITING | _USAGE | _PREEMPTIONS | _PROGRESS))})(?:\{{(.*)\}})? +(\S+)",
    re.MULTILINE,
)
# In vLLM, the present state has the value 1. An engine that sleeps at level 0 is in no state, and keeps its cache.
_SLEEP = re.compile(r'^vllm:engine_sleep_state\{[^}\n]*sleep_state="(\w+)"[^}\n]*\} +1(?:\.0)?$', re.MULTILINE)
_SLEEP_METRIC = "vllm:engine_sleep_state{"
_CACHES_NOTHING = re.compile(r'^vllm:cache_config_info\{[^}\n]*enable_prefix_caching="False"', re.MULTILINE)
_DRAFTS = re.compile(r"^vllm:spec_decode_num_drafts", re.MULTILINE)
_POOLED = re.compile(r"^vllm:mooncake_store_", re.MULTILINE)
_STARTED = re.compile(r"^process_start_time_seconds(?:\{[^}\n]*\})? +(\S+)", re.MULTILINE)
_RANK = re.compile(r'(?:^|,) *(?:engine|dp_rank)="([0-9]{1,5})"')
# With priorities, SGLang reports a total whose priority is empty, and again the part of each priority.
_OF_ONE_PRIORITY = re.compile(r'(?:^|,) *priority="[^"]')
# Higher values are ignored: they are not counts.
_HIGHEST = 1e15
_MOST_RANKS = 1024


@dataclass(slots=True)
class EngineLoad:
    """The load that a DP rank reports.

    - `waiting`: the requests in its queue; None if not reported.
    - `kv_usage`: the share of its KV cache in use; None if not reported.
    - `tokens`: the tokens that it has computed since its start.
    - `preemptions`: the requests that it has preempted since its start.
    """

    running: int = 0
    waiting: int | None = None
    kv_usage: float | None = None
    tokens: int = 0
    preemptions: int = 0


def read_engine_loads(text: str) -> dict[int, EngineLoad]:
    """Return the load in an engine's /metrics by DP rank; empty for an unknown engine."""
    loads: dict[int, EngineLoad] = {}
    for name, labels, value in _samples(text):
        found = _RANK.search(labels)
        rank = int(found.group(1)) if found else 0
        if rank not in loads and len(loads) >= _MOST_RANKS:
            continue
        load = loads.setdefault(rank, EngineLoad())
        if name not in _PROGRESS and _OF_ONE_PRIORITY.search(labels):
            continue
        if name in _RUNNING:
            load.running = _added(load.running, value)
        elif name in _WAITING:
            load.waiting = _added(load.waiting or 0, value)
        elif name in _USAGE:
            load.kv_usage = min(max(value, load.kv_usage or 0.0), 1.0)
        elif name in _PREEMPTIONS:
            load.preemptions = _added(load.preemptions, value)
        else:
            load.tokens = _added(load.tokens, value)
    return loads


class Sleep(Enum):
    """The sleep state of an engine, and whether it keeps its cache."""

    AWAKE = auto()
    WITH_CACHE = auto()
    WITHOUT_CACHE = auto()


def read_sleep(text: str) -> Sleep | None:
    """Return whether an engine sleeps by its /metrics; None if they do not report it."""
    if _SLEEP_METRIC not in text:
        return None
    states = set(_SLEEP.findall(text))
    if "awake" in states:
        return Sleep.AWAKE
    return Sleep.WITHOUT_CACHE if states else Sleep.WITH_CACHE


def _added(total: int, value: float) -> int:
    return min(total + int(value), int(_HIGHEST))


def _samples(text: str) -> Iterator[tuple[str, str, float]]:
    for name, labels, value in _SAMPLE.findall(text):
        try:
            number = float(value)
        except ValueError:
            continue
        if 0 <= number <= _HIGHEST:
            yield name, labels, number


def _number(value: str) -> float:
    """Return a number of the text; 0 for anything else."""
    try:
        return float(value)
    except ValueError:
        return 0.0


@dataclass(frozen=True, slots=True)
class EngineView:
    """The load that a rank reports, and how much of it is beyond the requests that the router knows.

    - `unseen`: requests of other clients.
    - `waiting`: those that wait in the engine's queue.
    - `kv_usage`: the share of the KV cache in use; None if not reported.
    - `queue`: all requests in the engine's queue, those of this router too; None if not reported.
    - `running`: all requests that the engine runs.
    - `preemptions`: the requests that the engine has preempted since its start.
    """

    unseen: int = 0
    waiting: int = 0
    kv_usage: float | None = None
    queue: int | None = None
    running: int = 0
    preemptions: int = 0


NOTHING_KNOWN = EngineView()


class EngineMetrics:
    """The last scrape of one worker, which expires after `stale` seconds.

    - `sleep`: whether the engine sleeps; None if it does not report it.
    - `caches_prefixes`: False if the engine reports that prefix caching is off.
    - `pooled`: whether the engine reports that it uses a shared pool.
    - `progress_at`: the time at which its token counters last increased.
    - `answers`: whether the worker ever answered a scrape.
    """

    def __init__(self, stale: float = 5.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._stale = stale
        self._clock = clock
        self._views: dict[int, EngineView] = {}
        self._tokens: dict[int, int] = {}
        self.read_at = 0.0
        self._started = 0.0
        self.sleep: Sleep | None = None
        self.caches_prefixes = True
        self.drafts = False
        self.pooled = False
        self._asked_at: float | None = None
        self.answers = False
        self.progress_at = clock()
        self._rank_progress_at: dict[int, float] = {}
        self._has_requests = False

    def scrape_began(self) -> None:
        """Record the begin of a scrape."""
        if self._asked_at is None:
            self._asked_at = self._clock()

    def scrape_answered(self) -> None:
        """Record that the worker answered a scrape, with any status."""
        self._asked_at, self.answers = None, True

    @property
    def unanswered(self) -> float:
        """Seconds since the begin of an unanswered scrape; 0 without one, and before the first answer to any."""
        return 0.0 if self._asked_at is None or not self.answers else self._clock() - self._asked_at

    @property
    def computes(self) -> bool:
        """True if the last scrape shows requests, and recent ones show that the engine computes."""
        now = self._clock()
        recent = now - self.read_at <= self._stale and now - self.progress_at <= self._stale
        return recent and self._has_requests

    def read(self, text: str, in_flight: Mapping[int, int]) -> bool:
        """Parse the answer, with the known requests of each rank. Return whether it is that of a new process."""
        self.sleep = read_sleep(text)
        self.caches_prefixes = _CACHES_NOTHING.search(text) is None
        self.drafts = _DRAFTS.search(text) is not None
        self.pooled = _POOLED.search(text) is not None
        loads = read_engine_loads(text)
        self._has_requests = any(load.running or load.waiting for load in loads.values())
        self._views = {}
        for rank, load in loads.items():
            waiting = load.waiting or 0
            unseen = max(load.running + waiting - in_flight.get(rank, 0), 0)
            self._views[rank] = EngineView(
                unseen, min(unseen, waiting), load.kv_usage, load.waiting, load.running, load.preemptions
            )
        tokens = {rank: load.tokens for rank, load in loads.items()}
        # Several server processes may answer in turn, so an earlier start than before is no sign of a new process.
        started = max([_number(value) for value in _STARTED.findall(text)], default=0.0)
        restarted = 0 < self._started < started
        restarted |= any(handled < self._tokens.get(rank, 0) for rank, handled in tokens.items())
        self._started = max(self._started, started)
        if tokens != self._tokens:
            self.progress_at = self._clock()
            for rank, handled in tokens.items():
                if handled != self._tokens.get(rank):
                    self._rank_progress_at[rank] = self.progress_at
            self._tokens = tokens
        self.read_at = self._clock()
        return restarted

    def rank_progress_at(self, dp_rank: int) -> float:
        """Return the time at which the counters of a rank last increased; 0 if they never did."""
        return self._rank_progress_at.get(dp_rank, 0.0)

    def get(self, dp_rank: int) -> EngineView:
        """Return the load of a rank; `NOTHING_KNOWN` if the last scrape has expired."""
        if self._clock() - self.read_at > self._stale:
            return NOTHING_KNOWN
        return self._views.get(dp_rank, NOTHING_KNOWN)
