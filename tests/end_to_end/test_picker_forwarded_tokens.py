"""Token ids that the picker adds to bodies which Envoy forwards."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from envoy_client import DESTINATION, EnvoyStream, Mode, set_headers, streamed
from grpc_call import channel_to
from picker_under_test import JSON, PickerUnderTest, picker
from router_under_test import until
from scripted_worker import scripted_workers
from test_forwarded_tokens import AUTO, BODY, MODEL, Engine, reasons, with_ids

from router.apis.endpoints import CHAT
from router.picker import ext_proc_pb2 as pb
from router.tokens.local_tokenizer import LocalTokenizer

SENT = json.dumps(BODY).encode()


@pytest.fixture(scope="module")
def local() -> LocalTokenizer:
    return LocalTokenizer.load(str(MODEL))


@asynccontextmanager
async def forwarding(*engines: Engine, **sections: Any) -> AsyncIterator[PickerUnderTest]:
    """Run a picker that sends ids, after the trials of its workers."""
    async with scripted_workers(*(engine.script for engine in engines)) as workers:
        for worker in workers:
            worker.answers_discovery = False
        urls = [worker.url for worker in workers]
        async with picker(*urls, **AUTO | sections) as (side, port), channel_to(port) as channel:
            await until(
                lambda: reasons(side),
                lambda found: len(found) == len(engines) and not any("trial" in reason for reason in found),
            )
            yield PickerUnderTest(side, channel, [url.removeprefix("http://") for url in urls])


async def asked(found: PickerUnderTest, *modes: int) -> tuple[EnvoyStream, bytes, dict[str, str]]:
    """Send a chat. Return its stream, the body that Envoy forwards, and the headers that the picker sets."""
    stream = found.stream(*modes)
    await stream.head(CHAT, JSON, ("content-length", str(len(SENT))))
    if Mode.BUFFERED in modes[:1]:
        await stream.receive()
    await stream.body(SENT)
    response = await stream.receive()
    if Mode.BUFFERED in modes[:1]:
        common = response.request_body.response
        return stream, common.body_mutation.body or SENT, set_headers(common.header_mutation)
    body, ended = streamed((await stream.receive()).request_body)
    assert ended
    return stream, body, set_headers(response.request_headers.response.header_mutation)


@pytest.mark.parametrize("mode", [Mode.FULL_DUPLEX_STREAMED, Mode.BUFFERED])
async def test_forwarded_body_has_ids_and_its_length(local: LocalTokenizer, mode: int) -> None:
    engine = Engine(local)
    async with forwarding(engine) as found:
        stream, body, headers = await asked(found, mode)
        assert body == with_ids(engine, SENT)
        assert headers["content-length"] == str(len(body))
        await stream.finish()
        assert await found.side.metric("kvrouter_forwarded_token_requests_total", model="m") == 1


@pytest.mark.parametrize("change", [{"version": "0.31.0"}, {"sglang": True, "version": "0.5.20"}], ids=str)
async def test_no_ids_if_one_worker_of_the_model_may_not_receive_them(
    local: LocalTokenizer, change: dict[str, Any]
) -> None:
    """Envoy may send the request to any of them, whatever the picker chose."""
    first, second = Engine(local), Engine(local)
    for name, value in change.items():
        setattr(second, name, value)
    async with forwarding(first, second) as found:
        assert (await reasons(found.side))[0] == ""
        for _ in range(4):
            stream, body, _ = await asked(found)
            assert body == SENT
            await stream.finish()


async def answered(stream: EnvoyStream, prompt_tokens: int, served: Sequence[str] = ()) -> None:
    """Send the response of a worker, which reports its prompt's tokens."""
    message = pb.ProcessingRequest()
    for endpoint in served:
        message.metadata_context.filter_metadata["envoy.lb"].update({f"{DESTINATION}-served": endpoint})
    await stream.answer_head(200, JSON, metadata_context=message.metadata_context)
    await stream.receive()
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": 1}
    await stream.answer_body(json.dumps({"usage": usage}).encode(), True)
    await stream.receive()
    await stream.finish()


async def test_another_count_ends_ids_for_the_worker_that_answered(local: LocalTokenizer) -> None:
    """Envoy sends the request to the fallback."""
    engines = Engine(local), Engine(local)
    async with forwarding(*engines, picker={"fallbacks": 1}) as found:
        stream, body, headers = await asked(found, Mode.FULL_DUPLEX_STREAMED, Mode.FULL_DUPLEX_STREAMED)
        assert body == with_ids(engines[0], SENT)
        _, fallback = headers[DESTINATION].split(",")
        await answered(stream, len(engines[0].ids(SENT)) + 1, [fallback])
        told = dict(zip(found.addresses, await reasons(found.side), strict=True))
        assert "another number" in told.pop(fallback)
        assert list(told.values()) == [""]
        stream, body, _ = await asked(found)
        assert body == SENT
        await stream.finish()
