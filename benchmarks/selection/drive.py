"""Measures one side in one process, with its own Python: `python drive.py SIDE TARGETS`. It needs no other module.

Each call chooses a worker for a prompt of 1,024 tokens, reserves its load, and releases it. All prompts share their
first half. No side has event streams, so each predicts what workers have cached.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from time import perf_counter, process_time
from typing import Any

TOKENS = 1024
PROMPTS = 64
CALLS = 2000
WARM_UP = 200
CALLERS = 16

# Returns the tokens of a prompt that the chosen worker has cached.
Call = Callable[[list[int]], Awaitable[int]]


async def dynamo_calls(service: Any, targets: int) -> Call:
    """Return a call of Dynamo's interface, whichever package has it."""
    for number in range(targets):
        worker = {"worker_id": number, "endpoint": f"ray://{number}", "block_size": 16, "total_kv_blocks": 100_000}
        await service.upsert_worker(worker)

    async def call(prompt: list[int]) -> int:
        answer = await service.select_and_reserve({"token_ids": prompt})
        await service.free_reservation(answer["selection_id"])
        return int(answer["overlap"]["longest_matched"])

    return call


async def library_calls(targets: int, stack: AsyncExitStack) -> Call:
    """Return a call of the library."""
    from kvrouter.selection import Prompt, Selector

    selector = await stack.enter_async_context(Selector())
    for number in range(targets):
        await selector.upsert_worker(f"worker-{number}", model="m", block_size=16, capacity=100_000)

    async def call(prompt: list[int]) -> int:
        held = await selector.reserve(Prompt(model="m", token_ids=prompt))
        held.release()
        return held.selection.overlap

    return call


async def calls_of(side: str, targets: int, stack: AsyncExitStack) -> Call:
    """Return the call of a side: `dynamo`, `class` (its interface over kvrouter), or `library`."""
    if side == "library":
        return await library_calls(targets, stack)
    service: Any
    if side == "dynamo":
        os.environ["DYN_ROUTER_USE_KV_EVENTS"] = "false"
        from dynamo.llm import SelectionService as DynamoService

        service = DynamoService()
    else:
        from kvrouter.adapters.dynamo import SelectionService

        service = SelectionService()
    stack.push_async_callback(asyncio.sleep, 0.2)  # a shutdown ends in the event loop
    stack.callback(service.shutdown)
    return await dynamo_calls(service, targets)


async def measure(side: str, targets: int) -> dict[str, Any]:
    """Return the seconds of each call, then the calls a second of 16 callers at once, their CPU and their hits."""
    prompts = [[*range(TOKENS // 2), *range(n * TOKENS, n * TOKENS + TOKENS // 2)] for n in range(1, PROMPTS + 1)]
    async with AsyncExitStack() as stack:
        call = await calls_of(side, targets, stack)
        seconds = []
        for number in range(WARM_UP + CALLS):
            began = perf_counter()
            await call(prompts[number % PROMPTS])
            seconds.append(perf_counter() - began)
        cached = 0

        async def caller(first: int) -> None:
            nonlocal cached
            for number in range(first, CALLS, CALLERS):
                tokens = await call(prompts[number % PROMPTS])
                cached += tokens  # not in one statement with the await, which other callers would overwrite

        began, cpu = perf_counter(), process_time()
        await asyncio.gather(*[caller(first) for first in range(CALLERS)])
        rate, cpu = CALLS / (perf_counter() - began), (process_time() - cpu) / CALLS
    return {"seconds": seconds[WARM_UP:], "rate": rate, "cpu": cpu, "cached": cached / CALLS / TOKENS}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(measure(sys.argv[1], int(sys.argv[2])))))
