"""A client of the index: registration of replayed streams, and queries."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from kvevents.decoding import read_json
from kvrouter.tools.replay.publication import SUBSCRIBE_TIMEOUT_S, Publication
from kvrouter.tools.replay.recorded import Recording

TIMEOUT_S = 10.0
TENANT = "default"


class IndexerError(Exception):
    """An indexer that is unreachable, refuses, or sends an unreadable answer."""


@dataclass(frozen=True, slots=True)
class RankName:
    """The name of a DP rank at an indexer."""

    instance: str
    dp_rank: int


class _Rank(msgspec.Struct):
    dp_rank: int
    last_seq: int | msgspec.UnsetType | None = msgspec.UNSET


class _Worker(msgspec.Struct):
    worker: str
    ranks: list[_Rank] = []


class _Workers(msgspec.Struct):
    workers: list[_Worker]


class _Instance(msgspec.Struct):
    longest_matched: int = 0
    by_rank: dict[str, int] | None = msgspec.field(name="DP", default=None)


class IndexClient:
    """A client of one indexer. All methods raise IndexerError."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url.rstrip("/")

    async def register(
        self, rank: RankName, model: str, block_size: int | None, engine: str, endpoint: str, replay: str, topic: str
    ) -> None:
        """Register a stream, which the indexer then follows."""
        body = {
            "endpoint": endpoint,
            "replay_endpoint": replay,
            "type": engine,
            "modelname": model,
            "tenant_id": TENANT,
            "instance_id": rank.instance,
            "dp_rank": rank.dp_rank,
            "topic": topic,
        }
        await self._post("/register", body if block_size is None else body | {"block_size": block_size})

    async def unregister(self, rank: RankName, model: str) -> None:
        """Unregister a stream."""
        body = {"instance_id": rank.instance, "modelname": model, "dp_rank": rank.dp_rank, "tenant_id": TENANT}
        await self._post("/unregister", body)

    async def matched(
        self, ranks: list[RankName], model: str, token_ids: list[int], adapter: str | None, cache_salt: str | None
    ) -> list[int]:
        """Return the number of tokens that each rank holds; 0 for a rank that is not in the answer."""
        body: dict[str, Any] = {"model": model, "token_ids": token_ids, "tenant_id": TENANT}
        optional = {"lora_name": adapter, "cache_salt": cache_salt}
        answer = await self._post("/query", body | {name: value for name, value in optional.items() if value})
        try:
            tenants = read_json(answer, dict[str, dict[str, _Instance]])
        except msgspec.DecodeError as error:
            raise IndexerError(f"{self._url}/query sent an unreadable answer: {error}") from error
        instances = tenants.get(TENANT, {})
        return [_matched(instances.get(rank.instance, _Instance()), rank.dp_rank) for rank in ranks]

    async def last_seqs(self) -> dict[RankName, int | None] | None:
        """Return the last sequence number read from each stream; `None` if the indexer has no `/workers`."""
        try:
            async with self._session.get(f"{self._url}/workers") as response:
                if response.status != 200:
                    return None
                workers = read_json(await response.read(), _Workers).workers
        except msgspec.DecodeError:
            return None
        except (aiohttp.ClientError, TimeoutError) as error:
            raise IndexerError(f"{self._url} cannot be reached: {error or type(error).__name__}") from error
        return {
            RankName(worker.worker, rank.dp_rank): rank.last_seq
            for worker in workers
            for rank in worker.ranks
            if rank.last_seq is not msgspec.UNSET
        }

    async def _post(self, path: str, body: dict[str, Any]) -> bytes:
        try:
            async with self._session.post(self._url + path, json=body) as response:
                answer = await response.read()
                if response.status >= 300:
                    reason = answer[:500].decode(errors="replace")
                    raise IndexerError(f"{self._url}{path} answers {response.status}: {reason}")
                return answer
        except (aiohttp.ClientError, ValueError, TimeoutError) as error:
            raise IndexerError(f"{self._url} cannot be reached: {error or type(error).__name__}") from error


def _matched(instance: _Instance, dp_rank: int) -> int:
    if instance.by_rank is None:
        return instance.longest_matched
    return instance.by_rank.get(str(dp_rank), 0)


@asynccontextmanager
async def registered(
    client: IndexClient, recording: Recording, publication: Publication, model: str
) -> AsyncIterator[dict[int, RankName]]:
    """Register every source until the end of the block, and yield its name by source number. Raises IndexerError."""
    names = {
        number: RankName(f"{recording.name}/{source.worker}", source.dp_rank)
        for number, source in recording.sources.items()
    }
    try:
        for number, source in recording.sources.items():
            published = publication.sources[number]
            endpoints = published.endpoint, published.replay_endpoint, source.topic.decode(errors="replace")
            await client.register(names[number], model, source.block_size, source.engine, *endpoints)
        for published in publication.sources.values():
            try:
                await published.subscribed()
            except TimeoutError:
                raise IndexerError(
                    f"the indexer did not subscribe to {published.endpoint} within {SUBSCRIBE_TIMEOUT_S:g} s"
                ) from None
        yield names
    finally:
        for name in names.values():
            with suppress(IndexerError):  # the indexer may have ended, or never registered a source
                await asyncio.shield(client.unregister(name, model))
