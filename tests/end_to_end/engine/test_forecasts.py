"""The errors of predicted times to the first token on two real engines with a slow prefill, printed.

Each engine has its own core, because engines on shared cores slow each other down.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from engine.client import Client
from engine.conversations import conversations
from engine.installation import Installation
from engine.servers import RouterProcess, VllmWorker, running

pytestmark = pytest.mark.engine

USERS = (1, 3)  # at a time: without a queue, and with one
CONVERSATIONS = 12
THINK_SECONDS = 0.3


@pytest.fixture(scope="module")
def workers(installation: Installation, logs: Path) -> Iterator[list[VllmWorker]]:
    cores = sorted(os.sched_getaffinity(0))
    found = [
        VllmWorker(f"slow{number}", installation, logs, installation.model("small"), core=cores[number % len(cores)])
        for number in range(2)
    ]
    with running(*found):
        yield found


@pytest.mark.parametrize("users", USERS)
def test_ttft_predictions_are_reported(workers: list[VllmWorker], logs: Path, users: int) -> None:
    with RouterProcess(workers, logs, patience=60.0) as router, Client(router, words_are_tokens=False) as client:
        router.wait_until_compared()
        answers = client.converse_all(conversations(users)[:CONVERSATIONS], users, THINK_SECONDS)
        (prediction,) = predictions(router)
    times = sorted(answer.time_to_first_token for answer in answers)
    print(f"\n{users} users, TTFT {times[len(times) // 2]:.2f} s in the middle: {prediction}")
    assert all(answer.complete for answer in answers)
    assert len(answers) / 2 < prediction["answers"] <= len(answers)  # those in quick succession are not all watched
    assert prediction["ttft_error"] is not None


def predictions(router: RouterProcess) -> list[dict[str, Any]]:
    """Return the errors per model from the feed of the live page: the median of the last, as a share of the time."""
    with urlopen(f"{router.url}/live", timeout=30) as response:
        for line in response:
            if line.startswith(b"data: "):
                found: list[dict[str, Any]] = json.loads(line.removeprefix(b"data: "))["forecasts"]
                return found
    raise AssertionError("the feed is empty")
