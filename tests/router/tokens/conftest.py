"""The bundled model's tokenizer, an engine that uses it, a client of that engine, and short trials of tokenizers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from itertools import islice

import aiohttp
import pytest
from played_engine import MODEL, PlayedEngine

from router.tokens import text_encoder
from router.tokens.engine_client import EngineClient
from router.tokens.engine_tokenizer import EngineTokenizer
from router.tokens.local_tokenizer import LocalTokenizer
from router.tokens.tokenizers import Tokenizers


@pytest.fixture(scope="module")
def local() -> LocalTokenizer:
    return LocalTokenizer.load(str(MODEL))


@pytest.fixture(scope="module")
def short_trials() -> Iterator[None]:
    """Try tokenizers with few of the texts, because a whole trial takes most of a second of processor time."""
    whole = text_encoder.trial_texts
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_encoder, "trial_texts", lambda special: islice(whole(special), 0, None, 20))
        yield


@pytest.fixture
async def tokenizers(local: LocalTokenizer, request: pytest.FixtureRequest) -> AsyncIterator[Tokenizers]:
    """Tokenizers with the bundled one for the model m. The parameter is their timeout in seconds."""
    tokenizers = Tokenizers(timeout_seconds=getattr(request, "param", 30))
    tokenizers.add("m", local)
    yield tokenizers
    await tokenizers.close()


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture
async def engine(local: LocalTokenizer) -> AsyncIterator[PlayedEngine]:
    async with PlayedEngine(local).serving() as engine:
        yield engine


@pytest.fixture
def asker(engine: PlayedEngine, session: aiohttp.ClientSession) -> EngineTokenizer:
    """The tokenizer that calls `engine`."""
    return EngineTokenizer(EngineClient(session, "m", timeout_seconds=10), lambda: [engine.url], 2**20)
