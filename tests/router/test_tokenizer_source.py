"""Where the tokenizer of a model comes from."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

import worker.simulated
from router.apis.requests import TextPrompts
from router.fleet.discovery import ServedModel
from router.fleet.fleet import Worker
from router.settings import ModelSettings, TokenizerSettings, WorkerSettings
from router.tokens.local_tokenizer import LocalTokenizer
from router.tokens.tokenizer_source import TokenizerSource, configured_tokenizers
from router.tokens.tokenizers import Tokenizers, TokenizerUnavailableError

pytestmark = pytest.mark.anyio

MODEL_FOLDER = str(Path(worker.simulated.__file__).parent / "model")
TEXT = TextPrompts(["What holds the cache?"])


@pytest.fixture(scope="module")
def local_ids() -> list[list[int]]:
    return [list(ids) for ids in LocalTokenizer.load(MODEL_FOLDER).encode(TEXT.texts, add_special_tokens=True)]


class Source:
    """A source, the tokenizers it fills, and two workers whose `/tokenize` answer with their number alone."""

    def __init__(self, source: TokenizerSource, tokenizers: Tokenizers, workers: list[Worker]) -> None:
        self.workers = workers
        self._source = source
        self._tokenizers = tokenizers

    async def told(self, number: int, root: str | None = None) -> list[list[int]]:
        """The token ids of a text once a worker answered that it serves the model."""
        await self._source.provide(self.workers[number], ServedModel("m", "m", None, root))
        return [list(ids) for ids in await self._tokenizers.token_ids("m", TEXT)]


@asynccontextmanager
async def source(**models: ModelSettings) -> AsyncIterator[Source]:
    async with AsyncExitStack() as stack:
        tokenizers = Tokenizers()
        stack.push_async_callback(tokenizers.close)
        session = await stack.enter_async_context(aiohttp.ClientSession())
        workers = [await stack.enter_async_context(answering(number)) for number in range(2)]
        yield Source(TokenizerSource(tokenizers, models, session, TokenizerSettings()), tokenizers, workers)


@asynccontextmanager
async def answering(number: int) -> AsyncIterator[Worker]:
    async def tokenize(_: web.Request) -> web.Response:
        return web.json_response({"tokens": [number]})

    app = web.Application()
    app.router.add_post("/tokenize", tokenize)
    async with TestServer(app) as server:
        answers = Worker(WorkerSettings(url=str(server.make_url(""))))
        answers.problem = None
        yield answers


async def test_the_folder_that_a_worker_names_is_used_if_it_is_here(local_ids: list[list[int]]) -> None:
    async with source() as found:
        assert await found.told(0, MODEL_FOLDER) == local_ids


@pytest.mark.parametrize("root", [None, "/nowhere/m", "organisation/model"])
async def test_otherwise_the_worker_is_asked(root: str | None) -> None:
    async with source() as found:
        assert await found.told(0, root) == [[0]]


async def test_a_folder_without_a_tokenizer_is_no_help(tmp_path: Path) -> None:
    async with source() as found:
        assert await found.told(0, str(tmp_path)) == [[0]]


async def test_what_the_settings_name_wins(local_ids: list[list[int]], tmp_path: Path) -> None:
    async with source(m=ModelSettings(tokenizer=MODEL_FOLDER)) as found:
        assert await found.told(0, str(tmp_path)) == local_ids


async def test_one_worker_is_asked_while_it_is_up() -> None:
    async with source() as found:
        assert await found.told(0) == [[0]]
        assert await found.told(1) == [[0]]
        found.workers[0].problem = "gone"
        assert await found.told(1) == [[1]]
        found.workers[0].problem = None
        assert await found.told(0) == [[1]]


async def test_a_local_tokenizer_needs_no_worker(local_ids: list[list[int]]) -> None:
    async with source() as found:
        await found.told(0, MODEL_FOLDER)
        found.workers[0].problem = "gone"
        assert await found.told(1) == local_ids


async def test_without_workers_the_settings_must_name_tokenizers_that_are_there(
    local_ids: list[list[int]], tmp_path: Path
) -> None:
    named = {"m": ModelSettings(tokenizer=MODEL_FOLDER), "n": ModelSettings()}
    tokenizers = await configured_tokenizers(named, TokenizerSettings())
    try:
        assert [list(ids) for ids in await tokenizers.token_ids("m", TEXT)] == local_ids
        with pytest.raises(TokenizerUnavailableError, match="no tokenizer for model 'n'"):
            await tokenizers.token_ids("n", TEXT)
    finally:
        await tokenizers.close()
    with pytest.raises(TokenizerUnavailableError, match=str(tmp_path)):
        await configured_tokenizers({"m": ModelSettings(tokenizer=str(tmp_path))}, TokenizerSettings())
