"""Telling an indexer of a publication's sources, and forgetting them afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from kvrouter.tools.replay.index_client import IndexClient, IndexerError, RankName
from kvrouter.tools.replay.publication import SUBSCRIBE_TIMEOUT_S, Publication
from kvrouter.tools.replay.recorded import Recording


@asynccontextmanager
async def registered(
    client: IndexClient, recording: Recording, publication: Publication, model: str
) -> AsyncIterator[dict[int, RankName]]:
    """Register every source, under the names given by source number, until the end of the block.

    Returns once the indexer is subscribed to all. Raises IndexerError.
    """
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
            with suppress(IndexerError):  # it may be gone, or not know of a source that was never registered
                await asyncio.shield(client.unregister(name, model))
