"""kvrouter in front of two real vLLM workers, used as its users do."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest

from engine.client import ANSWER_TOKENS, Client
from engine.conversations import Conversation, conversations
from engine.processes import wait_for
from engine.report import Run
from engine.servers import BLOCK_SIZE, RouterProcess, VllmWorker

pytestmark = pytest.mark.engine


def test_every_answer_is_complete(runs: list[Run]) -> None:
    for run in runs:
        assert len(run.answers) >= 60
        assert all(answer.complete for answer in run.answers)


def test_predicted_overlap_equals_engine_report(runs: list[Run]) -> None:
    run = kv_aware(runs, users=1, think_seconds=0.3)
    assert run.exact_share >= 0.95, run.explain_misses()


def test_prediction_without_think_time_misses_at_most_last_answer(runs: list[Run]) -> None:
    """Generated tokens are known from events only, which a client without think time may overtake."""
    run = kv_aware(runs, users=1, think_seconds=0.0)
    assert run.exact_share >= 0.8, run.explain_misses()
    assert all(0 < miss.cached - miss.predicted <= ANSWER_TOKENS + BLOCK_SIZE for miss in run.misses)


@pytest.mark.parametrize("users", [1, 8])
def test_kv_aware_hits_more_than_round_robin(runs: list[Run], users: int) -> None:
    shares = {(run.policy, run.think_seconds): run.cached_share for run in runs if run.users == users}
    think_seconds = 0.3 if users == 1 else 0.0
    assert shares["kv_aware", think_seconds] > shares["round_robin", think_seconds] + 0.05


def test_late_router_knows_blocks_of_warm_workers(workers: list[VllmWorker], logs: Path) -> None:
    with RouterProcess(workers, logs) as router, Client(router) as client:
        warmed = conversations(seed=1)[:8]
        transcripts = [transcript(client, conversation) for conversation in warmed]
    with RouterProcess(workers, logs) as router, Client(router) as client:
        answers = [client.ask(messages) for messages in transcripts]
    assert [answer.predicted for answer in answers] == [answer.cached for answer in answers]
    assert all(answer.cached > answer.prompt_tokens - 3 * BLOCK_SIZE for answer in answers)


def test_killed_worker_is_skipped_and_returns_empty(workers: list[VllmWorker], logs: Path) -> None:
    with RouterProcess(workers, logs) as router, Client(router) as client:
        conversation = conversations(seed=2)[0]
        messages = transcript(client, conversation)
        url = client.ask(messages).worker
        (victim,) = (worker for worker in workers if worker.url == url)
        (survivor,) = (worker for worker in workers if worker.url != url)
        assert wait_for(lambda: router.matched(messages)[victim.url], 5, "the prompt is in the index")

        answer = client.stream(messages, answer_tokens=2500)  # has begun: its headers are here
        victim.kill()
        with pytest.raises(openai.APIError, match="broke off"):
            list(answer)

        after = [client.ask(messages) for _ in range(4)]
        assert [answer.worker for answer in after] == [survivor.url] * 4
        assert all(answer.complete for answer in after)
        health = router.health()
        assert (health["status"], health["workers"], health["workers_up"]) == ("ok", 2, 1)
        assert [found["finding"] for found in health["findings"]] == ["worker_down"]

        victim.start()
        victim.wait_until_ready()
        wait_for(lambda: router.health()["workers_up"] == 2, 30, "the worker is used again")
        assert router.matched(messages)[victim.url] == 0
        assert router.workers()[victim.url]["ranks"][0]["blocks"]["gpu"] == 0

        wait_for(lambda: router.workers()[victim.url]["state"] == "ready", 60, "it bears its full share again")
        # The worker of an unknown system prompt is a matter of chance: there are six of them.
        fresh = client.converse_all(conversations(seed=3), think_seconds=0.3)
        assert {answer.worker for answer in fresh} == {victim.url, survivor.url}
        assert [answer.predicted for answer in fresh] == [answer.cached for answer in fresh]


def kv_aware(runs: list[Run], users: int, think_seconds: float) -> Run:
    (run,) = (r for r in runs if (r.policy, r.users, r.think_seconds) == ("kv_aware", users, think_seconds))
    return run


def transcript(client: Client, conversation: Conversation) -> list[dict[str, str]]:
    """Go through a conversation. All of it, with one more question."""
    messages = [{"role": "system", "content": conversation.system}]
    for question, answer in zip(conversation.questions, client.converse(conversation), strict=True):
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer.text}]
    return [*messages, {"role": "user", "content": "And then?"}]
