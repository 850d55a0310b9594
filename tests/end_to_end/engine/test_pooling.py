"""A pooling model of real vLLMs: embeddings, which are routed by load."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import openai
import pytest

from engine.conversations import conversations
from engine.installation import Installation
from engine.servers import MODEL, RouterProcess, VllmWorker, running

pytestmark = pytest.mark.engine

_HITS = re.compile(r"^vllm:prefix_cache_hits_total\{.*\} (\S+)$", re.MULTILINE)


@pytest.fixture(scope="module")
def workers(installation: Installation, logs: Path) -> Iterator[list[VllmWorker]]:
    found = [VllmWorker(f"pooling{number}", installation, logs, flags=("--runner", "pooling")) for number in range(2)]
    with running(*found):
        yield found


def test_embeddings_equal_engine_and_use_both_workers(workers: list[VllmWorker], logs: Path) -> None:
    texts = [f"{each.system} {question}" for each in conversations()[:9] for question in each.questions]
    with openai.OpenAI(base_url=f"{workers[0].url}/v1", api_key="none", max_retries=0, timeout=60) as alone:
        expected = [embedding(alone, text)[0] for text in texts]
    with (
        RouterProcess(workers, logs, patience=30.0) as router,
        openai.OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        found = [embedding(client, text) for text in texts]
        states = [rank["state"] for worker in router.workers().values() for rank in worker["ranks"]]
    answered_by = Counter(worker for _, worker, _ in found)
    cached = sum(map(cached_tokens, workers))
    print(
        f"pooling: {len(found)} requests, {dict(answered_by)}, tokens the engines found in their caches: {cached:.0f}"
    )
    for (vector, _, predicted), right in zip(found, expected, strict=True):
        assert vector == pytest.approx(right, abs=1e-3)
        assert predicted in (None, "0")
    assert max(answered_by.values()) <= 2 * min(answered_by.values())
    assert len(answered_by) == len(workers)
    assert states == ["live"] * len(workers)


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
