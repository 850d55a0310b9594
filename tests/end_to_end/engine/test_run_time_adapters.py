"""LoRA adapters that real vLLMs load and unload while they run, through the router."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError

import pytest

from engine.client import Answer, Client
from engine.conversations import conversations
from engine.installation import Installation
from engine.processes import wait_for
from engine.servers import MODEL, RouterProcess, VllmWorker, running
from engine.web import get_json, post_json

pytestmark = pytest.mark.engine

TOKEN = "of-the-operator"
THINK_SECONDS = 0.3


@pytest.fixture(scope="module")
def workers(installation: Installation, logs: Path) -> Iterator[list[VllmWorker]]:
    flags = ("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8")
    allowed = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
    found = [VllmWorker(f"lora{number}", installation, logs, flags=flags, environment=allowed) for number in range(2)]
    with running(*found):
        yield found


def test_adapters_are_loaded_on_all_workers_with_separate_blocks(
    installation: Installation, workers: list[VllmWorker], logs: Path
) -> None:
    with RouterProcess(workers, logs, patience=30.0, token=TOKEN) as router:
        for name in ("poet", "clerk"):
            reply = post_json(f"{router.url}/v1/load_lora_adapter", loaded(installation, name), TOKEN)
            assert [each["status"] for each in reply["workers"]] == [200, 200]
        assert [served(worker) for worker in workers] == [{MODEL, "poet", "clerk"}] * 2

        router.wait_until_compared()
        answers = [answer for model in ("poet", "clerk", MODEL) for answer in conversed(router, model)]
        print(f"LoRA: {len(answers)} requests, {sum(map(exact, answers))} exact")
        assert all(map(exact, answers)), [(answer.predicted, answer.cached) for answer in answers]
        assert {answer.cached > 0 for answer in answers} == {False, True}

        # A restarted worker has no adapters, and the router loads them again.
        workers[0].kill()
        wait_for(lambda: router.health()["workers_up"] == 1, 60, "the worker is left out")
        workers[0].start()
        workers[0].wait_until_ready()
        wait_for(lambda: served(workers[0]) == {MODEL, "poet", "clerk"}, 90, "it has the adapters again")
        wait_for(lambda: router.workers()[workers[0].url]["state"] == "ready", 60, "it bears its full share again")
        again = conversed(router, "poet", seed=2)
        assert all(map(exact, again)), [(answer.predicted, answer.cached) for answer in again]

        reply = post_json(f"{router.url}/v1/unload_lora_adapter", {"lora_name": "poet"}, TOKEN)
        assert [each["status"] for each in reply["workers"]] == [200, 200]
        assert [served(worker) for worker in workers] == [{MODEL, "clerk"}] * 2
        with pytest.raises(HTTPError, match="404"):
            post_json(f"{router.url}/v1/completions", {"model": "poet", "prompt": "x", "max_tokens": 1})


def loaded(installation: Installation, name: str) -> dict[str, str]:
    return {"lora_name": name, "lora_path": str(installation.adapter(name))}


def served(worker: VllmWorker) -> set[str]:
    return {model["id"] for model in get_json(f"{worker.url}/v1/models")["data"]}


def conversed(router: RouterProcess, model: str, seed: int = 1) -> list[Answer]:
    """Send the same conversations to a model or adapter."""
    with Client(router, model) as client:
        return client.converse_all(conversations(seed)[:4], think_seconds=THINK_SECONDS)


def exact(answer: Answer) -> bool:
    return answer.complete and answer.predicted == answer.cached
