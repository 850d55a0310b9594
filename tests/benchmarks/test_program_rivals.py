"""The rules of other routers for programs, and the sessions that `benchmarks.programs` makes."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import count
from random import Random

from benchmarks.policy.las import LEAST_SERVICE, LeastService
from benchmarks.policy.sessions import Turn, chained
from benchmarks.programs import SUBAGENT_SHARE, THUNDERAGENT, Cell, Sessions, with_subagent
from router.admission.ticket import Ticket
from router.apis.agent_hints import AgentHints
from router.apis.identities import Identity
from router.apis.requests import RoutedRequest
from router.settings import Role
from simulator.fleet.engine import LLAMA_70B
from simulator.fleet.fleet import FleetSpec
from simulator.fleet.simulated_router import build_router
from simulator.fleet.trace import TracedRequest, prompt_of
from simulator.fleet.virtual_time import VirtualTimeLoop
from simulator.fleet.workers import MODEL, EventIndex, SimulatedWorkers

BLOCK = 100


def test_the_program_with_the_least_service_is_next_and_service_fades() -> None:
    loop = VirtualTimeLoop()
    workers = SimulatedWorkers([Role.BOTH], 1000, BLOCK, loop.time)
    index = EventIndex(workers.registrations, True, loop.time)
    router = build_router(workers, index, LEAST_SERVICE, Random(0), loop.time)
    queue = router.admission
    assert isinstance(queue, LeastService)
    sent = list[str]()

    def report(queued: int) -> None:
        gauges = f"vllm:num_requests_running 0\nvllm:num_requests_waiting {queued}\n"
        router.scraped(workers.workers[0], f"{gauges}vllm:kv_cache_usage_perc 0\n")

    async def ask(name: str, tokens: int) -> None:
        request = TracedRequest(0.0, tokens, 1, (), (), name)
        prompt = RoutedRequest(MODEL, identity=Identity(name)).tokenized([prompt_of(request, 0, BLOCK)])
        queue.arrives(request, prompt)
        ticket = Ticket(tokens=tokens)
        assignment = queue.place(prompt, (), ticket) or await queue.wait(prompt, (), ticket)
        sent.append(name)
        assignment.release()

    async def asked(*names: str) -> None:
        """Let calls wait a second after another, and let the worker have capacity again."""
        report(5)
        calls = []
        for name in names:
            calls.append(loop.create_task(ask(name, BLOCK)))
            await asyncio.sleep(1)
        report(0)
        await asyncio.gather(*calls)

    async def story() -> None:
        report(0)
        for name, tokens in (("much", 9000), ("some", 5000), ("little", 1000)):
            await ask(name, tokens)
        await asked("much", "some", "little")
        await asyncio.sleep(60)
        report(0)
        await ask("little", 3000)
        await asked("some", "little")

    loop.run_until_complete(story())
    loop.close()
    assert sent[3:6] == ["little", "some", "much"]
    assert sent[7:] == ["some", "little"]


def test_thunderagent_holds_a_new_program_until_another_makes_its_last_call() -> None:
    turns = [Turn(6000, 100), Turn(300, 100, pause=20.0)]
    first = chained(0.0, "first", (), turns, count(), BLOCK)
    assert first.following is not None
    first = replace(first, following=replace(first.following, hints=AgentHints(final=True)))
    new = chained(1.0, "new", (), [Turn(6000, 100)], count(1000), BLOCK)
    spec = FleetSpec(LLAMA_70B, 1, 10_000, BLOCK)
    side = replace(THUNDERAGENT, hints=True)
    outcomes = Sessions(spec, side, Random(0), Cell.USUAL).run([first, new])
    arrived = {each.request.session: each for each in outcomes}  # the last call of each
    assert arrived["first"].sent == arrived["first"].request.arrival > 20
    assert arrived["new"].sent % 5 == 0
    assert 0 < arrived["new"].sent - arrived["first"].sent <= 5


def test_a_session_goes_on_after_the_last_call_of_its_subagent() -> None:
    turns = [Turn(40_000, 100), Turn(500, 100, pause=1.0), Turn(700, 100, pause=2.0)]
    session = chained(0.0, "s", (), turns, count(), BLOCK)
    for seed in range(100):
        random = Random(seed)
        if Random(seed).random() < SUBAGENT_SHARE:
            break
    calls = [with_subagent(session, count(1000), BLOCK, random)]
    while calls[-1].following is not None:
        calls.append(calls[-1].following)
    own = [each for each in calls if each.program is None]
    subagent = [each for each in calls if each.program == "s"]
    assert [each.input_tokens for each in own] == [40_000, 40_600, 41_400]
    assert [each.input_tokens for each in subagent] == [32_500, 33_300]
    assert calls[0].session == calls[-1].session == "s"
    places = [calls.index(each) for each in subagent]
    assert places == list(range(places[0], places[0] + len(subagent)))
    assert subagent[0].blocks[:320] == own[0].blocks[:320]
    assert not set(subagent[0].blocks[320:]) & set(own[-1].finished)
