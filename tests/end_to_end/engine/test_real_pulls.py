"""Two real vLLM workers with the tier p2p: a pulled prompt is answered as a computed one, with the tokens as predicted.

`make test-engine-pull` runs these tests. A CPU runs the whole protocol: lookup, NIXL's transfer over TCP, and events.
The copy to and from the host tier is the test's own (`cpu_host_tier.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any
from urllib.request import urlopen

import pytest
import yaml

from benchmarks.ports import free_ports
from engine.conversations import VOCABULARY
from engine.installation import Installation
from engine.pairs import asked, metrics
from engine.processes import wait_for
from engine.servers import BLOCK_SIZE, MODEL, RouterProcess, VllmWorker, running
from engine.web import post_json, post_reply

pytestmark = pytest.mark.engine_pull

LEAST_TOKENS = 64
WORDS = (70, 120, 250, 450, 700)


@pytest.fixture(scope="module")
def ports() -> list[int]:
    return free_ports(2)


@pytest.fixture(scope="module")
def workers(installation: Installation, logs: Path, ports: list[int]) -> Iterator[list[VllmWorker]]:
    """Two workers with host tiers."""
    workers = []
    for number, port in enumerate(ports):
        extra = {
            "spec_name": "CpuHostTier",
            "spec_module_path": "cpu_host_tier",
            "cpu_bytes_to_use": 2**27,
            "offload_prompt_only": False,
            "self_describing_kv_events": True,
            "secondary_tiers": [{"type": "p2p", "host": "127.0.0.1", "port": port}],
        }
        transfer = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
        environment = {
            "PYTHONPATH": str(Path(__file__).parent),
            "PYTHONHASHSEED": "0",
            "UCX_TLS": "tcp,self,sm",
            "UCX_MODULES": "^ib",
        }
        flags = ["--kv-transfer-config", json.dumps(transfer)]
        python = installation.other_python  # which has NIXL
        workers.append(
            VllmWorker(f"pull{number}", installation, logs, flags=flags, environment=environment, python=python)
        )
    with running(*workers):
        yield workers


@contextmanager
def router_before(workers: list[VllmWorker], ports: list[int], logs: Path, folder: Path) -> Iterator[RouterProcess]:
    """A router that knows the ports of the workers' tiers."""
    settings = {
        "workers": [{"url": worker.url, "pull_port": port} for worker, port in zip(workers, ports, strict=True)],
        "pulls": {"protocol": "p2p"},
        "proxy": {"client_routing": True},
    }
    constants = {"pulled_tokens": LEAST_TOKENS, "rates": {"token": 0.002}, "linger": 0}  # as a CPU computes
    file = folder / "pulls.yaml"
    file.write_text(yaml.safe_dump(settings))
    with RouterProcess([], logs, "--config", str(file), patience=60.0, constants=constants) as router:
        router.wait_until_compared()
        yield router


def completed(router: RouterProcess, worker: VllmWorker, prompt: str) -> tuple[list[int], int, int]:
    """Send a prompt to one worker. Return the answer's tokens, and the predicted and reported cached tokens."""
    body = asked(prompt, 16)
    headers, answer = post_reply(f"{router.url}/v1/completions", body, {"x-smg-target-worker": worker.url})
    predicted = int(headers["x-kvrouter-overlap-tokens"]) + int(headers.get("x-kvrouter-loadable-tokens", 0))
    details: Any = answer["usage"].get("prompt_tokens_details") or {}
    return answer["choices"][0]["token_ids"], predicted, details.get("cached_tokens") or 0


def until_pullable(router: RouterProcess, worker: VllmWorker, prompt: str) -> int:
    """Wait until a worker would pull all full blocks of a prompt. Return their tokens."""
    tokens = len(post_json(f"{router.url}/tokenize", {"model": MODEL, "prompt": prompt})["tokens"])
    blocks = (tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
    asked_for = {"request": {"model": MODEL, "prompt": prompt}, "path": "/v1/completions"}

    def pullable() -> bool:
        explained = post_json(f"{router.url}/explain", asked_for)
        (known,) = (each for each in explained["candidates"] if each["worker"] == worker.url)
        return bool(known["source"]) and known["source"]["tokens"] == blocks

    wait_for(pullable, 60, "the host tier of the source is known")
    return blocks


@dataclass(frozen=True)
class Pull:
    """A prompt's answer by computing and by pulling. `blocks`: the tokens of its full blocks, which are pullable."""

    expected: list[int]
    answer: list[int]
    predicted: int
    cached: int
    blocks: int


@pytest.fixture(scope="module")
def pulls(
    workers: list[VllmWorker], ports: list[int], logs: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[Pull]:
    source, puller = workers
    random, found, before = Random(1), [], metrics(puller)
    with router_before(workers, ports, logs, tmp_path_factory.mktemp("pulls")) as router:
        for words in WORDS:
            prompt = " ".join(random.choices(VOCABULARY, k=words))
            expected, _, _ = completed(router, source, prompt)
            blocks = until_pullable(router, puller, prompt)
            found.append(Pull(expected, *completed(router, puller, prompt), blocks))
            print(f"{words} words: {found[-1].predicted} tokens predicted, {found[-1].cached} cached")
    moved = metrics(puller)["external_kv_transfer"] - before["external_kv_transfer"]
    assert moved == sum(pull.cached for pull in found)
    return found


def test_pulled_prompts_are_answered_like_computed_ones(pulls: list[Pull]) -> None:
    for pull in pulls:
        assert pull.answer == pull.expected
        assert pull.cached == pull.predicted == pull.blocks
    assert sum(pull.cached for pull in pulls) > 1000


@pytest.mark.usefixtures("pulls")
def test_unreachable_peer_costs_the_gain_and_not_the_answer(
    workers: list[VllmWorker], logs: Path, tmp_path: Path
) -> None:
    """The pulls come first: after a peer that does not answer, the engine's next pull waits for half a minute."""
    source, puller = workers
    prompt = " ".join(Random(2).choices(VOCABULARY, k=200))
    with router_before(workers, free_ports(2), logs, tmp_path) as router:
        expected, _, _ = completed(router, source, prompt)
        blocks = until_pullable(router, puller, prompt)
        answer, predicted, cached = completed(router, puller, prompt)
        assert answer == expected
        assert (predicted, cached) == (blocks, 0)
        with urlopen(f"{router.url}/metrics") as response:
            assert b'kvrouter_pulls_total{result="failed"} 1.0' in response.read()
