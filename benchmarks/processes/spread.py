"""The spread of connections over processes: with a shared port each, or with one socket that all accept from."""

from __future__ import annotations

import asyncio
import os
import socket
from collections import Counter
from multiprocessing import get_context
from multiprocessing.synchronize import Semaphore

from router.server.sockets import bind, listen

_spawn = get_context("spawn")


def spread(shared: bool, processes: int, connections: int, apart: float) -> list[int]:
    """Count the connections of each process, the most first. `apart`: seconds between connections; 0: all at once."""
    ready = _spawn.Semaphore(0)
    with bind("127.0.0.1", 0, shared=True) if shared else listen("127.0.0.1", 0) as place:
        port: int = place.getsockname()[1]
        inherited = None if shared else place
        running = [_spawn.Process(target=_serve, args=(inherited, port, ready), daemon=True) for _ in range(processes)]
        for process in running:
            process.start()
        for _ in running:
            ready.acquire()
        try:
            counts = asyncio.run(_connect(port, connections, apart))
        finally:
            for process in running:
                process.kill()
                process.join()
    return sorted(counts.values(), reverse=True) + [0] * (processes - len(counts))


def _serve(inherited: socket.socket | None, port: int, ready: Semaphore) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"%d\n" % os.getpid())
        await reader.read()
        writer.close()

    async def serve() -> None:
        async with await asyncio.start_server(answer, sock=inherited or listen("127.0.0.1", port, shared=True)):
            ready.release()
            await asyncio.Event().wait()

    asyncio.run(serve())


async def _connect(port: int, connections: int, apart: float) -> Counter[bytes]:
    async def one(number: int) -> tuple[bytes, asyncio.StreamWriter]:
        await asyncio.sleep(number * apart)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"who?\n")
        return await reader.readline(), writer

    answers = await asyncio.gather(*map(one, range(connections)))
    for _, writer in answers:
        writer.close()
    return Counter(who for who, _ in answers)
