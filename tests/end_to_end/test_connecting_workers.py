"""Workers whose publishers connect to the router (`events.bind`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio
from router_under_test import RouterUnderTest, router, until
from scripted_worker import scripted_worker

from benchmarks.ports import free_port
from kvevents import BlockStored, EventBatch, WireForm, encode_batch
from kvevents.frames import live_frames
from router.settings import ConfigError, Settings, load_settings
from simulator.worker import SimulatedWorkerSettings
from simulator.worker.serve import running
from worker.publisher import PublisherConfig

PROMPT = "The worker that holds the longest prefix answers soonest. " * 8
BODY = {"model": "simulated", "prompt": PROMPT, "max_tokens": 1}


def worker_of(endpoint: str, name: str) -> SimulatedWorkerSettings:
    events = PublisherConfig(publisher="zmq", endpoint=endpoint, topic=f"kv@{name}@simulated")
    return SimulatedWorkerSettings(kv_events=events, connects=True)


async def publishers(routed: RouterUnderTest) -> dict[str, Any]:
    listed = (await routed.call("/workers")).json()["publishers"]
    return {each["topic"]: (each["worker"], each["problem"]) for each in listed}


async def test_prefixes_are_known_from_workers_that_connect() -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    async with running(worker_of(endpoint, "one")) as one, running(worker_of(endpoint, "two")) as two:
        workers = [{"url": one, "name": "one"}, {"url": two, "name": "two"}]
        async with router(workers=workers, events={"bind": [endpoint]}) as routed:
            first = await routed.call("/v1/completions", BODY)
            await until(lambda: publishers(routed), lambda found: f"kv@{first.worker}@simulated" in found)
            assert (await publishers(routed))[f"kv@{first.worker}@simulated"] == (first.worker, None)

            async def matched() -> dict[str, int]:
                answer = await routed.call("/match", {"model": "simulated", "prompt": PROMPT})
                return {match["worker"]: match["matched_tokens"] for match in answer.json()["matches"]}

            await until(matched, lambda found: found[first.worker] > 0)
            again = await routed.call("/v1/completions", BODY)
            assert (again.worker, again.overlap) == (first.worker, again.cached)


async def test_health_names_problems_of_publishers_that_connect() -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    batch = encode_batch(EventBatch(1.0, [BlockStored([2], 1, [5, 6], 2)]), WireForm.VLLM_ARRAYS)
    with zmq.asyncio.Context() as context:
        async with (
            scripted_worker() as worker,
            router(workers=[{"url": worker.url, "name": "one"}], events={"bind": [endpoint]}) as routed,
        ):
            await routed.until_up()
            sockets = {topic: context.socket(zmq.XPUB) for topic in (b"kv@one@m", b"kv@other@m")}
            for topic, socket in sockets.items():
                socket.connect(endpoint)
                assert await socket.recv() == b"\x01"
                await socket.send_multipart(live_frames(topic, 1, batch))

            def named(found: list[dict[str, Any]]) -> dict[str, str]:
                return {each["finding"]: each["detail"] for each in found if each.get("worker") in (None, "one")}

            expected = {"events_lost", "parents_unknown", "replay_missing", "publisher_unknown"}
            await until(routed.findings, lambda found: named(found).keys() >= expected)
            found = named(await routed.findings())
            assert "batch 0" in found["events_lost"]
            assert "'kv@other@m'" in found["publisher_unknown"]
            for socket in sockets.values():
                socket.close(0)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("events: {bind: ['tcp://*:5557']}", "server.token"),
        ("events: {bind: ['tcp://127.0.0.1:0']}", "a port"),
        ("events: {bind: ['tcp://127.0.0.1:5557']}\nserver: {processes: 2}", "processes"),
        ("events: {publisher_keys: /nowhere}", "publisher_keys"),
    ],
)
def test_unsafe_bindings_are_refused(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=problem):
        load_settings(file)


def test_all_addresses_may_be_bound_with_a_token() -> None:
    assert Settings(events={"bind": ["tcp://*:5557"]}, server={"token": "t"}).events.bind == ["tcp://*:5557"]
