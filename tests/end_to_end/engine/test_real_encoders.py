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


class Fleet:
    """An encode worker, the worker that it encodes for, and a router in front of them."""

    def __init__(self, router: RouterProcess, encoder: VllmWorker, log: Path) -> None:
        self.router = router
        self.encoder = encoder
        self._log = log

    def ask(self, *parts: dict[str, Any]) -> Any:
        body = {"model": MODEL, "messages": [{"role": "user", "content": parts}], "max_tokens": 4, "temperature": 0}
        return post_json(f"{self.router.url}/v1/chat/completions", body)

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
    config = folder / "config.yaml"
    known = [{"url": encoder.url, "role": "encode"}, {"url": other.url}]
    config.write_text(yaml.safe_dump({"workers": known}))
    with running(encoder, other), RouterProcess([], logs, "--config", str(config), patience=30.0) as router:
        router.wait_until_compared()
        yield Fleet(router, encoder, logs / "encoded-for.log")


def test_worker_loads_what_the_encode_worker_encoded(fleet: Fleet) -> None:
    fleet.ask(RED, LONG)
    assert fleet.loaded() == 1
    fleet.ask(RED, LONG, GREEN)  # the first image is cached with its prefix
    wait_for(lambda: fleet.loaded() == 2, 10, "the second image is loaded")
    assert fleet.router.health()["workers_up_by_role"] == {"encode": 1, "both": 1}


def test_worker_encodes_itself_once_the_encode_worker_is_gone(fleet: Fleet) -> None:
    before = fleet.loaded()
    fleet.encoder.kill()
    answer = fleet.ask(BLUE, LONG)
    assert answer["usage"]["prompt_tokens_details"]["multimodal_tokens"] == {"image": 19}
    assert fleet.loaded() == before
