"""Images that a real vLLM encodes for another one, over the file connector of both."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.installation import Installation
from engine.pictures import image_part
from engine.processes import wait_for
from engine.servers import MODEL, RouterProcess, VllmWorker, running
from engine.test_families import FLAGS
from engine.web import post_json

pytestmark = pytest.mark.engine

FAMILY = "idefics3"
LONG = {"type": "text", "text": "The worker that holds the longest prefix of a prompt answers it soonest. " * 12}
LOADED = "Success load encoder cache for hash"
RED, GREEN, BLUE = (image_part(color, 64, 64) for color in ((200, 30, 30), (30, 200, 30), (30, 30, 200)))


def ask(url: str, *parts: dict[str, Any]) -> Any:
    message = {"role": "user", "content": parts}
    body = {"model": MODEL, "messages": [message], "max_tokens": 8, "temperature": 0, "logprobs": True}
    return post_json(f"{url}/v1/chat/completions", body)


class Fleet:
    """An encode worker, the worker that it encodes for, a worker alone, and a router in front of the first two."""

    def __init__(self, router: RouterProcess, encoder: VllmWorker, alone: VllmWorker, log: Path) -> None:
        self.router = router
        self.encoder = encoder
        self.alone = alone
        self._log = log

    def ask(self, *parts: dict[str, Any]) -> Any:
        return ask(self.router.url, *parts)

    def loaded(self) -> int:
        """Return how many encoded items the worker has loaded, in its own words."""
        return self._log.read_text().count(LOADED)


@pytest.fixture(scope="module")
def fleet(installation: Installation, logs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("encoded")

    def worker(name: str, role: str, *flags: str) -> VllmWorker:
        transfer = {
            "ec_connector": "ECExampleConnector",
            "ec_role": role,
            "ec_buffer_device": "cpu",
            "ec_connector_extra_config": {"shared_storage_path": str(folder)},
        }
        given = ["--ec-transfer-config", json.dumps(transfer), *FLAGS[FAMILY], *flags]
        debug = {"VLLM_LOGGING_LEVEL": "DEBUG"}
        return VllmWorker(name, installation, logs, installation.family(FAMILY), given, environment=debug)

    encoder = worker("encoder", "ec_producer", "--mm-encoder-only", "--no-enable-prefix-caching")
    other = worker("encoded-for", "ec_consumer", "--enable-scale-out")
    alone = VllmWorker("alone", installation, logs, installation.family(FAMILY), list(FLAGS[FAMILY]))
    config = folder / "config.yaml"
    known = [{"url": encoder.url, "role": "encode"}, {"url": other.url}]
    config.write_text(yaml.safe_dump({"workers": known}))
    with running(encoder, other, alone), RouterProcess([], logs, "--config", str(config), patience=30.0) as router:
        router.wait_until_compared()
        yield Fleet(router, encoder, alone, logs / "encoded-for.log")


@pytest.mark.parametrize(("images", "different"), [(1, 1), (3, 3), (8, 5)])
def test_answers_equal_those_of_a_worker_alone(fleet: Fleet, images: int, different: int) -> None:
    parts = [image_part((50 * (number % different), 90, 10 * images), 64, 64) for number in range(images)]
    before = fleet.loaded()
    answer, expected = (ask(url, *parts, LONG) for url in (fleet.router.url, fleet.alone.url))
    assert answer["choices"][0]["message"] == expected["choices"][0]["message"]
    tokens, alone = (each["choices"][0]["logprobs"]["content"] for each in (answer, expected))
    assert [each["token"] for each in tokens] == [each["token"] for each in alone]
    assert [each["logprob"] for each in tokens] == pytest.approx([each["logprob"] for each in alone], abs=0.01)
    assert fleet.loaded() - before == different


def test_worker_loads_what_the_encode_worker_encoded(fleet: Fleet) -> None:
    before = fleet.loaded()
    fleet.ask(RED, LONG)
    assert fleet.loaded() == before + 1
    fleet.ask(RED, LONG, GREEN)  # the first image is cached with its prefix
    wait_for(lambda: fleet.loaded() == before + 2, 10, "the second image is loaded")
    assert fleet.router.health()["workers_up_by_role"] == {"encode": 1, "both": 1}


def test_worker_encodes_itself_once_the_encode_worker_is_gone(fleet: Fleet) -> None:
    before = fleet.loaded()
    fleet.encoder.kill()
    try:
        answer = fleet.ask(BLUE, LONG)
    finally:
        fleet.encoder.start()
        fleet.encoder.wait_until_ready()
        wait_for(lambda: fleet.router.health()["workers_up"] == 2, 60, "the encode worker is up again")
    assert answer["usage"]["prompt_tokens_details"]["multimodal_tokens"] == {"image": 19}
    assert fleet.loaded() == before
