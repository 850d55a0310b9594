"""`kvrouter serve --processes 2`: one port, the same answers from both processes, and a replacement of a dead one."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families
from scripted_worker import scripted_worker
from waiting import eventually

from kvrouter.processes import KvrouterProcess

LIVE = "kvrouter_sessions", "live"
PROMPT = "The quick brown fox jumps over the lazy dog. " * 8


class TwoProcesses:
    """A router of two processes, and the simulated workers it may have."""

    def __init__(self, router: KvrouterProcess, url: str, workers: list[str]) -> None:
        self.router = router
        self.url = url
        self.workers = workers

    def call(self, path: str, body: Any = None, method: str | None = None) -> Any:
        """An answer's JSON. Every call has a connection of its own, so that the kernel chooses the process."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json", "connection": "close"}
        with urlopen(Request(self.url + path, data, headers, method=method), timeout=60) as answer:
            return json.loads(answer.read())

    def complete(self) -> Any:
        return self.call("/v1/completions", {"model": "simulated", "prompt": PROMPT, "max_tokens": 2})

    def metrics(self) -> list[tuple[str, dict[str, str], float]]:
        with urlopen(f"{self.url}/metrics", timeout=60) as answer:
            text = answer.read().decode()
        return [
            (sample.name, sample.labels, sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        ]

    def figures(self, name: str) -> dict[str, float]:
        """A metric's value in each process."""
        return {labels["process"]: value for known, labels, value in self.metrics() if known == name}

    def processes(self) -> list[int]:
        """The ids of the processes that serve."""
        parent = self.router.pid
        found = []
        for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
            with suppress(FileNotFoundError, ProcessLookupError):  # it may end while it is looked at
                if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                    found.append(int(child))
        return found


@pytest.fixture(scope="module")
def two() -> Iterator[TwoProcesses]:
    with (
        KvrouterProcess(["simulate", "--port", "0"]) as first,
        KvrouterProcess(["simulate", "--port", "0"]) as second,
    ):
        urls = [first.wait_until_listening(), second.wait_until_listening()]
        with KvrouterProcess(["serve", "--worker", urls[0], "--port", "0", "--processes", "2"]) as router:
            yield TwoProcesses(router, router.wait_until_listening(), urls)


def test_any_process_reports_on_a_reservation_of_another(two: TwoProcesses) -> None:
    two.call("/selection/workers", {"worker_id": 7, "endpoint": "ray://a", "block_size": 16, "model_name": "r"})
    for number in range(8):
        id = f"reserved-{number}"
        body = {"model_name": "r", "token_ids": list(range(64)), "selection_id": id}
        assert two.call("/selection/select", body)["worker_id"] == 7
        assert two.call("/selection/reservations", {"model_name": "r", "selection_id": id})["worker_id"] == 7
        assert two.call(f"/selection/reservations/{id}/prefill_complete", method="POST") == {"status": "ok"}
        assert two.call(f"/selection/reservations/{id}", method="DELETE") == {"status": "ok"}
    with pytest.raises(HTTPError, match="404"):
        two.call("/selection/reservations/none", method="DELETE")
    assert two.call("/selection/workers/7", method="DELETE")["worker_id"] == 7
    assert all(two.call("/selection/workers?model_name=r") == [] for _ in range(8))


def test_both_processes_serve_and_label_their_metrics(two: TwoProcesses) -> None:
    def both_served() -> bool:
        two.complete()
        served = [labels["process"] for name, labels, value in two.metrics() if name == "kvrouter_requests_total"]
        return set(served) == {"0", "1"}

    eventually(both_served)
    eventually(lambda: two.figures("kvrouter_process_up") == {"0": 1, "1": 1})
    eventually(lambda: two.figures("kvrouter_sharing_up") == {"0": 1, "1": 1})
    eventually(lambda: two.figures("kvrouter_sharing_routers") == {"0": 1, "1": 1})  # one that died is forgotten
    assert two.call("/health")["processes"] == {"running": 2, "of": 2}


def test_a_session_that_is_finished_at_one_process_ends_at_all(two: TwoProcesses) -> None:
    def live() -> float:
        return sum(value for name, labels, value in two.metrics() if (name, labels.get("state")) == LIVE)

    def are_live() -> bool:
        for number in range(8):
            body = {"model": "simulated", "prompt": PROMPT, "max_tokens": 2, "session_id": f"session {number}"}
            two.call("/v1/completions", body)
        return live() >= 8

    eventually(are_live)
    for number in range(8):
        two.call(f"/finish_session?session_id=session%20{number}", method="POST")
    eventually(lambda: live() == 0, seconds=10.0)  # without it they stay live for a minute


def test_changes_reach_all_processes_and_a_replacement(two: TwoProcesses) -> None:
    added = two.workers[1]
    two.call("/workers", {"url": added})
    assert all(seen(two) == {"http" + each[4:] for each in two.workers} for _ in range(8))
    two.call("/workers/drain", {"url": added})
    assert all(state(two, added) == "drained" for _ in range(8))

    before = two.processes()
    os.kill(before[0], signal.SIGKILL)
    eventually(lambda: len(two.processes()) == 2 and two.processes() != before)
    eventually(lambda: both_run(two))
    assert all(state(two, added) == "drained" for _ in range(8))

    two.call("/workers/undrain", {"url": added})
    eventually(lambda: all(state(two, added) in ("ready", "warming") for _ in range(8)))
    two.call(f"/workers?url={added}", method="DELETE")
    assert all(seen(two) == {two.workers[0]} for _ in range(8))
    with pytest.raises(HTTPError, match="404"):
        two.call(f"/workers?url={added}", method="DELETE")
    assert two.complete()["choices"]


def both_run(two: TwoProcesses) -> bool:
    """Return whether both processes run. A connection that waited for the killed process is reset."""
    with suppress(ConnectionError):
        return bool(two.call("/health")["processes"]["running"] == 2)
    return False


def seen(two: TwoProcesses) -> set[str]:
    return {worker["worker"] for worker in two.call("/workers")["workers"]}


def state(two: TwoProcesses, url: str) -> str:
    [found] = [worker["state"] for worker in two.call("/workers")["workers"] if worker["worker"] == url]
    return str(found)


def test_recording_has_requests_of_all_processes(two: TwoProcesses) -> None:
    lines: list[dict[str, Any]] = []

    def listen() -> None:
        with suppress(OSError), urlopen(f"{two.url}/requests?block_tokens=16", timeout=60) as answer:
            for line in answer:
                lines.append(json.loads(line))
                if ended.is_set():
                    return

    def recorded() -> list[dict[str, Any]]:
        return [line for line in lines if "timestamp" in line]

    ended = threading.Event()
    listening = threading.Thread(target=listen)
    listening.start()
    try:
        eventually(lambda: bool(lines))

        def all_of_both() -> bool:
            """Return whether both processes served some of eight requests, and all eight were recorded."""
            recorded_before, before = len(recorded()), two.figures("kvrouter_requests_total")
            for _ in range(8):
                two.complete()
            after = two.figures("kvrouter_requests_total")
            with suppress(AssertionError):
                eventually(lambda: len(recorded()) == recorded_before + 8, seconds=1)
            both = len(after) == 2 and all(after[process] > before.get(process, 0) for process in after)
            return both and len(recorded()) == recorded_before + 8

        eventually(all_of_both)
    finally:
        ended.set()
        listening.join(60)
    assert len({tuple(line["hash_ids"]) for line in recorded()}) == 1


async def test_command_reaches_each_engine_once_and_all_processes(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    async with scripted_worker() as worker:
        server = {"token": "t", "port": 0, "processes": 2}
        file.write_text(json.dumps({"server": server, "workers": [{"url": worker.url}]}))
        with KvrouterProcess(["serve", "--config", str(file)]) as process:
            url = await asyncio.to_thread(process.wait_until_listening)

            async def statuses(path: str, count: int = 1, **headers: str) -> list[int]:
                """Each request has a connection of its own, so that the kernel chooses the process."""
                found = []
                for _ in range(count):
                    connector = aiohttp.TCPConnector(force_close=True)
                    async with aiohttp.ClientSession(connector=connector) as session:
                        body = {"model": "m", "prompt": "x"}
                        async with session.post(url + path, json=body, headers=headers) as response:
                            found.append(response.status)
                return found

            async def until_all(status: int) -> None:
                async with asyncio.timeout(60):
                    while await statuses("/v1/completions", 16) != [status] * 16:
                        pass

            await until_all(200)
            for path, status in (("/pause", 503), ("/resume", 200)):
                assert await statuses(path, authorization="Bearer t") == [200]
                await until_all(status)
                assert [each.target.partition("?")[0] for each in worker.exchanges].count(path) == 1
