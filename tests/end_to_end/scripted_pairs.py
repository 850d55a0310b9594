"""Scripted prefill and decode workers behind a router."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from router_under_test import RouterUnderTest, router
from scripted_worker import Exchange, Script, ScriptedWorker, scripted_workers

PATH = "/v1/completions"
BODY = b'{"model": "m", "prompt": [1, 2, 3], "max_tokens": 4, "stream": true}'  # no worker has to tokenize it
QUICK = {"probe_interval": 0.2, "metrics_interval": 0.1, "stall_seconds": 0.3}
METRICS = b'vllm:num_requests_running{engine="0"} 0.0\n'
HANDED_OVER = b'{"remote_block_ids": [1,2], "remote_engine_id": "e"}'


class Fleet:
    """Workers for prefill and for decode, and a router in front of them."""

    def __init__(self, routed: RouterUnderTest, prefills: list[ScriptedWorker], decodes: list[ScriptedWorker]) -> None:
        self.routed = routed
        self.prefills = prefills
        self.decodes = decodes

    def sent(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return the bodies that the prefill and the decode workers received."""
        prefills, decodes = (
            [
                json.loads(exchange.body)
                for worker in workers
                for exchange in worker.exchanges
                if exchange.target == PATH
            ]
            for workers in (self.prefills, self.decodes)
        )
        return prefills, decodes

    async def nothing_is_left(self) -> None:
        """Wait until no load is left."""
        await self.routed.until_released()


@asynccontextmanager
async def fleet(
    backend: str, prefills: list[Script], decodes: list[Script], *, wholes: tuple[str, ...] = (), **sections: Any
) -> AsyncIterator[Fleet]:
    """Run scripted workers and a router. `wholes`: the URLs of workers that compute prompts and answers."""
    forced = {"backend": backend, "decode_computes": False}  # short prompts would be computed by the decode worker
    async with scripted_workers(*prefills) as first, scripted_workers(*decodes) as second:
        for worker in (*first, *second):
            worker.metrics = METRICS
        workers = [{"url": worker.url, "role": "prefill"} for worker in first]
        workers += [{"url": worker.url, "role": "decode"} for worker in second]
        workers += [{"url": url} for url in wholes]
        async with router(**{"workers": workers, "disaggregation": forced, "fleet": QUICK, **sections}) as routed:
            yield Fleet(routed, first, second)


async def prefill(exchange: Exchange) -> None:
    await exchange.answer(b'{"choices": [], "kv_transfer_params": %b}' % HANDED_OVER)


async def stream(exchange: Exchange) -> None:
    await exchange.begin_chunks()
    await exchange.chunk(b"data: 1\n\n")
    await exchange.chunk(b"")
