"""SLOs of first and later tokens, for clients and operators, with real routers and workers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from router_under_test import Reply, RouterUnderTest, router, until
from scripted_worker import Exchange, scripted_worker

from router.auth import hashed_key
from simulator.worker import SimulatedWorkerSettings
from simulator.worker.serve import running

PATH = "/v1/completions"
MODEL = "simulated"
LEVELS = {
    "strict": {"ttft": 0.001, "when_late": "refuse"},
    "late": {"ttft": 0.001},
    "loose": {"ttft": 3600, "tpot": 3600},
}
STREAM = {"model": MODEL, "prompt": "A prompt with an SLO.", "max_tokens": 4, "stream": True}
USAGE = {"stream_options": {"include_usage": True}}


@pytest.fixture(scope="module")
async def routed() -> AsyncIterator[RouterUnderTest]:
    """Two workers that are taken to need ten milliseconds a token until it is learned otherwise."""
    settings = SimulatedWorkerSettings(base_step_s=0.001)
    async with (
        running(settings) as one,
        running(settings) as two,
        router(one, two, service_levels=LEVELS, constants={"rates": {"token": 0.01}}) as routed,
    ):
        yield routed


async def asked(routed: RouterUnderTest, headers: dict[str, str], **fields: Any) -> Reply:
    return await routed.call(PATH, STREAM | fields, headers=headers)


@pytest.mark.parametrize(
    ("headers", "param"),
    [
        ({"x-slo-ttft-ms": "soon"}, "x-slo-ttft-ms"),
        ({"x-llm-d-slo-tpot-ms": "-1"}, "x-llm-d-slo-tpot-ms"),
        ({"x-kvrouter-service-level": "best"}, "x-kvrouter-service-level"),
    ],
)
async def test_unreadable_slo_is_refused(routed: RouterUnderTest, headers: dict[str, str], param: str) -> None:
    reply = await asked(routed, headers)
    assert (reply.status, reply.error["param"]) == (400, param)


async def test_slo_that_cannot_be_met_is_refused(routed: RouterUnderTest) -> None:
    labels = {"model": MODEL, "service_level": "strict", "outcome": "refused"}
    before = await routed.metric("kvrouter_slo_answers_total", **labels)
    with pytest.raises(openai.RateLimitError) as refusal:
        await routed.openai.completions.create(
            model=MODEL, prompt="x", extra_headers={"x-kvrouter-service-level": "strict"}
        )
    assert refusal.value.code == "slo_not_met"
    assert 1 <= int(refusal.value.response.headers["retry-after"]) <= 60
    assert await routed.metric("kvrouter_slo_answers_total", **labels) == before + 1
    assert await routed.metric("kvrouter_admission_refused_total", reason="slo_not_met") >= 1
    await routed.until_released()


@pytest.mark.parametrize(
    ("headers", "level", "outcome"),
    [
        ({"x-kvrouter-service-level": "late"}, "late", "missed"),
        ({"x-kvrouter-service-level": "loose"}, "loose", "met"),
        # Headers override the class, and llm-d's newer names override the older ones.
        ({"x-kvrouter-service-level": "strict", "x-slo-ttft-ms": "3600000"}, "strict", "met"),
        ({"x-slo-ttft-ms": "1", "x-llm-d-slo-ttft-ms": "3600000"}, "", "met"),
    ],
)
async def test_served_requests_are_counted_as_met_or_missed(
    routed: RouterUnderTest, headers: dict[str, str], level: str, outcome: str
) -> None:
    labels = {"model": MODEL, "service_level": level, "outcome": outcome}
    before = await routed.metric("kvrouter_slo_answers_total", **labels)
    errors = await routed.metric("kvrouter_ttft_error_seconds_count", model=MODEL)
    prompt = f"{level}, {outcome}: {headers} " * 4
    reply = await asked(routed, headers, prompt=prompt, **USAGE)
    assert reply.status == 200

    await until(
        lambda: routed.metric("kvrouter_slo_answers_total", **labels), lambda value: value == before + 1, seconds=30
    )
    assert await routed.metric("kvrouter_ttft_error_seconds_count", model=MODEL) == errors + 1
    assert await routed.metric("kvrouter_tpot_error_seconds_count", model=MODEL) >= 1
    await routed.until_released()


async def test_explain_predicts_whether_slo_is_met(routed: RouterUnderTest) -> None:
    async def explained(headers: dict[str, str]) -> Any:
        request = {"path": PATH, "request": STREAM | {"prompt": "Nobody has seen this before."}}
        return (await routed.call("/explain", request, headers=headers)).json()

    plain = await explained({})
    assert plain["slo"] is None
    prediction = plain["candidates"][0]["forecast"]
    assert 0 < prediction["ttft"]["low"] <= prediction["ttft"]["expected"] <= prediction["ttft"]["high"]
    assert prediction["tpot"]["expected"] > 0

    met = (await explained({"x-slo-ttft-ms": "3600000"}))["slo"]
    assert (met["met"], met["refused"], met["tpot_to_spare"]) == (True, False, None)
    assert 3500 < met["ttft_to_spare"] < 3600
    missed = (await explained({"x-kvrouter-service-level": "strict"}))["slo"]
    assert (missed["met"], missed["refused"]) == (False, True)
    assert -10 < missed["ttft_to_spare"] < 0
    bad = await routed.call("/explain", {"path": PATH, "request": STREAM}, headers={"x-kvrouter-service-level": "best"})
    assert bad.status == 400


async def test_predictions_learn_from_errors() -> None:
    """Rates start a hundred times too high, and are learned from some answers."""
    settings = SimulatedWorkerSettings(base_step_s=0.002)
    sections: dict[str, Any] = {"constants": {"rates": {"step": 0.2}}, "service_levels": LEVELS}
    async with running(settings) as one, router(one, **sections) as routed:
        for number in range(24):
            await asked(routed, {"x-kvrouter-service-level": "loose"}, prompt=f"{number} " * 8, **USAGE)
        request = {"path": PATH, "request": STREAM | {"prompt": "25 " * 8}}
        prediction = (await routed.call("/explain", request)).json()["candidates"][0]["forecast"]
        assert prediction["measured"]
        assert prediction["ttft"]["expected"] < 0.1
        assert prediction["ttft"]["low"] < prediction["ttft"]["high"]
        assert 0 <= await routed.metric("kvrouter_ttft_calibration_ratio", model=MODEL) <= 1


@pytest.mark.parametrize("by", ["model", "tenant"])
async def test_service_level_of_model_or_tenant_applies(by: str) -> None:
    sections: dict[str, Any] = {"service_levels": LEVELS, "constants": {"rates": {"token": 0.01}}}
    headers = {}
    if by == "model":
        sections["models"] = {MODEL: {"service_level": "strict"}}
    else:
        sections["tenants"] = {"named": {"one": {"keys": [hashed_key("k")], "service_level": "strict"}}}
        sections["server"] = {"token": "operator"}
        headers = {"authorization": "Bearer k"}
    async with running(SimulatedWorkerSettings(base_step_s=0.001)) as one, router(one, **sections) as routed:
        assert (await asked(routed, headers)).error["code"] == "slo_not_met"
        assert (await asked(routed, headers | {"x-kvrouter-service-level": "loose"})).status == 200


@pytest.mark.parametrize(("headers", "moved"), [({"x-slo-tpot-ms": "30"}, True), ({}, False)])
async def test_request_without_slo_avoids_missing_others(headers: dict[str, str], moved: bool) -> None:
    """The cheapest worker is the one that streams an answer with a shared prefix.

    That stream needs a fifth of the worker's next ten seconds, and both requests need nearly half. Most of the prompt
    is new at either worker.
    """
    stays = asyncio.Event()

    async def stream(exchange: Exchange) -> None:
        await exchange.begin_chunks()
        if json.loads(exchange.body)["user"] == "beside":
            await stays.wait()
        await exchange.chunk(b"data: 1\n\n")
        await exchange.chunk(b"")

    async with (
        scripted_worker(stream) as one,
        scripted_worker(stream) as two,
        router(one.url, two.url, constants={"rates": {"token": 0.0005, "step": 0.02}}) as routed,
    ):
        body = {"model": "m", "prompt": list(range(4000)), "stream": True, "user": "beside"}
        beside = asyncio.create_task(routed.call(PATH, body, headers=headers))

        await until(lambda: one.exchanges or two.exchanges)
        reply = await routed.call(PATH, body | {"prompt": list(range(9000)), "user": "after"})
        stays.set()
        assert (reply.worker != (await beside).worker) is moved
