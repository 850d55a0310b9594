"""Prefill and decode vLLMs that die, and clients that disconnect: no waiting request is lost, and no load is kept.

`make test-engine-pd` runs these tests. A worker stopped with SIGSTOP accepts connections, and its part of a request
can be ended at any point.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from engine.installation import Installation
from engine.pairs import LEASE_SECONDS, asked, completed, metrics, pair_worker, prompts, router_before
from engine.processes import wait_for
from engine.servers import RouterProcess, VllmWorker, running

pytestmark = pytest.mark.engine_pd

TOKENS = 200
MANY = 3000  # which are not there when the first is read
PATIENCE = 60.0  # so that a stopped worker does not count as hung
Answer = tuple[list[int], dict[str, int]]


@pytest.fixture(scope="module")
def vllms(installation: Installation, logs: Path) -> Iterator[dict[str, VllmWorker]]:
    found = {"alone": VllmWorker("alone", installation, logs)}
    found |= {name: pair_worker(name, installation, logs) for name in ("prefill", "decode")}
    with running(*found.values()):
        yield found


@pytest.fixture
def pair(vllms: dict[str, VllmWorker], logs: Path, tmp_path: Path) -> Iterator[RouterProcess]:
    """A router before one prefill and one decode worker, both running, whatever the test before did to them."""
    killed = [worker for worker in vllms.values() if not worker.running]
    for worker in killed:
        worker.start()
    for worker in killed:
        worker.wait_until_ready()
    with router_before([vllms["prefill"]], [vllms["decode"]], logs, tmp_path, patience=PATIENCE) as router:
        yield router


@contextmanager
def asking(router: RouterProcess, prompt: str) -> Iterator[Future[Answer]]:
    """A completion under way."""
    with ThreadPoolExecutor(1) as threads:
        yield threads.submit(completed, router.url, prompt, TOKENS)


def all_tokens(url: str, some: list[str]) -> list[list[int]]:
    return [completed(url, prompt)[0] for prompt in some]


def is_sent(router: RouterProcess, worker: VllmWorker) -> bool:
    """Return whether the router has a request in flight at a worker."""
    return bool(router.workers()[worker.url]["requests_in_flight"])


def test_answers_are_complete_if_prefill_worker_dies_before_prefill(
    pair: RouterProcess, vllms: dict[str, VllmWorker]
) -> None:
    long = prompts(1)[2:]
    vllms["prefill"].kill()
    assert all_tokens(pair.url, long) == all_tokens(vllms["alone"].url, long)


def test_answer_is_complete_if_prefill_worker_dies_during_prefill(
    pair: RouterProcess, vllms: dict[str, VllmWorker]
) -> None:
    prompt = prompts(2)[-2]
    vllms["prefill"].pause()
    with asking(pair, prompt) as answer:
        wait_for(lambda: is_sent(pair, vllms["prefill"]), 30, "the prefill worker has it")
        vllms["prefill"].kill()
        assert answer.result(60)[0] == completed(vllms["alone"].url, prompt, TOKENS)[0]


def test_answer_is_complete_if_prefill_worker_dies_before_transfer(
    pair: RouterProcess, vllms: dict[str, VllmWorker]
) -> None:
    prompt = prompts(3)[-2]
    vllms["decode"].pause()
    before = metrics(vllms["prefill"])["request_success_total"]
    with asking(pair, prompt) as answer:
        wait_for(
            lambda: metrics(vllms["prefill"])["request_success_total"] > before,
            30,
            "the prefill worker has done it",
        )
        vllms["prefill"].kill()
        vllms["decode"].go_on()
        assert answer.result(60)[0] == completed(vllms["alone"].url, prompt, TOKENS)[0]


def test_stream_is_complete_if_prefill_worker_dies_after_transfer(
    pair: RouterProcess, vllms: dict[str, VllmWorker]
) -> None:
    prompt = prompts(4)[-2]
    with streamed(pair, prompt) as events:
        tokens = next(events)
        vllms["prefill"].kill()
        for more in events:
            tokens += more
    assert tokens == completed(vllms["alone"].url, prompt, TOKENS)[0]


def test_prefill_worker_serves_alone_after_decode_worker_dies(
    pair: RouterProcess, vllms: dict[str, VllmWorker]
) -> None:
    prompt, *others = prompts(5)[2:]
    with streamed(pair, prompt, MANY) as events:
        next(events)
        vllms["decode"].kill()
    assert all_tokens(pair.url, others) == all_tokens(vllms["alone"].url, others)


@pytest.mark.parametrize("leaves", ["before the decode", "in the stream"])
def test_disconnected_client_leaves_no_requests_or_blocks(
    pair: RouterProcess, vllms: dict[str, VllmWorker], leaves: str
) -> None:
    prompt = prompts(6 if leaves == "in the stream" else 7)[-2]
    if leaves == "in the stream":
        with streamed(pair, prompt, MANY) as events:
            next(events)
    else:
        vllms["decode"].pause()
        before = metrics(vllms["prefill"])["request_success_total"]
        with streamed(pair, prompt, MANY):
            wait_for(
                lambda: metrics(vllms["prefill"])["request_success_total"] > before, 30, "the prefill worker is done"
            )
        vllms["decode"].go_on()
    for worker in (vllms["prefill"], vllms["decode"]):
        wait_for(lambda: not is_sent(pair, worker), 30, "the router has nothing in flight")  # noqa: B023
        wait_for(lambda: not left_in(worker), LEASE_SECONDS + 20, "the worker has nothing left")  # noqa: B023
    assert completed(pair.url, prompt)[0] == completed(vllms["alone"].url, prompt)[0]


def left_in(worker: VllmWorker) -> dict[str, float]:
    """Requests and blocks that a worker still holds."""
    found = metrics(worker)
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return {name: found[name] for name in names if found[name]}


@contextmanager
def streamed(router: RouterProcess, prompt: str, tokens: int = TOKENS) -> Iterator[Iterator[list[int]]]:
    """Send a completion and yield the tokens of each event. The client disconnects at the end of the context."""
    address = urlsplit(router.url)
    body = json.dumps(asked(prompt, tokens, stream=True)).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((address.hostname, address.port), timeout=60) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)

        def events() -> Iterator[list[int]]:
            with connection.makefile("rb") as lines:
                for line in lines:
                    if line.startswith(b"data: {"):
                        choices = json.loads(line.removeprefix(b"data: ")).get("choices")
                        if choices and choices[0].get("token_ids"):
                            yield choices[0]["token_ids"]

        yield events()
