"""`kvrouter top` in front of a real router, in a terminal of its own."""

from __future__ import annotations

import asyncio
import os
import pty
import sys

from router_under_test import router
from typer.testing import CliRunner

from kvrouter.cli import app
from simulator.worker import SimulatedWorkerSettings
from simulator.worker.serve import running

COMMAND = [sys.executable, "-m", "kvrouter", "top", "--url"]


async def test_top_once_prints_fleet() -> None:
    async with running(SimulatedWorkerSettings()) as worker, router(worker, server={"token": "admin"}) as routed:
        output = await printed(routed.url, "--token", "admin", "--once")
        assert worker.removeprefix("http://") in output
        assert "ready" in output
        assert "1 of 1" in output
        refused = await printed(routed.url, "--once", status=1)
        assert "--token" in refused


async def test_top_reports_unreachable_router() -> None:
    assert "http://127.0.0.1:9" in await printed("http://127.0.0.1:9", status=1)


async def test_top_updates_and_reacts_to_keys() -> None:
    async with running(SimulatedWorkerSettings()) as worker, router(worker) as routed:
        ours, theirs = pty.openpty()
        environment = os.environ | {"TERM": "xterm", "COLUMNS": "160", "LINES": "40"}
        process = await asyncio.create_subprocess_exec(
            *COMMAND, routed.url, stdin=theirs, stdout=theirs, stderr=theirs, env=environment
        )
        os.close(theirs)
        os.set_blocking(ours, False)
        shown = bytearray()
        asyncio.get_running_loop().add_reader(ours, lambda: shown.extend(read(ours)))
        try:
            async with asyncio.timeout(60):
                await until_shown(shown, worker.removeprefix("http://").encode())
                os.write(ours, b"r")
                await until_shown(shown, "requests ▾".encode())
                os.write(ours, b"q")
                assert await process.wait() == 0
        finally:
            asyncio.get_running_loop().remove_reader(ours)
            os.close(ours)
            if process.returncode is None:
                process.kill()
                await process.wait()


def read(number: int) -> bytes:
    try:
        return os.read(number, 65536)
    except OSError:  # its other side is closed
        return b""


async def until_shown(shown: bytearray, text: bytes) -> None:
    while text not in shown:  # noqa: ASYNC110 - a terminal tells nobody
        await asyncio.sleep(0.02)


async def printed(*arguments: str, status: int = 0) -> str:
    ended = await asyncio.to_thread(CliRunner().invoke, app, ["top", "--url", *arguments], env={"COLUMNS": "160"})
    assert ended.exit_code == status, ended.output
    return ended.output
