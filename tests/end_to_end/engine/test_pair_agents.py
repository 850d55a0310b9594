"""Messages and responses, which agents send, through real prefill and decode vLLMs: two turns, streamed and not.

`make test-engine-pd` runs these tests. KV is transferred between processes over NIXL (loopback, host memory).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any
from urllib.request import Request, urlopen

import pytest

from engine.conversations import VOCABULARY
from engine.installation import Installation
from engine.pairs import metrics, pair_worker, router_before
from engine.servers import BLOCK_SIZE, MODEL, RouterProcess, VllmWorker, running
from engine.web import post_reply

pytestmark = pytest.mark.engine_pd

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
LIMITS: dict[str, dict[str, Any]] = {MESSAGES: {"max_tokens": 24}, RESPONSES: {"max_output_tokens": 24, "store": False}}


@pytest.fixture(scope="module")
def pair(installation: Installation, logs: Path) -> Iterator[list[VllmWorker]]:
    """A prefill worker and a decode worker."""
    found = [pair_worker(f"agents-{role}", installation, logs) for role in ("prefill", "decode")]
    with running(*found):
        yield found


@pytest.fixture(scope="module")
def router(pair: list[VllmWorker], logs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterProcess]:
    prefill, decode = pair
    with router_before([prefill], [decode], logs, tmp_path_factory.mktemp("agents"), patience=60.0) as router:
        router.wait_until_compared()
        yield router


def body(path: str, turns: list[dict[str, str]], streamed: bool) -> dict[str, Any]:
    given = {"messages" if path == MESSAGES else "input": turns}
    return {"model": MODEL, "temperature": 0, "stream": streamed, **LIMITS[path], **given}


def text_of(path: str, answer: dict[str, Any]) -> str:
    """Return the text of a whole answer."""
    blocks = answer["content"] if path == MESSAGES else [part for item in answer["output"] for part in item["content"]]
    return "".join(block["text"] for block in blocks)


def streamed_text(url: str, path: str, asked: dict[str, Any]) -> tuple[str, str | None]:
    """Return the text of a streamed answer, and the prefill worker that its head names."""
    request = Request(url + path, json.dumps(asked).encode(), {"Content-Type": "application/json"}, method="POST")
    with urlopen(request, timeout=60) as response:
        lines = response.read().decode().splitlines()
        prefill = response.headers["x-kvrouter-prefill-worker"]
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    kind = "content_block_delta" if path == MESSAGES else "response.output_text.delta"
    deltas = [event["delta"] for event in events if event["type"] == kind]
    return "".join(delta["text"] if path == MESSAGES else delta for delta in deltas), prefill


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
def test_both_turns_are_computed_by_the_prefill_worker_and_answered_alike(
    router: RouterProcess, pair: list[VllmWorker], path: str, streamed: bool
) -> None:
    prefill, decode = pair
    random = Random(f"{path} {streamed}")
    turns = [{"role": "user", "content": " ".join(random.choices(VOCABULARY, k=400))}]
    for _ in range(2):
        before = metrics(decode)
        asked = body(path, turns, streamed)
        if streamed:
            text, by = streamed_text(router.url, path, asked)
        else:
            headers, answer = post_reply(router.url + path, asked)
            text, by = text_of(path, answer), headers["x-kvrouter-prefill-worker"]
        after = metrics(decode)
        moved, computed, cached = (
            after[source] - before[source] for source in ("external_kv_transfer", "local_compute", "local_cache_hit")
        )
        print(f"{path} {streamed=}: {moved:.0f} tokens moved, {computed:.0f} computed, {cached:.0f} cached")
        assert by == prefill.url
        assert moved >= BLOCK_SIZE
        assert computed <= BLOCK_SIZE
        _, alone = post_reply(prefill.url + path, body(path, turns, False))  # it computes prompt and answer itself
        assert text == text_of(path, alone)
        turns += [{"role": "assistant", "content": text or "…"}]
        turns += [{"role": "user", "content": " ".join(random.choices(VOCABULARY, k=100))}]
