"""A real vLLM dies in the middle of a stream, and another continues the stream."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import openai
import pytest

from engine.client import Client
from engine.servers import MODEL, RouterProcess, VllmWorker

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
