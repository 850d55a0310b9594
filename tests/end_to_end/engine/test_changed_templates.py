"""A worker that receives token ids, and whose chat template changes: two real vLLMs, one behind the other's address.

The second engine has another template. It answers the ids of the first one's prompt without a word, so the tests see
which prompt was answered.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.compared_answers import Answer, answer, reasons, wait_until_tried, without_usage
from engine.installation import Installation
from engine.processes import wait_for
from engine.relay import Relay
from engine.servers import MODEL, RouterProcess, VllmWorker, running
from engine.test_engine_failover import TEMPLATE
from router.apis.endpoints import CHAT

pytestmark = pytest.mark.engine

NEVER_SECONDS = 3600.0
NEVER = {"check_interval": NEVER_SECONDS}
SAMPLED = 64  # one of this number of requests is sent without ids
# Shorter than a block, so that no answer depends on what is cached.
BODY = json.dumps(
    {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Which one?"}],
        "temperature": 0,
        "max_tokens": 8,
        "logprobs": True,
        "top_logprobs": 3,
    }
).encode()


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("templates") / "other.jinja"
    file.write_text(TEMPLATE)
    return file


@pytest.fixture(scope="module", params=[(), ("--enable-scale-out",)], ids=["computes probes", "renders probes"])
def engines(
    request: pytest.FixtureRequest, installation: Installation, logs: Path, template: Path
) -> Iterator[list[VllmWorker]]:
    """Two engines of one model. The second has another template."""
    found = [
        VllmWorker(f"changed{number}", installation, logs, installation.family("qwen3"), (*request.param, *flags))
        for number, flags in enumerate([(), ("--chat-template", str(template))])
    ]
    with running(*found):
        yield found


@pytest.fixture
def relay(engines: list[VllmWorker]) -> Iterator[Relay]:
    with Relay(engines[0].url).running() as relay:
        yield relay


def routed(relay: Relay, logs: Path, check_seconds: float) -> RouterProcess:
    options = ("--worker", relay.url)
    constants = {"check_interval": check_seconds}
    return RouterProcess([], logs, *options, patience=30.0, constants=constants, forward_tokens=True)


def answers_of(engines: list[VllmWorker]) -> tuple[Answer, Answer]:
    """Return the answers of both engines, which differ in more than the length of their prompts."""
    former, current = (answer(engine.url, CHAT, BODY) for engine in engines)
    assert (former[0], current[0]) == (200, 200)
    assert without_usage(former) != without_usage(current)
    return former, current


def test_no_wrong_prompt_is_answered_after_the_first_sample(
    engines: list[VllmWorker], relay: Relay, logs: Path
) -> None:
    former, current = answers_of(engines)
    with routed(relay, logs, NEVER_SECONDS) as router:
        assert wait_until_tried(router) == [""]
        assert answer(router.url, CHAT, BODY) == former
        relay.engine = engines[1].url
        found = [answer(router.url, CHAT, BODY) for _ in range(3 * SAMPLED)]
        findings = {each["finding"] for each in router.health()["findings"]}
    sampled = found.index(current)
    print(f"\n{sampled} wrong prompts before the sample")
    assert sampled == SAMPLED - 2  # the first of all requests was before the change
    assert found[:sampled] == [former] * sampled  # the ids of the former template
    assert found[sampled:] == [current] * (len(found) - sampled)
    assert "ids_miscounted" in findings


def test_no_wrong_prompt_is_answered_after_the_first_trial(engines: list[VllmWorker], relay: Relay, logs: Path) -> None:
    former, current = answers_of(engines)
    with routed(relay, logs, check_seconds=1.0) as router:
        assert wait_until_tried(router) == [""]
        assert answer(router.url, CHAT, BODY) == former
        relay.engine = engines[1].url
        wait_for(lambda: reasons(router) != [""], 60, "a trial differs")
        assert reasons(router) == ["its tokens of a plain chat differ"]
        assert [answer(router.url, CHAT, BODY) for _ in range(2 * SAMPLED)] == [current] * 2 * SAMPLED


def test_no_wrong_prompt_is_answered_after_a_restart(installation: Installation, logs: Path, template: Path) -> None:
    """The engine is killed and started with the other template while requests are sent."""
    worker = VllmWorker("restarted", installation, logs, installation.family("qwen3"))
    with (
        running(worker),
        RouterProcess([worker], logs, patience=30.0, constants=NEVER, forward_tokens=True) as router,
    ):
        assert wait_until_tried(router) == [""]
        former = answer(router.url, CHAT, BODY)
        worker.kill()
        worker.add_flags("--chat-template", str(template))
        worker.start()
        found: list[Answer] = []

        def is_answered() -> bool:
            found.append(answer(router.url, CHAT, BODY))
            return found[-1][0] == 200

        wait_for(is_answered, 240, "it answers again")
        found += [answer(router.url, CHAT, BODY) for _ in range(2 * SAMPLED)]
        current = answer(worker.url, CHAT, BODY)
    assert without_usage(former) != without_usage(current)
    answered = [each for each in found if each[0] == 200]
    assert answered == [current] * len(answered)
