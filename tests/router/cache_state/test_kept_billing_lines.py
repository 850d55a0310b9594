"""Which bodies lose their billing line, by the engines of the fleet and by what their answers show."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from router.apis.usage import Usage
from router.cache_state.billing_lines import BillingLines
from router.cache_state.target_audit import CachePrediction
from router.fleet.discovery import Engine
from router.fleet.fleet import Fleet
from router.fleet.worker import Worker
from router.settings import BillingLine

PATH = "/v1/messages"
LINE = b'{"type":"text","text":"x-anthropic-billing-header: cch=1;"},'
BODY = b'{"system":[%b{"type":"text","text":"Be brief."}]}'
WITH, WITHOUT = BODY % LINE, BODY % b""


class FakeWorker:
    """A worker with an engine."""

    def __init__(self, engine: Engine) -> None:
        self.description = SimpleNamespace(engine=engine)
        self.starts = 1


def worker(engine: Engine) -> Any:
    return FakeWorker(engine)


def lines(*workers: Any, setting: BillingLine = BillingLine.AUTO) -> BillingLines:
    return BillingLines(setting, cast(Fleet, SimpleNamespace(workers=list(workers), version=1, on_removed=[])))


def answer(known: BillingLines, by: Any, predicted: int, cached: int | None, tokens: int = 4000) -> None:
    prediction = CachePrediction([], 4000, predicted, None, True, None, 0.0)
    known.answered(cast(Worker, by), prediction, Usage(tokens, 1, cached))


@pytest.mark.parametrize(
    ("engine", "setting", "sent"),
    [
        (Engine.SGLANG, BillingLine.AUTO, WITHOUT),
        (Engine.VLLM, BillingLine.AUTO, WITH),
        (Engine.OTHER, BillingLine.AUTO, WITH),
        (Engine.SGLANG, BillingLine.KEEP, WITH),
        (Engine.VLLM, BillingLine.STRIP, WITHOUT),
    ],
)
def test_known_engines_decide(engine: Engine, setting: BillingLine, sent: bytes) -> None:
    known = lines(worker(engine), setting=setting)
    assert known.body_to_send(PATH, WITH)[0] == sent
    assert known.body_to_send(PATH, WITHOUT) == (WITHOUT, False)


def test_one_worker_that_keeps_it_is_enough() -> None:
    assert lines(worker(Engine.VLLM), worker(Engine.SGLANG)).body_to_send(PATH, WITH) == (WITHOUT, False)


@pytest.mark.parametrize(
    ("predicted", "cached", "tokens", "strips"),
    [
        (3000, 48, 4000, True),
        (3000, 2990, 4000, False),
        (3000, None, 4000, False),
        (100, 0, 4000, False),
        (100, 0, 4040, True),
    ],
)
def test_three_answers_show_what_another_engine_does(
    predicted: int, cached: int | None, tokens: int, strips: bool
) -> None:
    engine = worker(Engine.OTHER)
    known = lines(engine)
    for _ in range(2):
        answer(known, engine, predicted, cached, tokens)
    assert known.body_to_send(PATH, WITH) == (WITH, True)
    answer(known, engine, predicted, cached, tokens)
    assert known.body_to_send(PATH, WITH) == ((WITHOUT, False) if strips else (WITH, True))


@pytest.mark.parametrize(
    ("messages", "sent"),
    [
        ([("system", "x-anthropic-billing-header: cch=1;\nBe brief."), ("user", "Hi")], True),
        ([("developer", "Be brief."), ("system", "x-anthropic-billing-header: cch=1;\nYes.")], True),
        ([("user", "x-anthropic-billing-header: cch=1;\nHi")], False),
        ([("user", "Hi"), ("system", "x-anthropic-billing-header: cch=1;\nHi")], False),
    ],
)
def test_a_usual_chat_loses_the_line_of_its_system_prompt(messages: list[tuple[str, str]], sent: bool) -> None:
    path, chat = "/v1/chat/completions", [{"role": role, "content": content} for role, content in messages]
    body = json.dumps({"model": "m", "messages": chat}).encode()
    known = lines(worker(Engine.SGLANG))
    without = known.body_to_send(path, body, ("m", chat, False, None))
    assert without == known.body_to_send(path, body)
    assert (without != (body, False)) is sent


def test_a_hit_or_a_restart_begins_anew() -> None:
    engine = worker(Engine.OTHER)
    known = lines(engine)
    for cached in (0, 0, 2900, 0, 0):
        answer(known, engine, 3000, cached)
    assert not known.keeps(cast(Worker, engine))
    answer(known, engine, 3000, 0)
    assert known.keeps(cast(Worker, engine))
    engine.starts += 1
    assert not known.keeps(cast(Worker, engine))
