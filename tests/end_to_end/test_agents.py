"""Agents' hints, as clients send them and operators see them: a real router and workers."""

from __future__ import annotations

from typing import Any

import pytest
from router_under_test import RouterUnderTest, router

from simulator.worker import SimulatedWorkerSettings
from simulator.worker.serve import running

MODEL = "simulated"
PATH = "/v1/chat/completions"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "What does the file say? " * 20}], "max_tokens": 2}


async def explained(routed: RouterUnderTest, request: Any, headers: dict[str, str]) -> Any:
    return (await routed.call("/explain", {"path": PATH, "request": request}, headers=headers)).json()


def retained_tokens(answer: Any) -> dict[str, int]:
    return {each["worker"]: each["load"]["wanted"] for each in answer["candidates"]}


async def test_session_keeps_its_location_until_its_last_request() -> None:
    settings = SimulatedWorkerSettings(base_step_s=0.001)
    async with running(settings) as one, running(settings) as two, router(one, two) as routed:
        bad = await routed.call(PATH, CHAT, headers={"x-kvrouter-next-call-ms": "soon"})
        assert (bad.status, bad.error["param"]) == (400, "x-kvrouter-next-call-ms")
        bad = await routed.call(PATH, CHAT | {"nvext": {"agent_hints": {"osl": "long"}}})
        assert (bad.status, bad.error["param"]) == (400, "nvext.agent_hints.osl")

        session = {"x-session-id": "agent-7"}
        answer = await explained(routed, CHAT, session)
        assert answer["hints"] is None
        assert set(retained_tokens(answer).values()) == {0}

        pausing = session | {"x-kvrouter-next-call-ms": "3600000", "x-kvrouter-output-tokens": "40"}
        reply = await routed.call(PATH, CHAT, headers=pausing)
        assert reply.status == 200, reply.body
        answer = await explained(routed, CHAT, pausing)
        place = {"worker": reply.worker, "dp_rank": 0}
        assert answer["hints"] == {"output_tokens": 40, "next_call": 3600.0, "final": None, "place": place}
        assert retained_tokens(answer)[reply.worker] == answer["tokens"]
        assert sum(retained_tokens(answer).values()) == answer["tokens"]

        closing = CHAT | {"nvext": {"session_control": {"session_id": "agent-7", "action": "close"}}}
        assert (await explained(routed, closing, {}))["hints"]["place"] == place
        assert (await routed.call(PATH, closing)).status == 200
        answer = await explained(routed, closing, {})
        assert answer["hints"] == {"output_tokens": None, "next_call": None, "final": True, "place": None}
        assert set(retained_tokens(answer).values()) == {0}


async def test_expected_output_length_changes_predicted_tpot() -> None:
    settings = SimulatedWorkerSettings(base_step_s=0.001)
    async with running(settings) as one, router(one, rates={"context_token": 1e-4}) as routed:
        request = CHAT | {"max_tokens": 5000}

        async def tpot(headers: dict[str, str]) -> float:
            answer = await explained(routed, request, headers)
            expected: float = answer["candidates"][0]["forecast"]["tpot"]["expected"]
            return expected

        usual = await tpot({})
        longer = await tpot({"x-kvrouter-output-tokens": "4256"})  # 256 until anything is learned
        assert longer == pytest.approx(usual + 2000 * 1e-4, rel=1e-6)
        assert await tpot({"x-kvrouter-output-tokens": "100000"}) == pytest.approx(usual + 2372 * 1e-4, rel=1e-6)
