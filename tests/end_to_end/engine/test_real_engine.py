"""kvrouter in front of two real vLLM workers, used as its users do."""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import openai
import pytest

from engine.client import ANSWER_TOKENS, Client
from engine.conversations import Conversation, conversations
from engine.installation import Installation
from engine.processes import wait_for
from engine.report import Run
from engine.servers import BLOCK_SIZE, MODEL, RouterProcess, VllmWorker, running
from engine.web import get_json
from kvevents import EventBatch, WireForm, encode_batch
from worker import EventPublisher, Reporter

pytestmark = pytest.mark.engine


def test_every_answer_is_complete(runs: list[Run]) -> None:
    for run in runs:
        assert len(run.answers) >= 60
        assert all(answer.complete for answer in run.answers)


def test_predicted_overlap_equals_engine_report(runs: list[Run]) -> None:
    run = kv_aware(runs, users=1, think_seconds=0.3)
    assert run.exact_share >= 0.95, run.explain_misses()


def test_prediction_without_think_time_misses_at_most_last_answer(runs: list[Run]) -> None:
    """Generated tokens are known from events only, which a client without think time may overtake."""
    run = kv_aware(runs, users=1, think_seconds=0.0)
    assert run.exact_share >= 0.8, run.explain_misses()
    assert all(0 < miss.cached - miss.predicted <= ANSWER_TOKENS + BLOCK_SIZE for miss in run.misses)


@pytest.mark.parametrize("users", [1, 8])
def test_kv_aware_hits_more_than_round_robin(runs: list[Run], users: int) -> None:
    shares = {(run.policy, run.think_seconds): run.cached_share for run in runs if run.users == users}
    think_seconds = 0.3 if users == 1 else 0.0
    assert shares["kv_aware", think_seconds] > shares["round_robin", think_seconds] + 0.05


def test_late_router_knows_blocks_of_warm_workers(workers: list[VllmWorker], logs: Path) -> None:
    with RouterProcess(workers, logs) as router, Client(router) as client:
        warmed = conversations(seed=1)[:8]
        transcripts = [transcript(client, conversation) for conversation in warmed]
    with RouterProcess(workers, logs) as router, Client(router) as client:
        answers = [client.ask(messages) for messages in transcripts]
    assert [answer.predicted for answer in answers] == [answer.cached for answer in answers]
    assert all(answer.cached > answer.prompt_tokens - 3 * BLOCK_SIZE for answer in answers)


def test_killed_worker_is_skipped_and_returns_empty(workers: list[VllmWorker], logs: Path) -> None:
    with RouterProcess(workers, logs) as router, Client(router) as client:
        conversation = conversations(seed=2)[0]
        messages = transcript(client, conversation)
        url = client.ask(messages).worker
        (victim,) = (worker for worker in workers if worker.url == url)
        (survivor,) = (worker for worker in workers if worker.url != url)
        assert wait_for(lambda: router.matched(messages)[victim.url], 5, "the prompt is in the index")

        answer = client.stream(messages, answer_tokens=2500)  # has begun: its headers are here
        victim.kill()
        with pytest.raises(openai.APIError, match="broke off"):
            list(answer)

        after = [client.ask(messages) for _ in range(4)]
        assert [answer.worker for answer in after] == [survivor.url] * 4
        assert all(answer.complete for answer in after)
        health = router.health()
        assert (health["status"], health["workers"], health["workers_up"]) == ("degraded", 2, 1)
        assert [found["finding"] for found in health["findings"]] == ["worker_down"]

        victim.start()
        victim.wait_until_ready()
        wait_for(lambda: router.health()["workers_up"] == 2, 30, "the worker is used again")
        assert router.matched(messages)[victim.url] == 0
        assert router.workers()[victim.url]["ranks"][0]["blocks"]["gpu"] == 0

        wait_for(lambda: router.workers()[victim.url]["state"] == "ready", 60, "it bears its full share again")
        # The worker of an unknown system prompt is a matter of chance: there are six of them.
        fresh = client.converse_all(conversations(seed=3), think_seconds=0.3)
        assert {answer.worker for answer in fresh} == {victim.url, survivor.url}
        assert [answer.predicted for answer in fresh] == [answer.cached for answer in fresh]


def kv_aware(runs: list[Run], users: int, think_seconds: float) -> Run:
    (run,) = (r for r in runs if (r.policy, r.users, r.think_seconds) == ("kv_aware", users, think_seconds))
    return run


def transcript(client: Client, conversation: Conversation) -> list[dict[str, str]]:
    """Go through a conversation. All of it, with one more question."""
    messages = [{"role": "system", "content": conversation.system}]
    for question, answer in zip(conversation.questions, client.converse(conversation), strict=True):
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer.text}]
    return [*messages, {"role": "user", "content": "And then?"}]


KEY = "sk-of-the-engine"


def test_router_sends_engine_key_and_forwards_client_key(installation: Installation, logs: Path) -> None:
    worker = VllmWorker("keyed", installation, logs, api_key=KEY)
    worker.start()
    try:
        worker.wait_until_ready()
        with pytest.raises(HTTPError, match="401"):
            get_json(f"{worker.url}/v1/models")
        with RouterProcess([worker], logs) as router:
            health = router.health()
            assert health["workers_up"] == 1, health
            assert "worker_key" not in {each["finding"] for each in health["findings"]}
            assert ask(router, KEY)
            with pytest.raises(openai.AuthenticationError):
                ask(router, "of-a-stranger")
            (shown,) = router.workers().values()
            assert [rank["state"] for rank in shown["ranks"]] == ["live"]
    finally:
        worker.stop()


def ask(router: RouterProcess, key: str) -> str | None:
    """Send a chat with an API key, and return the role of the answer."""
    with openai.OpenAI(base_url=f"{router.url}/v1", api_key=key, max_retries=0) as client:
        messages: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "Hello!"}]
        answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=4)
        return answer.choices[0].message.role


_HITS = re.compile(r"^vllm:prefix_cache_hits_total\{.*\} (\S+)$", re.MULTILINE)


@pytest.fixture(scope="module")
def pooling_workers(installation: Installation, logs: Path) -> Iterator[list[VllmWorker]]:
    found = [VllmWorker(f"pooling{number}", installation, logs, flags=("--runner", "pooling")) for number in range(2)]
    with running(*found):
        yield found


def test_embeddings_equal_engine_and_use_both_workers(pooling_workers: list[VllmWorker], logs: Path) -> None:
    texts = [f"{each.system} {question}" for each in conversations()[:9] for question in each.questions]
    with openai.OpenAI(base_url=f"{pooling_workers[0].url}/v1", api_key="none", max_retries=0, timeout=60) as alone:
        expected = [embedding(alone, text)[0] for text in texts]
    with (
        RouterProcess(pooling_workers, logs, patience=30.0) as router,
        openai.OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        found = [embedding(client, text) for text in texts]
        states = [rank["state"] for worker in router.workers().values() for rank in worker["ranks"]]
    answered_by = Counter(worker for _, worker, _ in found)
    cached = sum(map(cached_tokens, pooling_workers))
    print(
        f"pooling: {len(found)} requests, {dict(answered_by)}, tokens the engines found in their caches: {cached:.0f}"
    )
    for (vector, _, predicted), right in zip(found, expected, strict=True):
        assert vector == pytest.approx(right, abs=1e-3)
        assert predicted in (None, "0")
    assert max(answered_by.values()) <= 2 * min(answered_by.values())
    assert len(answered_by) == len(pooling_workers)
    assert states == ["live"] * len(pooling_workers)


def embedding(client: openai.OpenAI, text: str) -> tuple[list[float], str, str | None]:
    """Return the embedding of a text, its worker and the predicted overlap."""
    answer = client.embeddings.with_raw_response.create(model=MODEL, input=text, encoding_format="float")
    headers = answer.headers
    worker = headers.get("x-kvrouter-worker", "")
    return answer.parse().data[0].embedding, worker, headers.get("x-kvrouter-overlap-tokens")


def cached_tokens(worker: VllmWorker) -> float:
    """Return the tokens that an engine found in its cache since its start."""
    with urlopen(f"{worker.url}/metrics", timeout=30) as answer:
        return sum(map(float, _HITS.findall(answer.read().decode())))


DECODE = """
import json, sys, msgspec
from vllm.distributed.kv_events import KVEventBatch
batch = msgspec.msgpack.decode(open(sys.argv[1], "rb").read(), type=KVEventBatch)
json.dump([batch.data_parallel_rank, [[type(event).__name__, msgspec.to_builtins(event)] for event in batch.events]],
          open(sys.argv[2], "w"))
"""


class ToFile(EventPublisher):
    wire_form = WireForm.VLLM_MAPS

    def __init__(self, path: Path) -> None:
        super().__init__(3)
        self._path = path

    def publish(self, batch: EventBatch) -> None:
        self._path.write_bytes(encode_batch(EventBatch(batch.ts, batch.events, self.dp_rank), self.wire_form))

    def shutdown(self) -> None:
        return


def test_vllm_decodes_every_reported_event(installation: Installation, tmp_path: Path) -> None:
    sent, read = tmp_path / "batch", tmp_path / "events.json"
    reporter = Reporter(ToFile(sent))
    reporter.stored([1, 2], None, [5, 6, 7, 8], 2, lora_name="sql", extra_keys=[["sql", "image"], ["sql"]])
    reporter.stored([3], None, [9, 9], 2, cache_salt="tenant", medium="CPU", group_idx=1)
    reporter.removed([2])
    reporter.cleared()
    reporter.step()
    subprocess.run([installation.python, "-c", DECODE, sent, read], check=True, timeout=120, capture_output=True)
    rank, events = json.loads(read.read_text())
    assert rank == 3
    names: list[str] = [name for name, _ in events]
    assert names == ["AllBlocksCleared", "BlockStored", "BlockStored", "BlockRemoved", "AllBlocksCleared"]
    first, salted, removed = (fields for _, fields in events[1:4])
    expected: dict[str, Any] = {
        "block_hashes": [1, 2],
        "parent_block_hash": None,
        "token_ids": [5, 6, 7, 8],
        "block_size": 2,
        "medium": "GPU",
        "lora_name": "sql",
        "extra_keys": [["sql", "image"], ["sql"]],
    }
    assert {name: first[name] for name in expected} == expected
    assert (salted["extra_keys"], salted["medium"], salted["group_idx"]) == ([["tenant"]], "CPU", 1)
    assert (removed["block_hashes"], removed["medium"]) == ([2], "GPU")
    reporter.shutdown()
