"""A real vLLM that wants an API key."""

from __future__ import annotations

from pathlib import Path
from urllib.error import HTTPError

import openai
import pytest

from engine.installation import Installation
from engine.servers import MODEL, RouterProcess, VllmWorker
from engine.web import get_json

pytestmark = pytest.mark.engine

KEY = "sk-of-the-engine"


def test_router_sends_engine_key_and_forwards_client_key(installation: Installation, logs: Path) -> None:
    worker = VllmWorker("keyed", installation, logs, api_key=KEY)
    worker.start()
    try:
        worker.wait_until_ready()
        with pytest.raises(HTTPError, match="401"):
            get_json(f"{worker.url}/v1/models")
        with RouterProcess([worker], logs) as router:
            health = router.health()
            assert health["workers_up"] == 1, health
            assert "worker_key" not in {each["finding"] for each in health["findings"]}
            assert ask(router, KEY)
            with pytest.raises(openai.AuthenticationError):
                ask(router, "of-a-stranger")
            (shown,) = router.workers().values()
            assert [rank["state"] for rank in shown["ranks"]] == ["live"]
    finally:
        worker.stop()


def ask(router: RouterProcess, key: str) -> str | None:
    """Send a chat with an API key, and return the role of the answer."""
    with openai.OpenAI(base_url=f"{router.url}/v1", api_key=key, max_retries=0) as client:
        messages: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "Hello!"}]
        answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=4)
        return answer.choices[0].message.role
