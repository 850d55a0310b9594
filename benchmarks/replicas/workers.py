"""Several simulated workers in this process: `python -m benchmarks.replicas.workers 8` prints their URLs in a line.

Their steps are slow, so that the machine's own speed has no effect.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import AsyncExitStack

from simulator.worker import SimulatedWorkerSettings
from simulator.worker.serve import running

SETTINGS = SimulatedWorkerSettings(
    num_blocks=1024,
    max_model_len=8192,
    max_num_batched_tokens=256,
    base_step_s=0.02,
    prefill_s_per_token=0.002,
    decode_s_per_sequence=0.002,
)


async def serve(count: int) -> None:
    """Serve until SIGINT or SIGTERM."""
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(running(SETTINGS)) for _ in range(count)]
        print(*urls, flush=True)
        await stopped.wait()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
