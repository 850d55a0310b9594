"""The token ids of a request's prompts, by the router or an engine."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
from played_engine import PlayedEngine
from prometheus_client import CollectorRegistry

from http_api.errors import RequestError
from indexer.hashing import PackedPrompt
from router.apis.requests import ChatPrompt, Prompt, TextPrompts, TokenPrompts, Truncation
from router.tokens.engine_client import EngineClient
from router.tokens.engine_tokenizer import EngineTokenizer
from router.tokens.local_tokenizer import LocalTokenizer
from router.tokens.model_state import TokenizerCollector
from router.tokens.model_tokenizer import ModelTokenizer
from router.tokens.probes import ProbeKind
from router.tokens.tokenizers import INLINE_BYTES, INLINE_CHARACTERS, MAX_WAITING, Tokenizers, TokenizerUnavailableError

USER = {"role": "user", "content": "What holds the cache?"}
LONG = "the worker holds the prefix\n" * INLINE_CHARACTERS


def lists(token_ids: list[PackedPrompt]) -> list[list[int]]:
    return [list(ids) for ids in token_ids]


async def ids_of(tokenizers: Tokenizers, prompt: Prompt) -> list[list[int]]:
    return lists(await tokenizers.token_ids("m", prompt))


@pytest.mark.parametrize("texts", [["the cache"], ["a", "b"], [LONG], [LONG, "a", LONG], [""]])
async def test_short_and_long_texts_are_tokenized(
    tokenizers: Tokenizers, local: LocalTokenizer, texts: list[str]
) -> None:
    assert await ids_of(tokenizers, TextPrompts(texts)) == lists(local.encode(texts, add_special_tokens=True))


@pytest.mark.parametrize("content", ["hi", LONG])
async def test_chat_is_rendered_and_tokenized(tokenizers: Tokenizers, local: LocalTokenizer, content: str) -> None:
    chat = ChatPrompt([{"role": "user", "content": content}])
    assert await ids_of(tokenizers, chat) == lists(local.encode([local.render(chat)], add_special_tokens=False))


async def test_token_ids_pass_through(tokenizers: Tokenizers, local: LocalTokenizer) -> None:
    assert await ids_of(tokenizers, TokenPrompts([[5, 6], [7]])) == [[5, 6], [7]]
    assert await ids_of(tokenizers, TokenPrompts([])) == []
    assert await ids_of(tokenizers, TokenPrompts([[local.vocab_size - 1]])) == [[local.vocab_size - 1]]


@pytest.mark.parametrize(
    ("lists", "param", "place"),
    [
        ([[1, 10**9]], "prompt", "prompt[1]"),
        ([[1], [10**9]], "prompt", "prompt[1][0]"),
        ([[10**9]], "token_ids", "token_ids[0]"),
    ],
)
async def test_token_id_outside_the_vocabulary_is_refused(
    tokenizers: Tokenizers, local: LocalTokenizer, lists: list[list[int]], param: str, place: str
) -> None:
    with pytest.raises(RequestError) as caught:
        await ids_of(tokenizers, TokenPrompts(lists, param=param))
    assert (caught.value.status, caught.value.param) == (400, param)
    assert caught.value.message.startswith(f"{place} is 1000000000, which is not in the model's vocabulary.")
    assert f"from 0 to {local.vocab_size - 1}" in caught.value.message


@pytest.mark.parametrize(
    ("truncation", "expected"),
    [
        (Truncation(2), [3, 4]),
        (Truncation(2, "right"), [1, 2]),
        (Truncation(9), [1, 2, 3, 4]),
        (Truncation(9, "right"), [1, 2, 3, 4]),
        (Truncation(0), []),
        (Truncation(0, "right"), []),
    ],
)
async def test_prompt_is_truncated_on_the_requested_side(
    tokenizers: Tokenizers, truncation: Truncation, expected: list[int]
) -> None:
    assert await ids_of(tokenizers, TokenPrompts([[1, 2, 3, 4]], truncation)) == [expected]


async def test_texts_are_truncated_after_tokenization(tokenizers: Tokenizers) -> None:
    whole = (await ids_of(tokenizers, TextPrompts(["the worker holds the prefix"])))[0]
    assert await ids_of(tokenizers, TextPrompts(["the worker holds the prefix"], truncation=Truncation(3))) == [
        whole[-3:]
    ]


async def test_token_ids_are_unknown_without_a_tokenizer(tokenizers: Tokenizers) -> None:
    with pytest.raises(TokenizerUnavailableError, match="'other'"):
        await tokenizers.token_ids("other", TextPrompts(["a"]))
    # Token ids need no tokenizer.
    assert lists(await tokenizers.token_ids("other", TokenPrompts([[1]]))) == [[1]]
    tokenizers.remove("m")
    tokenizers.remove("m")
    with pytest.raises(TokenizerUnavailableError, match="'m'"):
        await tokenizers.token_ids("m", TextPrompts(["a"]))


async def test_engine_tokenizes_for_a_model(
    tokenizers: Tokenizers, asker: EngineTokenizer, local: LocalTokenizer
) -> None:
    tokenizers.add("m", ModelTokenizer(engine=asker))
    chat = ChatPrompt([USER])
    assert tokenizers.tokenize_now("m", chat) is None
    found = await tokenizers.tokenize("m", chat)
    assert found.token_ids is found.identities
    assert found.token_ids == local.tokenize(chat)
    assert tokenizers.tokenize_now("m", ChatPrompt([USER])) == found  # known by now
    # Its vocabulary is not known here.
    assert lists(await tokenizers.token_ids("m", TokenPrompts([[10**9]]))) == [[10**9]]


async def test_engine_tokenizes_only_its_probe_kinds(
    tokenizers: Tokenizers, asker: EngineTokenizer, engine: PlayedEngine, local: LocalTokenizer
) -> None:
    tokenizer = ModelTokenizer(local, asker, asked={ProbeKind.SYSTEM})
    tokenizers.add("m", tokenizer)
    system = ChatPrompt([{"role": "system", "content": "Be brief."}, USER])
    assert tokenizers.tokenize_now("m", ChatPrompt([USER])) is not None
    assert engine.asked.total() == 0
    assert tokenizers.tokenize_now("m", system) is None
    assert (await tokenizers.tokenize("m", system)).token_ids == local.tokenize(system)
    assert engine.asked.total() == 1
    assert (tokenizer.usage.local.prompts, tokenizer.usage.engine.prompts) == (1, 1)


async def test_likely_tokens_are_used_if_no_engine_answers(
    tokenizers: Tokenizers, session: aiohttp.ClientSession, local: LocalTokenizer
) -> None:
    asked = EngineTokenizer(EngineClient(session, "m"), lambda: ["http://127.0.0.1:9"], 2**20)
    tokenizers.add("m", ModelTokenizer(local, asked, asked={ProbeKind.PLAIN}))
    found = await tokenizers.tokenize("m", ChatPrompt([USER]))
    assert found.identities == local.tokenize(ChatPrompt([USER]))
    assert found.token_ids is not found.identities  # so it counts as a guess
    tokenizers.add("m", ModelTokenizer(engine=asked))
    with pytest.raises(TokenizerUnavailableError):
        await tokenizers.tokenize("m", ChatPrompt([USER]))


async def test_likely_tokens_need_no_wait_if_no_worker_has_an_endpoint(
    tokenizers: Tokenizers, asker: EngineTokenizer, engine: PlayedEngine, local: LocalTokenizer
) -> None:
    engine.renders = engine.tokenizes = False
    tokenizers.add("m", ModelTokenizer(local, asker, suspected=True))
    assert tokenizers.tokenize_now("m", ChatPrompt([USER])) is None  # the worker may have one
    await tokenizers.tokenize("m", ChatPrompt([USER]))
    found = tokenizers.tokenize_now("m", ChatPrompt([USER]))
    assert found is not None
    assert found.identities == local.tokenize(ChatPrompt([USER]))
    assert found.token_ids is not found.identities
    asker.try_again(engine.url)
    assert tokenizers.tokenize_now("m", ChatPrompt([USER])) is None


async def test_suspected_tokenizer_is_used_again_once_it_agrees(
    tokenizers: Tokenizers, asker: EngineTokenizer, engine: PlayedEngine, local: LocalTokenizer
) -> None:
    tokenizer = ModelTokenizer(local, asker, suspected=True)
    tokenizers.add("m", tokenizer)
    for number in range(100):
        assert tokenizer.route == ("engine" if tokenizer.suspected else "local")
        await tokenizers.tokenize("m", ChatPrompt([USER | {"content": f"prompt {number}"}]))
    assert not tokenizer.suspected
    assert 20 < engine.asked.total() < 50


async def test_event_loop_runs_while_a_long_text_is_tokenized(tokenizers: Tokenizers) -> None:
    tokenizing = asyncio.ensure_future(tokenizers.token_ids("m", TextPrompts([LONG * 200])))
    turns = 0
    while not tokenizing.done():
        await asyncio.sleep(0)
        turns += 1
    assert len(tokenizing.result()[0]) > 100_000
    assert turns > 20


@pytest.mark.parametrize("tokenizers", [0.001], indirect=True)
async def test_tokenization_timeout_leaves_token_ids_unknown(tokenizers: Tokenizers) -> None:
    with pytest.raises(TokenizerUnavailableError, match=r"not tokenized within 0\.001 s"):
        await tokenizers.token_ids("m", TextPrompts([LONG * 100]))


async def test_waiting_texts_are_limited(tokenizers: Tokenizers, local: LocalTokenizer) -> None:
    asked = [tokenizers.token_ids("m", TextPrompts([f"{number} {LONG}"])) for number in range(MAX_WAITING + 10)]
    results = await asyncio.gather(*asked, return_exceptions=True)
    refused = [result for result in results if isinstance(result, TokenizerUnavailableError)]
    assert len(refused) == 10
    # And there is room again.
    last = TextPrompts([f"{MAX_WAITING + 9} {LONG}"])
    assert await tokenizers.token_ids("m", last) == local.encode(last.texts, add_special_tokens=True)


async def test_short_or_cached_text_is_tokenized_at_once(tokenizers: Tokenizers, local: LocalTokenizer) -> None:
    opening = [{"role": "user", "content": f"new here: {LONG}"}, {"role": "assistant", "content": "I see."}]
    assert tokenizers.tokenize_now("m", ChatPrompt(opening)) is None
    whole = await tokenizers.tokenize("m", ChatPrompt(opening))
    assert tokenizers.tokenize_now("m", ChatPrompt(opening)) == whole
    longer = ChatPrompt([*opening, USER])
    at_once = tokenizers.tokenize_now("m", longer)
    assert at_once.token_ids == local.encode([local.render(longer)], add_special_tokens=False)
    # Looking up takes time, too.
    again = ChatPrompt([*opening, USER])
    assert tokenizers.tokenize_now("m", again, INLINE_BYTES + 1) is None
    assert await tokenizers.tokenize("m", again, INLINE_BYTES + 1) == at_once


async def test_refusal_in_a_thread_equals_refusal_at_once(tokenizers: Tokenizers) -> None:
    for size in (0, INLINE_BYTES + 1):
        with pytest.raises(RequestError, match="chat template refuses"):
            await tokenizers.tokenize("m", ChatPrompt([USER], continue_final_message=True), size)
        with pytest.raises(RequestError, match="surrogate"):
            await tokenizers.tokenize("m", TextPrompts(["\ud800"]), size)


async def test_metrics_count_tokenizer_routes(
    tokenizers: Tokenizers, session: aiohttp.ClientSession, local: LocalTokenizer
) -> None:
    registry = CollectorRegistry()
    registry.register(TokenizerCollector(tokenizers))
    asked = EngineTokenizer(EngineClient(session, "m"), list, 2**20)
    tokenizers.add("n", ModelTokenizer(engine=asked))
    tokenizers.add("o", ModelTokenizer(local, asked, asked={ProbeKind.TOOLS}))
    tokenizers.tokenize_now("m", ChatPrompt([USER]))
    for model, source in {"m": "local", "n": "engine", "o": "mixed"}.items():
        assert registry.get_sample_value("kvrouter_tokenizer", {"model": model, "source": source}) == 1
    assert registry.get_sample_value("kvrouter_tokenizer_probes", {"model": "o"}) == 1
    labels = {"model": "m", "source": "local"}
    assert registry.get_sample_value("kvrouter_tokenizer_prompts_total", labels) == 1
    assert (registry.get_sample_value("kvrouter_tokenizer_seconds_total", labels) or 0) > 0
    assert registry.get_sample_value("kvrouter_tokenizer_cache_bytes", {"model": "n"}) == 0
