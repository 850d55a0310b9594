"""The state of the event streams of workers that die, hang and return."""

from __future__ import annotations

import asyncio
import json
import signal
from typing import Any

from router_under_test import RouterUnderTest, router, until
from structlog.testing import capture_logs

from benchmarks.ports import free_port
from kvrouter.processes import KvrouterProcess

PROBED = {"probe_interval": 0.2, "retry_interval": 0.1, "probe_timeout": 0.5, "failed_probes": 2}
PROMPT = {"model": "simulated", "prompt": " ".join(map(str, range(100))), "max_tokens": 1}


async def states(routed: RouterUnderTest) -> set[str]:
    return {rank["state"] for worker in await routed.workers() for rank in worker["ranks"]}


async def until_streams_are(routed: RouterUnderTest, state: str) -> None:
    await until(lambda: states(routed), lambda found: found == {state})


async def live_row(routed: RouterUnderTest) -> Any:
    """Return the worker's rank from the feed of the live page."""
    async with routed.request("/live") as live:
        while True:
            line = (await live.content.readline()).decode()
            if line.startswith("data:"):
                (rank,) = json.loads(line.removeprefix("data:"))["ranks"].values()
                return rank


async def test_stream_of_killed_worker_is_stale_until_restart() -> None:
    port = free_port()
    arguments = ["simulate", "--port", str(port)]
    with capture_logs() as logs, KvrouterProcess(arguments) as killed:
        url = await asyncio.to_thread(killed.wait_until_listening)
        async with router(workers=[{"url": url, "name": "gpu"}], fleet=PROBED) as routed:
            await until_streams_are(routed, "live")
            assert (await routed.call("/v1/completions", PROMPT)).status == 200

            await until(
                lambda: routed.metric("kvrouter_index_blocks", worker="gpu", tier="gpu"), lambda value: value > 0
            )
            killed.send_signal(signal.SIGKILL)
            await until_streams_are(routed, "stale")
            assert await routed.metric("kvrouter_stream_state", worker="gpu", state="live") == 0
            assert await routed.metric("kvrouter_stream_state", worker="gpu", state="stale") == 1
            shown = await live_row(routed)
            assert (shown["stream"], shown["held"]["gpu"] > 0) == ("stale", True)

            with KvrouterProcess(arguments) as another:
                await asyncio.to_thread(another.wait_until_listening)
                await until_streams_are(routed, "live")
                assert (await live_row(routed))["stream"] == "live"
    assert not any("agreement" in line["event"] for line in logs if line.get("worker") == "gpu")


async def test_stream_of_stopped_worker_is_stale_and_not_encrypted() -> None:
    with KvrouterProcess(["simulate"]) as stopped, capture_logs() as logs:
        url = await asyncio.to_thread(stopped.wait_until_listening)
        async with router(url, fleet=PROBED) as routed:
            await until_streams_are(routed, "live")
            stopped.send_signal(signal.SIGSTOP)
            try:
                await until_streams_are(routed, "stale")
                found = await routed.findings()
                assert {each["finding"] for each in found} == {"worker_down"}
            finally:
                stopped.send_signal(signal.SIGCONT)
            await until_streams_are(routed, "live")
    assert not any("encrypted" in str(line) for line in logs if line.get("worker") == url)


async def test_idle_checks_are_not_counted_as_replays() -> None:
    with KvrouterProcess(["simulate"]) as worker:
        url = await asyncio.to_thread(worker.wait_until_listening)
        async with router(url, events={"idle_check": 0.2}) as routed:
            await until_streams_are(routed, "live")

            await until(lambda: routed.metric("kvrouter_stream_idle_checks_total"), lambda value: value >= 2)
            assert await routed.metric("kvrouter_stream_replays_total") == 1
            ((rank,),) = [each["ranks"] for each in await routed.workers()]
            assert rank["batches"]["idle_checks"] >= 2
