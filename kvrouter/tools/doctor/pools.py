"""The examination of shared pools: the pools of the settings, and workers that use a pool which is not in them."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from typing import Any, Final

import aiohttp
import msgspec

from kvevents import BlockStored, EngineHash
from kvevents.decoding import read_json
from kvevents.events import canonical_medium, is_pooled
from kvrouter.tools.doctor.findings import Finding
from kvrouter.tools.doctor.probes import Worker
from kvrouter.tools.doctor.stream import NoPublisherError, UnreachableError, WatchedStream, reach
from router.http.client import connection_problem
from router.http.headers import number_of
from router.settings import PoolSettings

# vLLM's metrics of its MooncakeStoreConnector.
_MOONCAKE_METRICS: Final = re.compile(r"^vllm:mooncake_store_", re.MULTILINE)
_KEYS: Final = re.compile(r"^master_key_count(?:\{[^}]*\})? ([0-9.eE+]+)", re.MULTILINE)
# Words of the shared prompt: more than the tokens of a block of any engine.
_WORDS: Final = 256
_LAYOUT: Final = "/get_hicache_l3_cache_layout"


class PoolExamination:
    """The examination of one pool of the settings. `findings` are its problems, `passed` the confirmed steps."""

    def __init__(self, pool: PoolSettings, session: aiohttp.ClientSession) -> None:
        self.name = f"pool {pool.name}"
        self.findings: list[Finding] = []
        self.passed: list[str] = []
        self._pool = pool
        self._session = session

    async def run(self) -> None:
        """Examine the master of a Mooncake Store. Pools by events are examined with their workers."""
        if self._pool.master is None or self._pool.events is None:
            return
        try:
            status = read_json(await self._asked("/kv_events/status"), dict[str, Any])
            metrics = await self._asked("/metrics")
            if not status.get("enabled"):
                self._found("pool_events_off", f"{self._pool.master}kv_events/status reports enabled: false")
                return
            await reach(self._pool.events)
            self.passed.append(f"the master answers, and publishes at {self._pool.events}")
            found = _KEYS.search(metrics)
            await self._examine_keys(int(number_of(found[1].encode()) or 0) if found else 0)
        except (aiohttp.ClientError, TimeoutError) as error:
            self._found("pool_unreachable", f"{self._pool.master} {connection_problem(error)}")
        except msgspec.DecodeError:
            self._found("pool_unreachable", f"{self._pool.master}kv_events/status is not that of a master")
        except (UnreachableError, NoPublisherError) as error:
            self._found("pool_unreachable", str(error))

    async def _examine_keys(self, count: int) -> None:
        """Compare the texts of the settings with the keys, if these can be listed."""
        if not count or count > self._pool.most_keys:
            self.passed.append(f"{count} objects, which are not listed")
            return
        keys = (await self._asked("/get_all_keys")).split()
        for model, text in self._pool.models.items():
            if keys and not any(text in key for key in keys):
                self._found("pool_keys", f"no key of {len(keys)} contains {text!r} of {model}: {keys[0]!r}")
                return
        self.passed.append(f"{len(keys)} objects")

    async def _asked(self, path: str) -> str:
        async with self._session.get(str(self._pool.master).rstrip("/") + path) as answer:
            return await answer.text()

    def _found(self, cause: str, evidence: str) -> None:
        self.findings.append(Finding(cause, self.name, evidence))


async def used_pool(worker: Worker, stored: Iterable[BlockStored]) -> str | None:
    """Return the settings for the pool that a worker uses; None if it shows none.

    - `stored`: the blocks that the worker reported. Their media show pools that have no master.
    """
    try:
        layout = read_json(await worker.get(_LAYOUT) or "{}", _Layout)
    except msgspec.DecodeError:
        layout = _Layout()
    if layout.backend == "mooncake":
        return "type: mooncake"
    if _MOONCAKE_METRICS.search(await worker.get("/metrics") or ""):
        return "type: mooncake"
    media = {str(canonical_medium(event.medium)) for event in stored if event.medium}
    pooled = sorted(medium for medium in media if is_pooled(medium) and not medium.islower())
    return f"type: events, media: [{', '.join(pooled)}]" if pooled else None


class SharedPrompt:
    """One prompt for all workers that share blocks, and the hashes that they report for the first blocks of prompts.

    The hash of a block depends on its tokens, and on the seed of the worker's hashes.

    - `pulls`: whether all workers share blocks, because they pull from each other.
    """

    def __init__(self, pulls: bool) -> None:
        self.text = " ".join(secrets.token_hex(4) for _ in range(_WORDS))
        self.pulls = pulls
        self._hashes: dict[tuple[str, str, tuple[int, ...]], dict[str, EngineHash]] = {}

    def record(self, worker: str, model: str, pool: str, streams: Iterable[WatchedStream]) -> int:
        """Record the first blocks that a worker reported so far. Return their number."""
        known = 0
        for stream in streams:
            for event in stream.received.stored():
                first = tuple(event.token_ids[: event.block_size])
                plain = event.lora_name is None and event.lora_id is None and event.cache_salt is None
                if event.parent_block_hash is None and first and plain and not event.extra_keys:
                    self._hashes.setdefault((pool, model, first), {})[worker] = event.block_hashes[0]
                    known += 1
        return known

    def findings(self) -> list[Finding]:
        """Return a finding for each worker whose hashes differ from those of most others.

        Two workers that alone have a block do not show which of them differs. All blocks together do.
        """
        differing: dict[str, dict[str, str]] = {}  # by worker: the workers that it differs from, and the evidence
        for hashes in self._hashes.values():
            for here, engine_hash in hashes.items():
                for there, other in hashes.items():
                    if engine_hash != other:
                        evidence = f"the hash {_shown(engine_hash)}, and {_shown(other)} on {there}"
                        differing.setdefault(here, {}).setdefault(there, evidence)
        found: list[Finding] = []
        while differing:
            worker = max(reversed(differing), key=lambda each: len(differing[each]))
            others = differing.pop(worker)
            if others:
                evidence = f"the first block of a prompt has {next(iter(others.values()))}"
                found.append(Finding("hash_seeds", worker, evidence))
            for another in others:
                del differing[another][worker]
        return found


def _shown(engine_hash: EngineHash) -> str:
    return engine_hash.hex() if isinstance(engine_hash, bytes) else str(engine_hash)


class _Layout(msgspec.Struct):
    """The layout of SGLang's objects in a pool, of which the router reads the rest from `/server_info`."""

    backend: str = ""
