"""A worker in a process of its own that fails in one way at the first request of all workers that share its log.

`python faulty_worker.py WAY LOG` prints its port. The log has a line for each request. Later requests are answered.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio import StreamReader, StreamWriter
from pathlib import Path

ANSWER = b'{"id": "resp_0123456789abcdef", "usage": {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10}}'
OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
DISCOVERY = {b"/v1/models": json.dumps({"data": [{"id": "m"}]}).encode(), b"/metrics": b"vllm:num_requests_running 0\n"}
LATE_SECONDS = 3.0


class FaultyWorker:
    """A server that hangs as a whole once it fails by hanging: it then answers no probe and no scrape."""

    def __init__(self, way: str, log: Path) -> None:
        self._way = way
        self._log = log
        self._hangs = asyncio.Event()

    async def serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Answer the requests of one connection."""
        try:
            while not self._hangs.is_set():
                head = await reader.readuntil(b"\r\n\r\n")
                if self._hangs.is_set():
                    break
                await self._answer(head, reader, writer)
            await asyncio.sleep(600)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.transport.abort()

    async def _answer(self, head: bytes, reader: StreamReader, writer: StreamWriter) -> None:
        method, target, _ = head.split(b" ", 2)
        lines = head.lower().split(b"\r\n")
        length = next((int(line[15:]) for line in lines if line.startswith(b"content-length:")), 0)
        asks_tokens = target == b"/tokenize" or target.endswith(b"/render")
        if asks_tokens or (method == b"GET" and not target.startswith(b"/v1/files")):
            await reader.readexactly(length)
            found = DISCOVERY.get(target, b"")
            writer.write(OK % len(found) + found if found else b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
            return
        with self._log.open("ab") as log:
            log.write(b"%b %b\n" % (method, target))
            way = self._way if log.tell() == len(method) + len(target) + 2 else "none"
        if way == "hang after the head":
            self._hangs.set()
            return
        await reader.readexactly(length)
        match way:
            case "hang after the body":
                self._hangs.set()
            case "SIGSTOP":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "reset":
                writer.transport.abort()
            case "half an answer":
                writer.write(OK % len(ANSWER) + ANSWER[:20])
                await writer.drain()
                await asyncio.sleep(0.2)
                writer.transport.abort()
            case "429" | "500" | "503":
                writer.write(b"HTTP/1.1 %b Failed\r\ncontent-length: 2\r\n\r\n{}" % way.encode())
            case _:
                await asyncio.sleep(LATE_SECONDS if way == "late" else 0)
                writer.write(OK % len(ANSWER) + ANSWER)


async def main(way: str, log: Path) -> None:
    """Serve until the process is killed."""
    server = await asyncio.start_server(FaultyWorker(way, log).serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
