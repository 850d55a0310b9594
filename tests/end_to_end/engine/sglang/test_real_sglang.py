"""A router in front of real SGLang workers, given nothing but their URLs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any
from urllib.request import urlopen

import pytest

from engine.processes import wait_for
from engine.servers import RouterProcess, running
from engine.sglang.asking import Answer, ask, chat, completion, text
from engine.sglang.installation import MODEL, SglangInstallation
from engine.sglang.servers import PAGE_SIZE, SglangWorker
from engine.sglang.table import Table
from engine.web import post_json
from router.fleet.engine_metrics import read_engine_loads

pytestmark = pytest.mark.engine_sglang

README = Path(__file__).parents[4] / "README.md"
SETTLED = 0.3  # seconds after which the events of an answer are indexed, on a busy machine
TOKEN = "operator"


@pytest.fixture(scope="module")
def router(fleet: list[SglangWorker], logs: Path) -> Iterator[RouterProcess]:
    with RouterProcess(fleet, logs, patience=30.0, token=TOKEN) as router:
        router.wait_until_compared()
        yield router


def settled(router: RouterProcess, path: str, body: dict[str, Any], **headers: str) -> Answer:
    """Ask, and wait until the events of the answer are indexed."""
    answer = ask(router, path, body, **headers)
    time.sleep(SETTLED)
    return answer


def test_flag_of_the_readme_is_the_one_that_workers_are_started_with(fleet: list[SglangWorker]) -> None:
    command = README.read_text().partition("python -m sglang.launch_server")[2]
    flag = re.search(r"--kv-events-config '(\{.*?\})'", command)
    assert flag is not None
    documented = json.loads(flag[1])
    started = {name: re.sub(r":\d+$", ":5557", value) for name, value in fleet[0].events_config.items()}
    assert started == {**documented, "replay_endpoint": "tcp://*:5557", "topic": "kv-events"}


def test_doctor_and_health_are_content(fleet: list[SglangWorker], router: RouterProcess, table: Table) -> None:
    health = router.health()
    found = {finding["finding"] for finding in health["findings"]}
    assert (health["status"], found) == ("ok", set())
    ranks = [rank for worker in router.workers().values() for rank in worker["ranks"]]
    assert [rank["state"] for rank in ranks] == ["live", "live"]
    doctor = Path(sys.executable).with_name("kvrouter")
    urls = [word for worker in fleet for word in ("--worker", worker.url)]
    done = subprocess.run([doctor, "doctor", *urls], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("can be replayed") == 2
    table.add("found by its URL", "`/health` ok, doctor content")


def test_chats_over_a_shared_system_prompt_are_predicted_exactly(router: RouterProcess, table: Table) -> None:
    random = Random(1)
    system = text(random, 400)
    answers = [settled(router, "/v1/chat/completions", chat(system, text(random, 60))) for _ in range(60)]
    table.add_predictions("60 chats over a shared system prompt", answers)
    assert [answer.exact for answer in answers] == [True] * 60
    assert sum(answer.cached or 0 for answer in answers) > 58 * 380


def test_all_request_forms_are_predicted_exactly(router: RouterProcess, table: Table) -> None:
    random, ids = Random(2), list(range(300, 500))
    prompt = text(random, 200)
    sampling = {"max_new_tokens": 4, "temperature": 0}
    user = {"role": "user", "content": prompt}
    forms = [
        ("/v1/completions", completion(prompt)),
        ("/v1/completions", completion(ids)),
        ("/v1/completions", completion(prompt, cache_salt="one")),
        ("/v1/chat/completions", chat(prompt, prompt)),
        ("/v1/chat/completions", {"model": MODEL, "messages": [user], "max_tokens": 4, "cache_salt": "two"}),
        ("/v1/chat/completions", {"model": MODEL, "messages": _developed(prompt), "max_tokens": 4}),
        ("/v1/chat/completions", {"model": MODEL, "messages": [user, _answer(prompt)], "max_tokens": 4}),
        ("/v1/responses", {"model": MODEL, "input": prompt, "max_output_tokens": 4}),
        ("/generate", {"text": text(random, 200), "sampling_params": sampling}),
        ("/generate", {"input_ids": ids[::-1], "sampling_params": sampling}),
    ]
    answers = [settled(router, path, body) for path, body in forms for _ in range(3)]
    table.add_predictions("completions, chats, responses, generate, salts; texts and tokens", answers)
    assert [answer.exact for answer in answers] == [True] * len(answers)
    assert all(answer.cached for answer in answers[2::3])


def _developed(prompt: str) -> list[dict[str, Any]]:
    """Return a message of a developer, and one of a user with texts in parts."""
    parts = [{"type": "text", "text": text} for text in (prompt, "Who?")]
    return [{"role": "developer", "content": prompt}, {"role": "user", "content": parts}]


def _answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def test_messages_of_agents_share_the_prefix_of_chats(router: RouterProcess, table: Table) -> None:
    """SGLang reports no cached tokens for `/v1/messages` without its own flag, so the answers' texts are compared."""
    system = text(Random(3), 200)
    messages = [{"role": "user", "content": "hello"}]
    first = settled(router, "/v1/chat/completions", chat(system, "hello"))
    answer = settled(
        router,
        "/v1/messages",
        {"model": MODEL, "system": system, "messages": messages, "max_tokens": 4, "temperature": 0},
    )
    again = settled(router, "/v1/chat/completions", chat(system, "hello"))
    assert (answer.status, answer.text) == (200, first.text)
    assert answer.predicted == again.cached
    assert answer.predicted > 190
    table.add("`/v1/messages` after a chat of its prompt", "prefix and answer of the chat")


def test_adapters_have_prefixes_and_answers_of_their_own(router: RouterProcess, table: Table) -> None:
    prompt = text(Random(4), 200)
    names: list[dict[str, str]] = [
        {"model": MODEL},
        {"model": "poet"},
        {"model": f"{MODEL}:poet"},
        {"model": MODEL, "lora_path": "poet"},
        {"model": MODEL},
    ]
    answers = [settled(router, "/v1/completions", completion(prompt) | name) for name in names]
    table.add_predictions("an adapter by `NAME`, `BASE:NAME` and `lora_path`", answers)
    assert [answer.exact for answer in answers] == [True] * 5
    assert [bool(answer.cached and answer.cached > 100) for answer in answers] == [False, False, True, True, True]
    base, poet = answers[0].text, answers[1].text
    assert base != poet
    assert [answer.text for answer in answers] == [base, poet, poet, poet, base]
    assert ask(router, "/v1/completions", completion(prompt, model=f"{MODEL}:nobody")).status == 404


def test_flush_through_the_router_empties_caches_and_index(router: RouterProcess, table: Table) -> None:
    body = completion(text(Random(5), 200))
    settled(router, "/v1/completions", body)
    post_json(f"{router.url}/flush_cache", token=TOKEN)
    answers = [settled(router, "/v1/completions", body) for _ in range(2)]
    table.add_predictions("after `/flush_cache` at the router", answers)
    assert [(answer.predicted, bool(answer.cached)) for answer in answers] == [
        (0, False),
        (200 // PAGE_SIZE * PAGE_SIZE, True),
    ]


def test_pause_and_new_weights(
    fleet: list[SglangWorker], installation: SglangInstallation, router: RouterProcess, table: Table
) -> None:
    body = completion(text(Random(6), 200))
    settled(router, "/v1/completions", body)
    post_json(f"{router.url}/pause_generation", {"mode": "abort"}, TOKEN)
    try:
        assert {worker["state"] for worker in router.workers().values()} == {"paused"}
    finally:
        post_json(f"{router.url}/continue_generation", token=TOKEN)
    assert settled(router, "/v1/completions", body).exact
    path = str(installation.model)
    reply = post_json(f"{router.url}/update_weights_from_disk", {"model_path": path}, TOKEN)
    assert {each["status"] for each in reply["workers"]} == {200}
    assert {each["worker"] for each in reply["workers"]} == {worker.url for worker in fleet}
    after = settled(router, "/v1/completions", body)
    assert (after.predicted, after.cached) == (0, 0)
    assert settled(router, "/v1/completions", body).exact
    table.add(
        "`/pause_generation`, `/continue_generation`, `/update_weights_from_disk`",
        "followed: an empty index after new weights",
    )


def test_answers_with_and_without_ids_are_equal(fleet: list[SglangWorker], logs: Path, table: Table) -> None:
    random = Random(7)
    bodies = [chat(text(random, 100), text(random, 40)) for _ in range(6)]
    bodies += [chat(text(random, 100), "one", "two", text(random, 40)) for _ in range(6)]
    developed = [_developed(text(random, 100)) for _ in range(3)]
    bodies += [{"model": MODEL, "messages": each, "max_tokens": 4, "temperature": 0} for each in developed]
    with RouterProcess(fleet, logs, patience=30.0, forward_tokens=True) as router:
        wait_for(lambda: list(router.tokenizer()["ids_not_sent"].values()) == ["", ""], 120, "both receive ids")
        with_ids = [ask(router, "/v1/chat/completions", body) for body in bodies]
        sent = router.metric("kvrouter_forwarded_token_requests_total")
    with RouterProcess(fleet, logs, patience=30.0) as router:
        plain = [ask(router, "/v1/chat/completions", body) for body in bodies]
    assert [answer.text for answer in with_ids] == [answer.text for answer in plain]
    assert sent == len(bodies)
    table.add(f"{len(bodies)} chats with `input_ids` and without", f"answers equal; {sent:.0f} sent with ids")


def test_killed_worker_under_load_and_its_restart(fleet: list[SglangWorker], logs: Path, table: Table) -> None:
    random = Random(8)
    bodies = [completion(text(random, 150), tokens=8) for _ in range(40)]
    with RouterProcess(fleet, logs, patience=30.0) as router:
        router.wait_until_compared()
        with ThreadPoolExecutor(4) as threads:
            answers = [threads.submit(ask, router, "/v1/completions", body) for body in bodies]
            wait_for(lambda: sum(answer.done() for answer in answers) > 8, 60, "some answers")
            fleet[1].kill()
            statuses = [answer.result(120).status for answer in answers]
        assert statuses == [200] * 40
        fleet[1].start()
        fleet[1].wait_until_ready()
        wait_for(lambda: router.health()["workers_up"] == 2, 60, "the worker is up again")
        time.sleep(1.0)
        again = [settled(router, "/v1/completions", body) for body in bodies[:20]]
    table.add_predictions("after a worker was killed under load and started again", again)
    assert [answer.exact for answer in again] == [True] * 20


def test_evictions_of_a_small_cache_are_followed(installation: SglangInstallation, logs: Path, table: Table) -> None:
    worker = SglangWorker("small", installation, logs, tokens=2048)
    random = Random(9)
    prompts = [text(random, 300) for _ in range(12)]
    with running(worker), RouterProcess([worker], logs, patience=30.0) as router:
        router.wait_until_compared()
        answers = [settled(router, "/v1/completions", completion(random.choice(prompts))) for _ in range(60)]
        quick = []
        for _ in range(42):
            quick.append(ask(router, "/v1/completions", completion(random.choice(prompts))))
            time.sleep(0.09)  # less than a prompt counts as cached after its answer
    table.add_predictions("60 prompts in a cache of 2,048 tokens, at rest", answers)
    table.add_predictions("42 prompts in that cache, 90 ms after each other", quick)
    assert sum(answer.exact for answer in quick) > 38
    assert sum(answer.cached == 0 for answer in answers) > 10
    assert [answer.exact for answer in answers] == [True] * 60


def test_each_rank_has_its_own_stream(installation: SglangInstallation, logs: Path, table: Table) -> None:
    worker = SglangWorker("ranks", installation, logs, ranks=2, page_size=1)
    random = Random(10)
    prompts = [text(random, 100) for _ in range(10)]
    with running(worker), RouterProcess([worker], logs, patience=30.0) as router:
        router.wait_until_compared()
        assert router.health()["findings"] == []
        firsts = [settled(router, "/v1/completions", completion(prompt)) for prompt in prompts]
        seconds = [settled(router, "/v1/completions", completion(prompt)) for prompt in prompts]
    table.add_predictions("two data-parallel ranks, pages of one token", [*firsts, *seconds])
    assert {answer.rank for answer in firsts} == {"0", "1"}
    assert [first.rank for first in firsts] == [second.rank for second in seconds]
    assert [answer.exact for answer in [*firsts, *seconds]] == [True] * 20
    assert all(answer.cached and answer.cached > 95 for answer in seconds)


def test_full_engine_refuses_in_its_stream_and_another_answers(
    installation: SglangInstallation, logs: Path, table: Table
) -> None:
    flags = ("--max-running-requests", "1", "--max-queued-requests", "1", "--enable-priority-scheduling")
    workers = [SglangWorker(f"full{number}", installation, logs, *flags) for number in range(2)]
    random = Random(11)
    with running(*workers), RouterProcess(workers, logs, "--policy", "round_robin", patience=30.0) as router:
        with ThreadPoolExecutor(4) as threads:
            direct = [threads.submit(_streamed, workers[0].url, completion("y" * 50, tokens=400)) for _ in range(4)]
            wait_for(lambda: any(stream.done() for stream in direct), 60, "the first engine is full")
            streams = [_streamed(router.url, completion(text(random, 100), priority=number)) for number in range(6)]
            assert not all(stream.done() for stream in direct)
            refused = sum(b'"error"' in stream.result(120) for stream in direct)
        states = {worker["state"] for worker in router.workers().values()}
    failed = [stream for stream in streams if b'"error"' in stream[:400]]
    table.add("6 streams while one of two engines is full", f"{6 - len(failed)} answered, {refused} refused directly")
    assert refused
    assert failed == []
    assert states == {"ready"}


def test_priorities_and_aborts_reach_the_engine(installation: SglangInstallation, logs: Path, table: Table) -> None:
    flags = ("--max-running-requests", "1", "--enable-priority-scheduling")
    worker = SglangWorker("priorities", installation, logs, *flags)
    random, ended = Random(12), list[str]()

    def stream(name: str, tokens: int, priority: int) -> None:
        _streamed(router.url, completion(text(random, 50), tokens=tokens, priority=priority, ignore_eos=True))
        ended.append(name)

    with running(worker), RouterProcess([worker], logs, patience=30.0) as router, ThreadPoolExecutor(4) as threads:
        router.wait_until_compared()
        threads.submit(stream, "first", 400, 0)
        wait_for(lambda: _load(worker) == (1, 0), 60, "the first request runs")
        for waiting, (name, priority) in enumerate((("low", 0), ("high", 5)), 1):
            threads.submit(stream, name, 4, priority)
            wait_for(lambda waiting=waiting: _load(worker) == (1, waiting), 60, "the request waits")
        wait_for(lambda: len(ended) == 3, 120, "all requests end")
        table.add("three requests of two priorities, one at a time", f"answered in the order {', '.join(ended)}")
        assert ended == ["first", "high", "low"]

        prompt = text(random, 200)
        endless = json.dumps(completion(prompt, tokens=3000, ignore_eos=True, stream=True))
        client = subprocess.Popen(
            ["curl", "--silent", "--no-buffer", f"{router.url}/v1/completions", "--json", endless]
        )
        wait_for(lambda: _load(worker) == (1, 0), 60, "the request runs")
        time.sleep(SETTLED)
        client.kill()
        client.wait(10)
        wait_for(lambda: _load(worker) == (0, 0), 30, "the engine aborts the request")
        assert router.workers()[worker.url]["requests_in_flight"] == 0
        after = settled(router, "/v1/completions", completion(prompt))
        table.add_predictions("the prompt of an aborted stream", [after])
        assert after.exact
        assert after.cached


def _load(worker: SglangWorker) -> tuple[int, int]:
    """Return the numbers of running and waiting requests."""
    with urlopen(f"{worker.url}/metrics", timeout=30) as answer:
        loads = read_engine_loads(answer.read().decode())
    return sum(load.running for load in loads.values()), sum(load.waiting for load in loads.values())


def _streamed(url: str, body: dict[str, Any]) -> bytes:
    """Return a whole stream, whatever its status."""
    command = [
        "curl",
        "--silent",
        "--max-time",
        "120",
        f"{url}/v1/completions",
        "--json",
        json.dumps(body | {"stream": True}),
    ]
    return subprocess.run(command, capture_output=True, check=True, timeout=130).stdout
