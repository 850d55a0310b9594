"""Requests that are sent to a second worker after the first failed, for each way to fail of a real process.

Only generation that is not stored is. A refused connection is no sending.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import aiohttp
import faulty_worker
import pytest
from router_under_test import router

pytestmark = pytest.mark.anyio

FLEET = {"metrics_interval": 0.25, "stall_seconds": 1.0, "probe_interval": 1.0}
HANGS = ("hang after the head", "hang after the body", "SIGSTOP")
# The requests by kind: method, path and body.
KINDS = {
    "generation": ("POST", "/v1/completions", {"model": "m", "prompt": "x", "max_tokens": 4}),
    "unstored response": ("POST", "/v1/responses", {"model": "m", "input": "x", "store": False}),
    "stored response": ("POST", "/v1/responses", {"model": "m", "input": "x"}),
    "file": ("POST", "/v1/files", {"purpose": "x"}),
    "idempotent": ("GET", "/v1/files/file-0123456789", None),
}
REPEATABLE = ("generation", "unstored response")
# By the way to fail, the status that a client receives and the number of sendings: of repeatable kinds, and of others.
# Without a status, the client waits, or its response is broken off.
EXPECTED: dict[str, tuple[tuple[int | None, int], tuple[int | None, int]]] = {
    **dict.fromkeys(HANGS, ((200, 2), (None, 1))),
    "reset": ((200, 2), (502, 1)),
    "refused": ((200, 1), (200, 1)),
    "late": ((200, 1), (200, 1)),
    "half an answer": ((None, 1), (None, 1)),
    "429": ((200, 2), (429, 1)),
    "500": ((500, 1), (500, 1)),
    "503": ((200, 2), (503, 1)),
}


@contextmanager
def process(way: str, log: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Run a faulty worker, and yield its URL and its process."""
    with subprocess.Popen([sys.executable, faulty_worker.__file__, way, str(log)], stdout=subprocess.PIPE) as worker:
        try:
            assert worker.stdout is not None
            yield f"http://127.0.0.1:{int(worker.stdout.readline())}", worker
        finally:
            worker.kill()


def sendings(log: Path) -> int:
    return log.read_bytes().count(b"\n")


async def sent(way: str, kind: str, log: Path) -> tuple[int | None, int]:
    """Send a request to two workers, of which the first to receive it fails. Return the status and the sendings."""
    method, path, body = KINDS[kind]
    patience = 30.0 if EXPECTED[way][kind not in REPEATABLE][0] else 4.0
    with process(way, log) as (one, gone), process(way, log) as (other, _):
        async with router(one, other, fleet=FLEET, policy={"name": "round_robin"}) as routed:
            if way == "refused":
                gone.kill()
                gone.wait()
            status = None
            with suppress(TimeoutError, aiohttp.ClientError):
                async with asyncio.timeout(patience):
                    status = (await routed.call(path, body, method)).status
            return status, sendings(log)


@pytest.mark.parametrize("way", EXPECTED)
async def test_only_unstored_generation_is_sent_twice(way: str, tmp_path: Path) -> None:
    found = await asyncio.gather(*(sent(way, kind, tmp_path / kind) for kind in KINDS))
    assert dict(zip(KINDS, found, strict=True)) == {kind: EXPECTED[way][kind not in REPEATABLE] for kind in KINDS}
