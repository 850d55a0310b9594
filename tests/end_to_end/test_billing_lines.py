"""Ten turns of Claude Code, whose prompts begin with a line that always differs, on engines that keep or drop it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from envoy_client import Mode, set_headers, streamed
from grpc_call import channel_to
from picker_under_test import JSON, PickerUnderTest, picker
from router_under_test import RouterUnderTest, router, until
from scripted_worker import scripted_worker
from simulated_workers import simulated_workers

TURNS = 10
RULES = "You are a careful coding agent. " * 100
MODEL = "kvrouter/tiny-chat"


def body(turn: int) -> dict[str, Any]:
    line = f"x-anthropic-billing-header: cc_version=2.1.36.{turn:03x}; cc_entrypoint=cli; cch={turn * 977:05x};"
    messages = [
        {"role": ("user", "assistant")[place % 2], "content": f"Message {place}. {RULES[:600]}"}
        for place in range(2 * turn + 1)
    ]
    system = [{"type": "text", "text": line}, {"type": "text", "text": RULES}]
    return {"model": MODEL, "max_tokens": 4, "system": system, "messages": messages}


async def cached_in_turns(routed: RouterUnderTest) -> list[float]:
    """Send the turns of a session, and return the cached share of each later prompt."""
    shares = []
    for turn in range(TURNS):
        headers = {"x-claude-code-session-id": "run-1"}
        usage = (await routed.call("/v1/messages", body(turn), headers=headers)).json()["usage"]
        cached = usage["cache_read_input_tokens"]
        shares.append(cached / (cached + usage["input_tokens"]))
    return shares[1:]


@pytest.mark.parametrize(
    ("engine", "setting", "hits"),
    [(None, "keep", True), (None, "auto", True), ("sglang", "keep", False), ("sglang", "auto", True)],
)
async def test_turns_hit_unless_the_line_reaches_an_engine_that_keeps_it(
    engine: str | None, setting: str, hits: bool
) -> None:
    async with (
        simulated_workers(1, model=MODEL, disaggregation=engine, num_blocks=2048, max_model_len=16384) as urls,
        router(*urls, proxy={"billing_line": setting}) as routed,
    ):
        await routed.until_tokenizers_are_tried()
        shares = await cached_in_turns(routed)
        assert (min(shares) > 0.75) if hits else (max(shares) < 0.1), shares
        if not hits:
            await until(lambda: details(routed), lambda found: "Likely cause: the billing line of Claude Code" in found)


async def details(routed: RouterUnderTest) -> str:
    found = (await routed.health())["findings"]
    return "".join(each["detail"] for each in found if each["finding"] == "prompts_vary")


async def test_picker_cuts_the_line_out_of_the_body_that_envoy_forwards() -> None:
    asked = body(0) | {"model": "m"}
    sent = json.dumps(asked).encode()
    async with (
        scripted_worker() as worker,
        picker(worker.url, proxy={"billing_line": "strip"}) as (side, port),
        channel_to(port) as channel,
    ):
        stream = PickerUnderTest(side, channel, [worker.url.removeprefix("http://")]).stream(Mode.FULL_DUPLEX_STREAMED)
        await stream.head("/v1/messages", JSON, ("content-length", str(len(sent))))
        await stream.body(sent)
        headers = set_headers((await stream.receive()).request_headers.response.header_mutation)
        forwarded, ended = streamed((await stream.receive()).request_body)
        assert ended
        assert json.loads(forwarded) == asked | {"system": asked["system"][1:]}
        assert headers["content-length"] == str(len(forwarded))
        await stream.finish()
