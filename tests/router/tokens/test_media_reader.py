"""Prompts with images: an engine reports the tokens and hash of each image once, as it computes them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import msgspec
import pytest
from manual_clock import Clock
from played_engine import IMAGE_TOKEN, SEES_IMAGES, PlayedEngine, with_template

from indexer.hashing import MediaSpan, PackedPrompt, media_keys
from router.apis.endpoints import CHAT, read_request
from router.apis.requests import ChatPrompt
from router.tokens import media_reader
from router.tokens.engine_client import EngineClient
from router.tokens.engine_tokenizer import EngineTokenizer
from router.tokens.local_tokenizer import LocalTokenizer
from router.tokens.media_reader import MediaReader
from router.tokens.model_tokenizer import ModelTokenizer
from router.tokens.tokenizers import Tokenized, Tokenizers

TIMEOUT, INTERVAL = 5.0, 60.0


@pytest.fixture(scope="module")
def local() -> LocalTokenizer:
    return with_template(SEES_IMAGES)


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


RED, GREEN = image("data:,red#40"), image("data:,green#500")
ANSWER = {"role": "assistant", "content": "A square."}


def chat(*parts: str | dict[str, Any], more: tuple[dict[str, Any], ...] = (), **fields: Any) -> ChatPrompt:
    """Return the prompt of a request with texts and images, followed by the messages `more`."""
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    body = {"model": "m", "messages": [{"role": "user", "content": content}, *more]} | fields
    prompt = read_request("POST", CHAT, [], msgspec.json.encode(body)).prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


@dataclass
class Played:
    """Tokenizers that call an engine for images, and a manual clock."""

    engine: PlayedEngine
    tokenizers: Tokenizers
    asker: EngineTokenizer
    media: MediaReader
    clock: Clock

    async def read(self, prompt: ChatPrompt) -> Tokenized:
        return await self.tokenizers.tokenize("m", prompt)

    @property
    def asked(self) -> int:
        return self.engine.asked.total()

    def computed(self, prompt: ChatPrompt) -> list[PackedPrompt]:
        """Return the tokens that the engine computes for a prompt."""
        assert prompt.call is not None
        return self.engine._ids(*prompt.call)


@asynccontextmanager
async def playing(local: LocalTokenizer, limit: int = 2**20, patience: float = TIMEOUT) -> AsyncIterator[Played]:
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(PlayedEngine(local).serving())
        engine.image_token = IMAGE_TOKEN
        session = await stack.enter_async_context(aiohttp.ClientSession())
        tokenizers, clock = Tokenizers(), Clock()
        stack.push_async_callback(tokenizers.close)
        asker = EngineTokenizer(EngineClient(session, "m", TIMEOUT), lambda: [engine.url], 2**20)
        media = MediaReader(local, asker, limit, patience, INTERVAL, clock)
        tokenizers.add("m", ModelTokenizer(local, asker, media=media))
        yield Played(engine, tokenizers, asker, media, clock)


@pytest.fixture
async def played(local: LocalTokenizer) -> AsyncIterator[Played]:
    async with playing(local) as played:
        yield played


async def test_prompt_equals_that_of_the_engine_with_one_call_per_image(played: Played) -> None:
    prompt = chat("Look: ", RED, "What is it?")
    found = await played.read(prompt)
    assert found.token_ids is found.identities
    assert found.token_ids == played.computed(prompt)
    assert [span.name for span in found.token_ids[0].media] == ["data:,red#40 None"]
    assert len(found.token_ids[0]) > 40
    assert played.asked == 2, "the image, and the whole of the first prompt"
    another = chat("Look again: ", RED, "What is it?", more=(ANSWER, {"role": "user", "content": "Sure?"}))
    found_now = played.tokenizers.tokenize_now("m", another)
    assert found_now.token_ids == played.computed(another)
    assert played.asked == 2
    several = chat(GREEN, "and", RED, more=(ANSWER, {"role": "user", "content": [RED, GREEN]}))
    assert played.tokenizers.tokenize_now("m", several) is None
    assert (await played.read(several)).token_ids == played.computed(several)
    assert played.asked == 4, "the new image, and the first prompt with several"


async def test_processor_options_distinguish_images(played: Played) -> None:
    await played.read(chat(RED))
    for count, options in enumerate(({"a": 1}, {"a": 2}, {"a": 1}), 1):
        prompt = chat(RED, mm_processor_kwargs=options)
        assert (await played.read(prompt)).token_ids == played.computed(prompt)
        assert played.asked == 2 + min(count, 2)
    sent = played.engine.bodies[-1]
    assert (sent["mm_processor_kwargs"], sent["messages"]) == ({"a": 2}, [{"role": "user", "content": [RED]}])


async def test_concurrent_requests_with_an_image_cause_one_call(played: Played) -> None:
    await played.read(chat(RED))
    prompts = [chat(f"Number {number}: ", GREEN) for number in range(4)]
    for prompt, found in zip(prompts, await asyncio.gather(*map(played.read, prompts)), strict=True):
        assert found.token_ids == played.computed(prompt)
    assert played.asked == 3


async def test_engine_without_image_hashes_yields_length_and_exact_start(played: Played) -> None:
    played.engine.renders = False
    prompt = chat("Look: ", GREEN, "What is it?")
    found, other = await played.read(prompt), await played.read(chat("Look: ", image("data:,blue#500"), "What?"))
    (whole,), (known,) = found.identities, found.token_ids
    assert whole.tokens == played.computed(prompt)[0].tokens
    assert whole.tokens.startswith(known.tokens)
    assert known.media == ()
    assert (len(known), len(whole) - len(known) > 502) == (whole.media[0].start, True)
    assert other.identities[0].media[0].name != whole.media[0].name
    assert other.token_ids == found.token_ids
    played.engine.renders = True
    played.clock.now += media_reader.ASK_AGAIN_SECONDS
    played.asker.try_again(played.engine.url)
    assert (await played.read(replace(prompt))).token_ids[0].media, "it tells names by now"


async def test_image_behind_a_link_expires(played: Played) -> None:
    for prompt in (chat(RED), chat(image("http://a/b.png#7"))):
        await played.read(prompt)
    asked = played.asked
    played.clock.now += media_reader.ASK_AGAIN_SECONDS
    await played.read(chat("Look: ", RED))
    assert played.asked == asked + 1, "compared once more"
    await played.read(chat("Look: ", image("http://a/b.png#7")))
    assert played.asked == asked + 2


def as_without_engine(local: LocalTokenizer, found: Tokenized, prompt: ChatPrompt) -> bool:
    before, whole = local.encode_around_media(prompt)
    return (found.token_ids, found.identities) == ([before], [whole])


@pytest.mark.parametrize("status", [500, 404, 400])
async def test_engines_without_an_answer_are_not_called_for_a_while(
    played: Played, local: LocalTokenizer, status: int
) -> None:
    prompt = chat("Look: ", RED)
    played.engine.refusals = {"/v1/chat/completions/render": status, "/tokenize": status}
    assert as_without_engine(local, await played.read(prompt), prompt)
    asked = played.asked
    for _ in range(3):
        assert as_without_engine(local, await played.read(chat("Look: ", GREEN)), chat("Look: ", GREEN))
    assert played.asked == asked
    played.engine.refusals = {}
    played.clock.now += INTERVAL
    if status == 404:
        played.asker.try_again(played.engine.url)
    assert (await played.read(prompt)).token_ids == played.computed(prompt)


async def test_calls_of_one_request_are_limited(played: Played, local: LocalTokenizer) -> None:
    many = chat(*(image(f"data:,{number}#3") for number in range(20)))
    assert as_without_engine(local, await played.read(many), many)
    assert played.asked == 16
    assert (await played.read(many)).token_ids == played.computed(many)
    assert played.asked == 21


async def test_hanging_engine_delays_requests_at_most_until_the_deadline(local: LocalTokenizer) -> None:
    async with playing(local, patience=0.05) as played:
        played.engine.hangs = True
        prompt = chat("Look: ", RED)
        async with asyncio.timeout(2):
            assert as_without_engine(local, await played.read(prompt), prompt)
        assert played.asked == 1
        assert as_without_engine(local, await played.read(chat(GREEN)), chat(GREEN))
        assert played.asked == 1


@pytest.mark.parametrize("url", ["data:,broken", f"data:,a-name-of-its-own{256 * '!'}#40"])
async def test_refused_image_does_not_affect_other_images(played: Played, local: LocalTokenizer, url: str) -> None:
    await played.read(chat(RED))
    broken, asked = chat(image(url)), played.asked
    for _ in range(2):
        assert as_without_engine(local, await played.read(broken), broken)
    assert played.asked == asked + 1
    assert (await played.read(chat(GREEN))).token_ids == played.computed(chat(GREEN))


async def test_answer_with_another_prompt_is_rejected(played: Played, local: LocalTokenizer) -> None:
    one, several = chat(RED), chat(RED, GREEN)
    played.engine.numbers_images = True
    assert (await played.read(one)).token_ids == played.computed(one)
    assert as_without_engine(local, await played.read(several), several)
    asked = played.asked
    assert as_without_engine(local, await played.read(several), several)
    assert played.asked == asked
    played.engine.numbers_images = False
    played.clock.now += INTERVAL
    assert (await played.read(several)).token_ids == played.computed(several)


async def test_text_with_a_placeholder_is_tokenized_by_the_engine(played: Played, local: LocalTokenizer) -> None:
    await played.read(chat(RED))
    prompt = chat(RED, "and <|endoftext|>, which ends texts")
    assert as_without_engine(local, await played.read(prompt), prompt)


async def test_what_is_kept_is_bounded(local: LocalTokenizer) -> None:
    async with playing(local, limit=5000) as played:
        for number in range(10):
            await played.read(chat(image(f"data:,{number}#300")))
            assert 0 < played.media.cached_bytes <= 5000
        asked = played.asked
        await played.read(chat("Again: ", image("data:,9#300")))
        assert played.asked == asked
        await played.read(chat("Again: ", image("data:,0#300")))
        assert played.asked == asked + 1


def test_key_of_a_block_has_all_its_media() -> None:
    spans = (MediaSpan(3, 9, "a"), MediaSpan(9, 10, "b"))
    keys = {0: [["a", 3]], 1: [["a", -1]], 2: [["a", -5], ["b", 1]]}
    assert {block: msgspec.msgpack.decode(key) for block, key in media_keys(spans, 4).items()} == keys
