"""A changed model behind the URL and name of a worker: a finding, and no prediction from the old model."""

from __future__ import annotations

import json
from typing import Any

import pytest
from router_under_test import router, until
from scripted_worker import Exchange, scripted_worker

PROMPT = {"model": "m", "prompt": list(range(1, 400))}


@pytest.mark.parametrize("other", [{"root": "/models/b"}, {"max_model_len": 2048}])
async def test_changed_model_is_a_finding_and_drops_sent_prefixes(other: dict[str, Any]) -> None:
    card = {"id": "m", "root": "/models/a", "max_model_len": 8192}

    async def script(exchange: Exchange) -> None:
        if exchange.target == "/v1/models":
            await exchange.answer(json.dumps({"data": [card]}).encode())
        elif exchange.method == "GET" or exchange.target.endswith(("/render", "/tokenize")):
            await exchange.answer(status="404 Not Found")
        else:
            await exchange.answer(b'{"choices": [], "usage": {"prompt_tokens": 399, "completion_tokens": 1}}')

    async with scripted_worker(script) as worker:
        worker.answers_discovery = False
        async with router(worker.url) as routed:

            async def found() -> list[dict[str, Any]]:
                findings: list[dict[str, Any]] = await routed.findings()
                return [each for each in findings if each["finding"] == "model_changed"]

            await routed.call("/v1/completions", PROMPT)
            assert int((await routed.call("/v1/completions", PROMPT)).overlap or 0) > 300
            assert await found() == []
            card |= other

            await until(found)
            (finding,) = await found()
            assert (finding["worker"], finding["model"]) == (worker.url, "m")
            assert str(next(iter(other.values()))) in finding["detail"]
            assert int((await routed.call("/v1/completions", PROMPT)).overlap or 0) == 0
