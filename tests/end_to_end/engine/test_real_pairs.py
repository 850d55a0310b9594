"""Real prefill and decode vLLMs behind the router: answers are those of one vLLM alone, token by token.

`make test-engine-pd` runs these. KV goes from one process to the other over NIXL (loopback, from and to host memory),
or through files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from engine.installation import Installation
from engine.pairs import (
    SKIP_TOKENS,
    completed,
    metrics,
    pair_worker,
    prompts,
    router_before,
    started,
    storage_worker,
)
from engine.servers import BLOCK_SIZE, VllmWorker

pytestmark = pytest.mark.engine_pd


@pytest.fixture(scope="module")
def alone(installation: Installation, logs: Path) -> Iterator[VllmWorker]:
    worker = VllmWorker("alone", installation, logs)
    with started(worker):
        yield worker


@pytest.fixture(scope="module")
def three(installation: Installation, logs: Path) -> Iterator[list[VllmWorker]]:
    workers = [pair_worker(f"pair{number}", installation, logs) for number in range(3)]
    with started(*workers):
        yield workers


@pytest.mark.parametrize(("prefills", "decodes"), [(1, 1), (1, 2), (2, 1)])
def test_workers_of_one_rank(
    alone: VllmWorker, three: list[VllmWorker], logs: Path, tmp_path: Path, prefills: int, decodes: int
) -> None:
    some = three[: prefills + decodes]
    answers_are_those_of_one(f"{prefills} + {decodes}", alone, some[:prefills], some[prefills:], logs, tmp_path)


def test_workers_of_unequal_ranks(alone: VllmWorker, installation: Installation, logs: Path, tmp_path: Path) -> None:
    one, two = pair_worker("one-rank", installation, logs), pair_worker("two-ranks", installation, logs, ranks=2)
    with started(one, two):
        answers_are_those_of_one("1 + 1 of two ranks", alone, [one], [two], logs, tmp_path)
        answers_are_those_of_one("1 of two ranks + 1", alone, [two], [one], logs, tmp_path)


def test_shared_storage(alone: VllmWorker, installation: Installation, logs: Path, tmp_path: Path) -> None:
    first, second = (storage_worker(f"storage{number}", installation, logs, tmp_path / "kv") for number in range(2))
    with started(first, second):
        answers_are_those_of_one("1 + 1 by files", alone, [first], [second], logs, tmp_path)


def answers_are_those_of_one(
    name: str,
    alone: VllmWorker,
    prefills: Sequence[VllmWorker],
    decodes: Sequence[VllmWorker],
    logs: Path,
    tmp_path: Path,
) -> None:
    """Send the same prompts to one engine and through the router, and print a row of the table."""
    before = [metrics(worker) for worker in decodes]
    sent, same = 0, 0
    with router_before(prefills, decodes, logs, tmp_path) as router:
        for prompt in prompts(sum(map(ord, name))):
            expected, usage = completed(alone.url, prompt)
            tokens, told = completed(router.url, prompt)
            sent += 1
            same += (tokens, told["prompt_tokens"]) == (expected, usage["prompt_tokens"])
    after = [metrics(worker) for worker in decodes]
    moved, computed = (
        sum(new[source] - old[source] for new, old in zip(after, before, strict=True))
        for source in ("external_kv_transfer", "local_compute")
    )
    print(json.dumps({"pairs": name, "requests": sent, "equal": same, "moved": moved, "computed": computed}))
    assert same == sent
    assert moved > 1500  # all but the short prompts'
    assert computed < 2 * SKIP_TOKENS + 2 * sent * BLOCK_SIZE  # and of those no more than the last blocks
