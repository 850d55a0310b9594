"""Long bodies are read in a thread, and what waits for it is bounded: others are served meanwhile."""

from __future__ import annotations

import asyncio
import threading

import pytest

from http_api.errors import RequestError
from router.apis.media import text_length
from router.apis.requests import TextPrompts
from router.forwarding.long_bodies import LongBodies
from router.tokens.tokenizers import Tokenizers


async def test_long_bodies_leave_the_loop_free_and_are_bounded() -> None:
    bodies, gate = LongBodies(100), threading.Event()
    try:
        first = asyncio.create_task(bodies.read(60, lambda: gate.wait(30)))
        second = asyncio.create_task(bodies.read(40, lambda: "read"))
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="being received") as refused:
            await bodies.read(60, lambda: "never")
        assert (refused.value.status, refused.value.retry_after) == (503, 1)
        second.cancel()  # its client left: there is room again
        await asyncio.gather(second, return_exceptions=True)
        third = asyncio.create_task(bodies.read(40, lambda: "read"))
        await asyncio.sleep(0)
        gate.set()
        assert (await first, await third) == (True, "read")
    finally:
        await bodies.close()


async def test_a_prompt_that_is_too_long_is_not_tokenized() -> None:
    tokenizers = Tokenizers(most_characters=10)
    try:
        for texts in (["x" * 11], ["x" * 6, "y" * 5]):
            with pytest.raises(RequestError, match=r"11 characters.*limits\.characters"):
                tokenizers.tokenize_now("m", TextPrompts(texts), 100)
    finally:
        await tokenizers.close()


def test_media_are_no_text() -> None:
    image = {"type": "image_url", "image_url": {"url": "x" * 100}}
    parts = [image, {"type": "text", "text": "abc"}, "de", 7]
    assert text_length([{"content": parts}, {"content": "fgh"}, {"content": None}, {}]) == 8
