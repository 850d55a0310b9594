"""Where a model's tokenizer comes from: the settings, the folder its worker names, or the worker's `/tokenize`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import structlog

from router.fleet.discovery import ServedModel
from router.fleet.fleet import Worker
from router.settings import ModelSettings, TokenizerSettings
from router.tokens.local_tokenizer import LocalTokenizer
from router.tokens.remote_tokenizer import RemoteTokenizer
from router.tokens.tokenizers import Tokenizers, TokenizerUnavailableError

log = structlog.get_logger()


class TokenizerSource:
    """Finds a tokenizer for every model the fleet serves."""

    def __init__(
        self,
        tokenizers: Tokenizers,
        models: dict[str, ModelSettings],
        session: aiohttp.ClientSession,
        settings: TokenizerSettings,
    ) -> None:
        self._tokenizers = tokenizers
        self._models = models
        self._session = session
        self._settings = settings
        self._one_at_a_time = asyncio.Lock()
        self._asked: dict[str, Worker | None] = {}  # by model: the worker whose /tokenize is used, None for a local one

    async def provide(self, worker: Worker, served: ServedModel) -> None:
        """Make sure that a model which an answering worker serves has a tokenizer."""
        async with self._one_at_a_time:  # workers of one model ask for the same, and loading is not thread-safe
            await self._provide(worker, served)

    async def _provide(self, worker: Worker, served: ServedModel) -> None:
        model = served.model
        if model in self._asked:
            asked = self._asked[model]
            if asked is None or (asked.up and asked.trusted):
                return
        elif local := await self._local(served):
            self._asked[model] = None
            self._tokenizers.add(model, local)
            return
        self._asked[model] = worker
        self._tokenizers.add(model, RemoteTokenizer(self._session, worker.url, model, self._settings.timeout))
        log.info("prompts are tokenized by a worker", model=model, worker=worker.url)

    async def _local(self, served: ServedModel) -> LocalTokenizer | None:
        configured = self._models.get(served.model, ModelSettings()).tokenizer
        path = configured or served.root
        if path is None or (configured is None and not await asyncio.to_thread(Path(path).is_dir)):
            return None
        try:
            return await asyncio.to_thread(LocalTokenizer.load, path, self._settings.cache_bytes)
        except TokenizerUnavailableError as error:
            log.warning("tokenizer not loaded", model=served.model, tokenizer=path, reason=str(error))
            return None


async def configured_tokenizers(models: dict[str, ModelSettings], settings: TokenizerSettings) -> Tokenizers:
    """The tokenizers that the settings name, for an indexer that has no workers to ask.

    Raises TokenizerUnavailableError for one that cannot be loaded.
    """
    tokenizers = Tokenizers(settings.threads, settings.timeout)
    for model, named in models.items():
        if named.tokenizer is not None:
            tokenizers.add(model, await asyncio.to_thread(LocalTokenizer.load, named.tokenizer, settings.cache_bytes))
    return tokenizers
