"""Real vLLMs that transfer KV over NIXL, requests to them, and their metrics."""

from __future__ import annotations

import json
import re
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import yaml

from benchmarks.ports import free_ports
from engine.conversations import VOCABULARY
from engine.installation import Installation
from engine.servers import MODEL, RouterProcess, VllmWorker
from engine.web import post_reply

LEASE_SECONDS = 10  # for which a prefill worker keeps blocks that are not fetched
_NIXL = {
    "kv_connector": "NixlConnector",
    "kv_role": "kv_both",
    "kv_buffer_device": "cpu",
    "kv_connector_extra_config": {"kv_lease_duration": LEASE_SECONDS},
}
_SAMPLE = re.compile(r'^vllm:(\w+)\{(?:.*source="(\w+)")?.*\} (\S+)$', re.MULTILINE)


def pair_worker(name: str, installation: Installation, logs: Path, ranks: int = 1, model: str = MODEL) -> VllmWorker:
    """A vLLM that can compute prompts for others, and go on from theirs."""
    environment = {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_ports(ranks)[0]),
        "UCX_TLS": "tcp,self,sm",
        "UCX_MODULES": "^ib",
        "PYTHONPATH": str(Path(__file__).with_name("quiet_nixl")),
        # No process for the worker alone: it would poll for a second after each step, and take a core meanwhile.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    flags = ["--kv-transfer-config", json.dumps(_NIXL)]
    if ranks > 1:
        flags += ["--data-parallel-size", str(ranks), "--api-server-count", "1"]
    python = installation.other_python
    return VllmWorker(name, installation, logs, installation.model(model), flags, "", environment, python)


def storage_worker(name: str, installation: Installation, logs: Path, storage: Path) -> VllmWorker:
    """A vLLM that writes the KV of prompts to files, and reads that of others."""
    transfer = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(storage)},
    }
    return VllmWorker(name, installation, logs, flags=["--kv-transfer-config", json.dumps(transfer)])


def prompts(seed: int | str) -> list[str]:
    """Texts of 10 to 900 tokens; the last ones begin like others."""
    random = Random(seed)
    texts = [" ".join(random.choices(VOCABULARY, k=length)) for length in (10, 60, 200, 400, 650, 900)]
    return [f"{seed}.{number} {text}" for number, text in enumerate(texts)] + [f"{seed}.3 {texts[3]} and more words"]


def asked(prompt: str, tokens: int = 24, **more: Any) -> dict[str, Any]:
    """Return a completion request at temperature 0 with token ids in its response."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return body | {"return_token_ids": True, "stream": False} | more


def completed(url: str, prompt: str, tokens: int = 24) -> tuple[list[int], dict[str, Any]]:
    """The tokens of an answer, and what it says of its tokens."""
    _, answer = post_reply(f"{url}/v1/completions", asked(prompt, tokens))
    return answer["choices"][0]["token_ids"], answer["usage"]


def metrics(worker: VllmWorker) -> dict[str, float]:
    """Return a worker's metrics by name, and its prompt tokens by source, over all its ranks."""
    found: dict[str, float] = defaultdict(float)
    with urllib.request.urlopen(f"{worker.url}/metrics", timeout=30) as response:
        for name, source, value in _SAMPLE.findall(response.read().decode()):
            if not name.startswith("prompt_tokens_by_source") or name.endswith("_total"):
                found[source or name] += float(value)
    return found


@contextmanager
def router_before(
    prefills: Sequence[VllmWorker],
    decodes: Sequence[VllmWorker],
    logs: Path,
    tmp_path: Path,
    decode_computes: bool = False,
    **options: Any,
) -> Iterator[RouterProcess]:
    """A router that knows the workers by their roles. `decode_computes`: decode workers may compute prompts."""
    roles = {worker.url: role for role, some in (("prefill", prefills), ("decode", decodes)) for worker in some}
    workers = [{"url": url, "role": role} for url, role in roles.items()]
    file = tmp_path / "pairs.yaml"
    file.write_text(yaml.safe_dump({"workers": workers, "disaggregation": {"decode_computes": decode_computes}}))
    with RouterProcess([], logs, "--config", str(file), **options) as router:
        yield router
