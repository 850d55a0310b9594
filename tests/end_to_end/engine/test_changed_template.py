"""A real vLLM whose chat template changes at a restart: the router detects it and predicts exactly again."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.client import Answer, Client
from engine.conversations import conversations
from engine.installation import Installation
from engine.processes import wait_for
from engine.servers import RouterProcess, VllmWorker

pytestmark = pytest.mark.engine

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
        with RouterProcess([worker], logs, patience=30.0, check_seconds=CHECK_SECONDS) as router:
            router.wait_until_compared()
            assert router.tokenizer()["way"] == "local"
            before = _conversed(router, seed=1)
            worker.kill()
            worker.add_flags("--chat-template", str(template))
            worker.start()
            worker.wait_until_ready()
            wait_for(lambda: router.health()["workers_up"] == 1, 60, "the worker is used again")
            wait_for(lambda: "engine" in router.tokenizer()["shapes"].values(), 60, "the engine is asked")
            after = _conversed(router, seed=2)
    finally:
        worker.stop()
    for answers in (before, after):
        assert [answer.predicted for answer in answers] == [answer.cached for answer in answers]
        assert sum(answer.cached for answer in answers) > 1000


def _conversed(router: RouterProcess, seed: int) -> list[Answer]:
    with Client(router) as client:
        return client.converse_all(conversations(seed)[:4], think_seconds=0.3)
