"""Real prefill and decode vLLMs behind the router answer like a single vLLM, token by token.

`make test-engine-pd` runs these tests. KV is transferred between processes over NIXL (loopback, host memory), or
through files.

PAIR_TABLE a file to write the table to, as Markdown; its other rows stay
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from engine.installation import Installation
from engine.pairs import (
    completed,
    metrics,
    pair_worker,
    prompts,
    router_before,
    storage_worker,
)
from engine.processes import wait_for
from engine.servers import BLOCK_SIZE, MODEL, VllmWorker, running
from engine.table import write_table
from engine.web import post_reply

pytestmark = pytest.mark.engine_pd

COLUMNS = ("prefill + decode", "requests", "equal", "tokens moved", "prompt tokens computed by decode workers")


@pytest.fixture(scope="module")
def alone(installation: Installation, logs: Path) -> Iterator[VllmWorker]:
    worker = VllmWorker("alone", installation, logs)
    with running(worker):
        yield worker


@pytest.fixture(scope="module")
def rows() -> Iterator[list[tuple[str, ...]]]:
    """The rows of the table, printed at the end."""
    found: list[tuple[str, ...]] = []
    yield found
    write_table(COLUMNS, found, os.environ.get("PAIR_TABLE"))


Compared = Callable[[str, Sequence[VllmWorker], Sequence[VllmWorker]], None]


@pytest.fixture
def compared(alone: VllmWorker, rows: list[tuple[str, ...]], logs: Path, tmp_path: Path) -> Compared:
    """Sends the same prompts to one engine and through a router before these workers, and adds a row."""

    def compare(name: str, prefills: Sequence[VllmWorker], decodes: Sequence[VllmWorker]) -> None:
        before = [metrics(worker) for worker in decodes]
        sent, same = 0, 0
        with router_before(prefills, decodes, logs, tmp_path) as router:
            for prompt in prompts(name):
                expected, usage = completed(alone.url, prompt)
                tokens, reported = completed(router.url, prompt)
                sent += 1
                same += (tokens, reported["prompt_tokens"]) == (expected, usage["prompt_tokens"])
        after = [metrics(worker) for worker in decodes]
        moved, computed = (
            sum(new[source] - old[source] for new, old in zip(after, before, strict=True))
            for source in ("external_kv_transfer", "local_compute")
        )
        rows.append((name, str(sent), str(same), f"{moved:.0f}", f"{computed:.0f}"))
        print(rows[-1])
        assert same == sent
        assert moved > 1500
        assert computed < 2 * sent * BLOCK_SIZE  # no more than the last blocks

    return compare


def test_pairs_with_one_rank_answer_like_single_worker(
    compared: Compared, installation: Installation, logs: Path
) -> None:
    three = [pair_worker(f"pair{number}", installation, logs) for number in range(3)]
    with running(*three):
        for prefills, decodes in ((1, 1), (1, 2), (2, 1)):
            some = three[: prefills + decodes]
            compared(f"{prefills} + {decodes}", some[:prefills], some[prefills:])


@pytest.mark.parametrize(("prefill_ranks", "decode_ranks"), [(1, 2), (2, 1)])
def test_pairs_with_unequal_ranks_answer_like_single_worker(
    compared: Compared, installation: Installation, logs: Path, prefill_ranks: int, decode_ranks: int
) -> None:
    prefill = pair_worker("prefill-ranks", installation, logs, prefill_ranks)
    decode = pair_worker("decode-ranks", installation, logs, decode_ranks)
    with running(prefill, decode):
        compared(f"DP={prefill_ranks} + DP={decode_ranks}", [prefill], [decode])


def test_pairs_with_shared_storage_answer_like_single_worker(
    compared: Compared, installation: Installation, logs: Path, tmp_path: Path
) -> None:
    prefill, decode = (storage_worker(f"storage{number}", installation, logs, tmp_path / "kv") for number in range(2))
    with running(prefill, decode):
        compared("1 + 1, by files", [prefill], [decode])


def test_pairs_that_receive_ids_answer_like_single_worker(
    alone: VllmWorker, installation: Installation, logs: Path, tmp_path: Path
) -> None:
    """Both workers compute the chat's ids that the router sends, and neither renders it."""
    prefill, decode = (pair_worker(f"ids{number}", installation, logs) for number in range(2))
    with (
        running(prefill, decode),
        router_before([prefill], [decode], logs, tmp_path, forward_tokens=True) as router,
    ):
        wait_for(lambda: list(router.tokenizer()["ids_not_sent"].values()) == ["", ""], 60, "ids are sent")
        before = metrics(decode)["external_kv_transfer"]
        for number, prompt in enumerate(prompts("ids")):
            body = {"model": MODEL, "messages": [{"role": "user", "content": prompt}], "max_tokens": 24}
            body |= {"temperature": 0, "ignore_eos": True}
            expected, found = (post_reply(f"{url}/v1/chat/completions", body)[1] for url in (alone.url, router.url))
            assert found["choices"][0]["message"] == expected["choices"][0]["message"]
            assert found["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"]
            assert router.metric("kvrouter_forwarded_token_requests_total") == number + 1
        assert metrics(decode)["external_kv_transfer"] - before > 1500
