"""Real prefill and decode vLLMs behind the router, over NIXL: answers are those of one vLLM alone, token by token.

`make test-engine-pd` runs these. KV goes from one process to the other over loopback, from and to host memory.
"""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml

from engine.conversations import VOCABULARY
from engine.installation import Installation
from engine.servers import BLOCK_SIZE, MODEL, RouterProcess, VllmWorker, free_ports
from engine.web import post_reply

pytestmark = pytest.mark.engine_pd

TRANSFER = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
SKIP_TOKENS = 128
_SOURCE = re.compile(r'^vllm:prompt_tokens_by_source_total\{.*source="(\w+)".*\} (\S+)$', re.MULTILINE)


def pair_worker(name: str, installation: Installation, logs: Path) -> VllmWorker:
    """A vLLM that can compute prompts for others, and go on from theirs."""
    (side_channel,) = free_ports(1)
    environment = {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel),
        "UCX_TLS": "tcp,self,sm",
        "UCX_MODULES": "^ib",
    }
    flags = ("--kv-transfer-config", json.dumps(TRANSFER))
    return VllmWorker(name, installation, logs, flags=flags, environment=environment, python=installation.other_python)


@pytest.fixture(scope="module")
def vllms(installation: Installation, logs: Path) -> Iterator[dict[str, VllmWorker]]:
    """One that works alone, and three for pairs."""
    found = {"alone": VllmWorker("alone", installation, logs)}
    found |= {f"pair{number}": pair_worker(f"pair{number}", installation, logs) for number in range(3)}
    with ExitStack() as stack:
        for worker in found.values():
            stack.callback(worker.stop)
            worker.start()
        for worker in found.values():
            worker.wait_until_ready()
        yield found


def prompts(seed: int) -> list[str]:
    """Texts of 10 to 900 tokens; the last ones begin like others."""
    random = Random(seed)
    texts = [" ".join(random.choices(VOCABULARY, k=length)) for length in (10, 60, 200, 400, 650, 900)]
    return [f"{seed}.{number} {text}" for number, text in enumerate(texts)] + [f"{seed}.3 {texts[3]} and more words"]


def completed(url: str, prompt: Any) -> tuple[list[int], dict[str, Any]]:
    """The tokens of an answer at temperature 0, and what it says of its tokens."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    _, answer = post_reply(f"{url}/v1/completions", body | {"return_token_ids": True, "stream": False})
    return answer["choices"][0]["token_ids"], answer["usage"]


def by_source(worker: VllmWorker) -> dict[str, float]:
    """The prompt tokens that a worker computed, found, and was sent."""
    with urllib.request.urlopen(f"{worker.url}/metrics", timeout=30) as response:
        return {source: float(value) for source, value in _SOURCE.findall(response.read().decode())}


@pytest.mark.parametrize(("prefills", "decodes"), [(1, 1), (1, 2), (2, 1)])
def test_answers_are_those_of_one_engine(
    vllms: dict[str, VllmWorker], logs: Path, tmp_path: Path, prefills: int, decodes: int
) -> None:
    pairs = [vllms[f"pair{number}"] for number in range(prefills + decodes)]
    roles = ["prefill"] * prefills + ["decode"] * decodes
    file = tmp_path / "pairs.yaml"
    workers = [{"url": worker.url, "role": role} for worker, role in zip(pairs, roles, strict=True)]
    file.write_text(yaml.safe_dump({"workers": workers, "disaggregation": {"skip_tokens": SKIP_TOKENS}}))
    before = [by_source(worker) for worker in pairs]
    asked, same = 0, 0
    with RouterProcess([], logs, "--config", str(file)) as router:
        for prompt in prompts(10 * prefills + decodes):
            expected, usage = completed(vllms["alone"].url, prompt)
            tokens, told = completed(router.url, prompt)
            asked += 1
            same += (tokens, told["prompt_tokens"]) == (expected, usage["prompt_tokens"])
    grown = [
        {source: amount - old.get(source, 0) for source, amount in by_source(worker).items()}
        for worker, old in zip(pairs, before, strict=True)
    ]
    decoded = grown[prefills:]
    moved = sum(each.get("external_kv_transfer", 0) for each in decoded)
    computed = sum(each.get("local_compute", 0) for each in decoded)
    print(
        json.dumps(
            {"pairs": f"{prefills}+{decodes}", "requests": asked, "equal": same, "moved": moved, "computed": computed}
        )
    )
    assert same == asked
    assert moved > 1500  # all but the short prompts'
    assert computed < 2 * SKIP_TOKENS + asked * BLOCK_SIZE  # and of those no more than the last block each
