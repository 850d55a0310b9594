"""A real vLLM dies in the middle of a stream, and another continues the stream."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import openai
import pytest

from engine.client import Answer, Client
from engine.conversations import conversations
from engine.installation import Installation
from engine.processes import wait_for
from engine.servers import MODEL, RouterProcess, VllmWorker, running
from engine.web import get_json, post_json

pytestmark = pytest.mark.engine

TOKENS = 3500  # more than an engine generates before a client has read the first ones
KILLED_AFTER = 40
# What an engine that answers a chat says it is made of, to be compared.
ASKED: dict[str, Any] = {"temperature": 0, "max_tokens": TOKENS}


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_stream_continues_on_another_engine_after_kill(kind: str, workers: list[VllmWorker], logs: Path) -> None:
    with (
        RouterProcess(workers, logs, failovers=1) as router,
        openai.OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0, timeout=120) as client,
        Client(router) as words,
    ):
        allowed = words.allowed_token_ids  # else a text may not be read as the tokens that it was made of
        lines: list[str] = []
        chunks: list[dict[str, Any]] = []
        with _stream(client, kind, allowed) as response:
            (victim,) = (worker for worker in workers if worker.url == response.headers["x-kvrouter-worker"])
            for line in response.iter_lines():
                lines.append(line)
                if line.startswith("data: {"):
                    chunks.append(response_chunk(line))
                if len(chunks) == KILLED_AFTER:
                    victim.kill()
    (survivor,) = (worker for worker in workers if worker is not victim)
    (comment,) = (line for line in lines if line.startswith(":"))
    found = re.search(r"after (\d+) tokens", comment)
    assert found is not None
    given = int(found[1])
    assert given >= KILLED_AFTER - 2
    assert lines[-2:] == ["data: [DONE]", ""] or lines[-1] == "data: [DONE]"

    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    ids = [token for choice in choices for token in choice.get("token_ids") or []]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert sum("role" in choice.get("delta", {}) for choice in choices) == (kind == "chat")
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
    usage = chunks[-1]["usage"]
    assert len(ids) == usage["completion_tokens"] == TOKENS
    # The rest is what the survivor makes of the prompt and the tokens so far.
    prompt_ids = next(_prompt_ids(chunk) for chunk in chunks if _prompt_ids(chunk))
    assert usage["prompt_tokens"] == len(prompt_ids)
    with openai.OpenAI(base_url=f"{survivor.url}/v1", api_key="none") as alone:
        rest = alone.completions.create(
            model=MODEL,
            prompt=prompt_ids + ids[:given],
            temperature=0,
            max_tokens=TOKENS - given,
            extra_body={"return_token_ids": True, "ignore_eos": True, "allowed_token_ids": allowed},
        )
    assert rest.choices[0].model_dump()["token_ids"][:32] == ids[given : given + 32]


def _stream(client: openai.OpenAI, kind: str, allowed: list[int]) -> Any:
    options = {"include_usage": True}
    asked = {**ASKED, "extra_body": {"return_token_ids": True, "ignore_eos": True, "allowed_token_ids": allowed}}
    if kind == "chat":
        messages: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "Tell a story."}]
        return client.chat.completions.with_streaming_response.create(
            model=MODEL, messages=messages, stream=True, stream_options=options, **asked
        )
    return client.completions.with_streaming_response.create(
        model=MODEL, prompt="A story begins", stream=True, stream_options=options, **asked
    )


def response_chunk(line: str) -> dict[str, Any]:
    """The chunk of an event."""
    chunk: dict[str, Any] = json.loads(line.removeprefix("data: "))
    return chunk


def _prompt_ids(chunk: dict[str, Any]) -> list[int] | None:
    of_choice = chunk["choices"][0].get("prompt_token_ids") if chunk["choices"] else None
    ids: list[int] | None = chunk.get("prompt_token_ids") or of_choice
    return ids


CHECK_SECONDS = 2.0
# The same tokens elsewhere, and a sentence that the folder's template does not have.
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] + '\\nIt was said: ' + message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_changed_template_is_detected_and_predictions_stay_exact(
    installation: Installation, logs: Path, tmp_path: Path
) -> None:
    template = tmp_path / "other.jinja"
    template.write_text(TEMPLATE)
    worker = VllmWorker("template", installation, logs)
    worker.start()
    try:
        worker.wait_until_ready()
        with RouterProcess([worker], logs, patience=30.0, constants={"check_interval": CHECK_SECONDS}) as router:
            router.wait_until_compared()
            assert router.tokenizer()["source"] == "local"
            before = _conversed(router, seed=1)
            worker.kill()
            worker.add_flags("--chat-template", str(template))
            worker.start()
            worker.wait_until_ready()
            wait_for(lambda: router.health()["workers_up"] == 1, 60, "the worker is used again")
            wait_for(lambda: "engine" in router.tokenizer()["probes"].values(), 60, "the engine is asked")
            after = _conversed(router, seed=2)
    finally:
        worker.stop()
    for answers in (before, after):
        assert [answer.predicted for answer in answers] == [answer.cached for answer in answers]
        assert sum(answer.cached for answer in answers) > 1000


def _conversed(router: RouterProcess, seed: int) -> list[Answer]:
    with Client(router) as client:
        return client.converse_all(conversations(seed)[:4], think_seconds=0.3)


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
