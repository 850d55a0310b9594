"""Questions to the masters of shared pools whose content is unknown, about the keys of single prompts.

They are asked before the choice of a worker, with a deadline. A pool that does not answer in time earns no credit.
"""

from __future__ import annotations

import asyncio
from typing import Final
from urllib.parse import quote

import aiohttp
from yarl import URL

from indexer import Indexer, MatchQuery, PoolHoldings
from indexer.pools.mooncake import stored_keys
from indexer.pools.pool import SharedPool
from indexer.pools.samples import PoolSample
from router.http.client import read_answer

_DEADLINE: Final = 0.05  # seconds
# Maximum number of questions in flight. Further prompts are not verified.
_MOST_QUESTIONS: Final = 32
_MOST_ANSWER: Final = 2**20  # bytes
_TIMEOUT: Final = aiohttp.ClientTimeout(total=_DEADLINE)


class PoolVerifier:
    """Asks pools whether they have the blocks of a prompt that were reported to be there."""

    def __init__(self, indexer: Indexer, session: aiohttp.ClientSession) -> None:
        self._indexer = indexer
        self._session = session
        self._questions = 0

    @property
    def is_due(self) -> bool:
        """True while any pool has to be asked."""
        return any(not pool.known and pool.answers for pool in self._indexer.pools)

    async def verified(self, query: MatchQuery) -> tuple[PoolHoldings, ...]:
        """Return what pools of unknown content have of a prompt, by their answers within the deadline."""
        samples = self._indexer.pool_samples(query) if self.is_due else []
        if not samples or self._questions + len(samples) > _MOST_QUESTIONS:
            return ()
        self._questions += len(samples)
        try:
            found = await asyncio.gather(*[self._ask(pool, sample) for pool, sample in samples])
        finally:
            self._questions -= len(samples)
        return tuple([holdings for holdings in found if holdings is not None and holdings.intervals])

    async def _ask(self, pool: SharedPool, sample: PoolSample) -> PoolHoldings | None:
        keys = sample.keys
        url = f"{pool.config.master}/batch_query_keys?keys={','.join([quote(key, safe='') for key in keys])}"
        try:
            async with self._session.get(URL(url, encoded=True), timeout=_TIMEOUT) as answer:
                present = stored_keys(await read_answer(answer, _MOST_ANSWER)).intersection(keys)
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return None
        gone = [key for key in keys if key not in present]
        pool.store([(key, on_disk, False) for key in gone for on_disk in (False, True)])
        return sample.confirmed(present)
