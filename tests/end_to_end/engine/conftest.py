"""Two real vLLM workers for all tests, and the traffic measured once.

ENGINE_DIR    where the engine is installed (see `installation.py`)
ENGINE_TABLE  a file to write the table to, as Markdown
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.client import Client
from engine.conversations import conversations
from engine.installation import Installation
from engine.report import Run, markdown, print_table
from engine.servers import RouterProcess, VllmWorker, running

# policy, users at a time, seconds between an answer and the next turn
RUNS = (
    ("kv_aware", 1, 0.0),
    ("kv_aware", 1, 0.3),
    ("round_robin", 1, 0.3),
    ("kv_aware", 8, 0.0),
    ("round_robin", 8, 0.0),
)


@pytest.fixture(scope="session")
def installation() -> Installation:
    found = Installation(Path(os.environ.get("ENGINE_DIR", ".engine")).absolute())
    if not found.complete():
        pytest.fail(f"no engine in {found.directory}: run `make test-engine`")
    return found


@pytest.fixture(scope="session")
def logs(installation: Installation) -> Path:
    """The folder of the servers' logs."""
    return installation.directory / "logs"


@pytest.fixture(scope="session")
def fleet(installation: Installation, logs: Path) -> Iterator[list[VllmWorker]]:
    """Two workers."""
    workers = [VllmWorker(f"worker{number}", installation, logs) for number in range(2)]
    with running(*workers):
        yield workers


@pytest.fixture
def workers(fleet: list[VllmWorker]) -> list[VllmWorker]:
    """The two workers, both running, whatever the test before did to them."""
    for worker in fleet:
        if not worker.running:
            worker.start()
            worker.wait_until_ready()
    return fleet


@pytest.fixture(scope="session")
def runs(fleet: list[VllmWorker], logs: Path) -> list[Run]:
    """The conversations, sent to empty caches for each entry of RUNS."""
    measured = []
    for policy, users, think_seconds in RUNS:
        # Engines that share two cores pause for more than a second now and then, and must not be ejected for it.
        with RouterProcess(fleet, logs, "--policy", policy, patience=30.0) as router, Client(router) as client:
            router.reset_caches()
            answers = client.converse_all(conversations(), users, think_seconds)
            measured.append(Run(policy, users, think_seconds, answers))
    print_table(measured)
    if path := os.environ.get("ENGINE_TABLE"):
        Path(path).write_text(markdown(measured))
    return measured
