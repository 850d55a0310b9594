"""Long bodies: what the router reads of them beside the prompt is read in a thread, never on the event loop."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from router_under_test import QUICK
from router_under_test import router as running_router
from scripted_worker import Exchange, scripted_workers

from router.apis import abilities, media_items
from router.forwarding.proxy_services import LONG_BODY

PATH = "/v1/chat/completions"
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "QUJD" * (LONG_BODY // 4)}}
CHAT = {"model": "m", "messages": [{"role": "user", "content": [IMAGE]}], "tools": [{"type": "function"}]}


async def refused(exchange: Exchange) -> None:
    await exchange.answer(b'"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser', "400 Bad")


SMALL_PARTS = {"model": "m", "messages": [{"role": "user", "content": [{"type": "image_url"}, *["a"] * 5000]}]}


@pytest.mark.parametrize("asked", ["chat", "explain", "small parts"])
async def test_media_and_abilities_are_read_in_a_thread(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    for module in (media_items,) if asked == "small parts" else (abilities, media_items):

        def recorded(*args: Any, read: Any = module.read_json) -> Any:
            threads.append(threading.current_thread().name)
            return read(*args)

        monkeypatch.setattr(module, "read_json", recorded)
    async with scripted_workers(refused, refused) as workers:
        fleet = [{"url": workers[0].url}, {"url": workers[1].url, "role": "encode"}]
        async with running_router(workers=fleet, fleet=QUICK) as routed:
            await routed.until_up(2)
            threads.clear()
            if asked != "explain":
                assert (await routed.call(PATH, SMALL_PARTS if asked == "small parts" else CHAT)).status == 400
            else:
                assert (await routed.call("/explain", {"request": CHAT})).status == 200
    assert threads
    assert threading.main_thread().name not in threads
