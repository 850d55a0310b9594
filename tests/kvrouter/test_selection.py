"""The library that chooses workers and holds their load, without a server."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from waiting import until

from kvevents import AllBlocksCleared, BlockStored, WireForm
from kvrouter.selection import Load, NoWorker, Prompt, Saturated, Selector, Stream, UnknownModel, UnknownWorker
from worker import PublisherConfig, Reporter

IDLE = Load(0, 0, 0)
TIERS = ("device", "host_pinned", "disk")


def prompt(start: int = 0, tokens: int = 64, **fields: Any) -> Prompt:
    return Prompt(model="m", token_ids=range(start, start + tokens), **fields)


@pytest.fixture
async def selector() -> AsyncIterator[Selector]:
    async with Selector() as selector:
        await selector.upsert_worker("a", model="m", block_size=16)
        await selector.upsert_worker("b", model="m", block_size=16)
        yield selector


def idle(selector: Selector) -> bool:
    return all(load == IDLE for loads in selector.loads().values() for load in loads)


async def test_import_needs_no_web_server() -> None:
    code = (
        "import sys\n"
        "for name in ('fastapi', 'starlette', 'uvicorn'):\n"
        "    sys.modules[name] = None\n"  # an import of it fails
        "import kvrouter.selection\n"
    )
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


async def test_example_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs/embed.md").read_text()
    code = page.partition("```python\n")[2].partition("```")[0].replace("asyncio.run(main())", "")
    names: dict[str, Any] = {}
    exec(code, names)
    await names["main"]()
    assert capsys.readouterr().out.splitlines()[-1] in ("replica-1 0", "replica-2 0")


async def test_prompt_goes_where_its_prefix_was_sent(selector: Selector) -> None:
    async with await selector.reserve(prompt()) as first:
        worker = first.worker.name
    selected = await selector.select(prompt())
    assert selected.worker.name == worker
    assert selected.decision.chosen.overlap > 0
    assert idle(selector)


async def test_events_of_a_worker_without_url_predict_its_overlap(selector: Selector) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    reporter = Reporter.create(
        PublisherConfig(publisher="zmq", endpoint=endpoint, bind=True, wire_form=WireForm.VLLM_MAPS)
    )
    try:
        await selector.upsert_worker("b", model="m", block_size=16, streams=[Stream(0, endpoint)])
        selector.pause("a")

        async def overlap() -> int:
            # Batches before the subscription are lost, and blocks that are held are not reported again.
            reporter.report([AllBlocksCleared(), BlockStored([1, 2], None, list(range(32)), 16)])
            reporter.step()
            return (await selector.select(prompt())).decision.chosen.overlap

        async with asyncio.timeout(60):
            while await overlap() != 32:  # noqa: ASYNC110 - the stream has no event to await
                await asyncio.sleep(0.01)
            # Dynamo's counts include the last block of a prompt, and each tier those above it.
            scores = await selector.service.overlap_scores({"model_name": "m", "token_ids": list(range(32))})
            held = [[each[f"{tier}_blocks"] for tier in TIERS] for each in scores["workers"]]
            assert held == [[2, 2, 2]]  # the other one is paused
            while (await selector.select(prompt())).decision.chosen.overlap:
                selector.forget("b")  # again for each batch that was on its way
                await asyncio.sleep(0.01)
    finally:
        reporter.shutdown()


async def test_only_allowed_workers_are_chosen(selector: Selector) -> None:
    for _ in range(8):
        assert (await selector.select(prompt(), allowed={"b"})).worker.name == "b"
    with pytest.raises(NoWorker):
        await selector.select(prompt(), allowed=set())


async def test_ranks_receive_requests_and_are_reported(selector: Selector) -> None:
    await selector.upsert_worker("c", model="ranks", dp_size=2)
    ranks = set()
    for start in (0, 1000):
        held = await selector.reserve(Prompt(model="ranks", token_ids=range(start, start + 64)))
        ranks.add(held.selection.rank.target.dp_rank)
    assert ranks == {0, 1}
    assert [load.requests for load in selector.loads()["c"]] == [1, 1]


async def test_reservation_counts_until_its_release(selector: Selector) -> None:
    held = await selector.reserve(prompt(), id="r")
    load = selector.loads()[held.worker.name][0]
    assert (load.requests, load.pending, load.context) == (1, 64, 64)
    assert selector.reservation("r") is held
    held.first_token()
    assert selector.loads()[held.worker.name][0] == Load(1, 0, 64)
    held.release()
    held.release(failed=True)
    held.first_token()
    assert idle(selector)
    assert selector.reservation("r") is None


async def test_id_may_be_used_again_only_after_its_release(selector: Selector) -> None:
    held = await selector.reserve(prompt(), id="r")
    with pytest.raises(ValueError, match="'r' is held"):
        await selector.reserve(prompt(), id="r")
    held.release()
    (await selector.reserve(prompt(), id="r")).release()


async def test_prefill_ends_at_its_expected_time_without_a_report(selector: Selector) -> None:
    held = await selector.reserve(prompt())
    await until(lambda: selector.loads()[held.worker.name][0] == Load(1, 0, 64))
    held.release()


async def test_reservation_without_reports_expires_and_progress_renews_it(selector: Selector) -> None:
    silent, running = [await selector.reserve(prompt(), expiry=0.3) for _ in range(2)]
    async with asyncio.timeout(60):
        while not silent.ended:
            running.progress(1)
            await asyncio.sleep(0.02)
    assert not running.ended
    await until(lambda: running.ended)
    assert idle(selector)


async def test_removed_worker_ends_its_reservations(selector: Selector) -> None:
    held = await selector.reserve(prompt(), allowed={"a"})
    await selector.delete_worker("a")
    assert held.ended
    held.release()
    assert selector.workers() == ["b"]
    assert idle(selector)


async def test_full_fleet_is_saturated_and_a_wait_gets_the_freed_capacity() -> None:
    async with Selector({"admission": {"requests": 1}}) as selector:
        await selector.upsert_worker("a", model="m")
        held = await selector.reserve(prompt())
        with pytest.raises(Saturated) as refused:
            await selector.reserve(prompt())
        assert refused.value.retry_after > 0
        with pytest.raises(Saturated):
            await selector.reserve(prompt(), wait=0.01)
        waiting = asyncio.create_task(selector.reserve(prompt(), wait=10))
        await asyncio.sleep(0)
        held.release()
        (await waiting).release()
        assert idle(selector)


async def test_failures_eject_a_worker(selector: Selector) -> None:
    for _ in range(3):
        (await selector.reserve(prompt(), allowed={"a"})).release(failed=True)
    assert {(await selector.select(prompt(start=n * 1000))).worker.name for n in range(8)} == {"b"}


async def test_unknown_names_have_errors_of_their_own(selector: Selector) -> None:
    with pytest.raises(UnknownModel, match="other"):
        await selector.select(Prompt(model="other", token_ids=[1]))
    with pytest.raises(UnknownWorker, match="upsert_worker"):
        await selector.delete_worker("none")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"dp_size": 0}, "dp_size"),
        ({"streams": [Stream(1, "tcp://127.0.0.1:1")]}, "streams"),
        ({"streams": [Stream(0, "nowhere")]}, "streams: endpoint"),
        ({"url": "nowhere"}, "url"),
        ({"url": "http://127.0.0.1:1"}, "url: worker 'd'"),
        ({"block_size": 0}, "block_size"),
        ({"capacity": 0}, "capacity"),
        ({"weight": 0}, "weight"),
        ({"role": "none"}, "none"),
    ],
)
async def test_invalid_field_of_a_worker_is_named(selector: Selector, fields: dict[str, Any], field: str) -> None:
    await selector.upsert_worker("d", model="m", url="http://127.0.0.1:1")
    with pytest.raises(ValueError, match=field):
        await selector.upsert_worker("c", model="m", **fields)
    assert selector.workers() == ["a", "b", "d"]


async def test_text_without_a_tokenizer_says_what_to_send(selector: Selector) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    with pytest.raises(ValueError, match=r"Send token_ids, or set models\.m\.tokenizer"):
        await selector.reserve(Prompt(body=body))
    assert idle(selector)


async def test_a_prompt_has_ids_or_a_body() -> None:
    with pytest.raises(ValueError, match="token_ids and body"):
        Prompt(model="m")
    with pytest.raises(ValueError, match="model"):
        Prompt(token_ids=[1])


async def test_selectors_of_one_process_share_nothing(selector: Selector) -> None:
    async with Selector() as other:
        await other.upsert_worker("a", model="m")
        held = await other.reserve(prompt())
        assert idle(selector)
    assert held.ended


async def test_another_thread_reserves_and_releases(selector: Selector) -> None:
    def caller() -> None:
        held = asyncio.run_coroutine_threadsafe(selector.reserve(prompt()), selector.loop).result(10)
        held.first_token()
        held.release()

    thread = threading.Thread(target=caller)
    thread.start()
    await asyncio.to_thread(thread.join, 10)
    await until(lambda: idle(selector))


async def test_closing_ends_all_reservations() -> None:
    async with Selector() as selector:
        await selector.upsert_worker("a", model="m")
        held = await selector.reserve(prompt())
    assert held.ended


class _CancelledAt:
    """Runs a coroutine, and cancels it at its await number `number`, counted from 0."""

    def __init__(self, inner: Awaitable[Any], number: int) -> None:
        self._steps: Generator[Any, Any, Any] = inner.__await__()
        self._number = number
        self.cancelled = False

    def __await__(self) -> Generator[Any, Any, Any]:
        steps, count = self._steps, 0
        try:
            awaited = next(steps)
            while True:
                if count == self._number:
                    self.cancelled = True
                    steps.throw(asyncio.CancelledError())
                    raise AssertionError("a cancelled reservation continued")
                count += 1
                try:
                    result = yield awaited
                except BaseException as error:
                    awaited = steps.throw(error)
                else:
                    awaited = steps.send(result)
        except StopIteration as stop:
            return stop.value


async def test_cancellation_at_any_await_leaves_nothing_behind() -> None:
    async with Selector({"admission": {"requests": 1}}) as selector:
        await selector.upsert_worker("a", model="m")

        async def waits() -> None:
            """Wait for capacity, and hold it until the end."""
            async with await selector.reserve(prompt(), id="r", wait=10) as held:
                await asyncio.sleep(0)
                held.first_token()
                await asyncio.sleep(0)

        number, cancelled = 0, True
        while cancelled:
            first = await selector.reserve(prompt())
            asyncio.get_running_loop().call_later(0.01, first.release)
            run = _CancelledAt(waits(), number)

            async def await_it(run: _CancelledAt = run) -> None:
                await run

            task = asyncio.create_task(await_it())
            await asyncio.wait([task])
            cancelled = run.cancelled
            assert task.cancelled() is cancelled
            await until(lambda first=first: first.ended)  # type: ignore[misc]
            assert idle(selector)
            assert selector.reservation("r") is None
            number += 1
        assert number >= 4


async def test_cancellation_as_capacity_is_given_leaves_nothing_behind() -> None:
    async with Selector({"admission": {"requests": 1}}) as selector:
        await selector.upsert_worker("a", model="m")
        for steps in range(6):
            held = await selector.reserve(prompt())
            task = asyncio.create_task(selector.reserve(prompt(), wait=10))
            await asyncio.sleep(0)
            held.release()
            for _ in range(steps):
                await asyncio.sleep(0)
            if task.cancel():
                with pytest.raises(asyncio.CancelledError):
                    await task
            else:
                task.result().release()
            assert idle(selector)


class Reserving(RuleBasedStateMachine):
    """Any order of reservations, reports, releases and changes of workers keeps the load equal to what is held."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.selector = Selector()
        self.loop.run_until_complete(self.selector.__aenter__())
        self.held: dict[str, Any] = {}
        self.workers: set[str] = set()

    def teardown(self) -> None:
        self.loop.run_until_complete(self.selector.close())
        assert all(held.ended for held in self.held.values())
        self.loop.close()

    @rule(worker=st.sampled_from("abc"))
    def add(self, worker: str) -> None:
        self.loop.run_until_complete(self.selector.upsert_worker(worker, model="m"))
        self.workers.add(worker)

    @rule(worker=st.sampled_from("abc"))
    def remove(self, worker: str) -> None:
        if worker not in self.workers:
            return
        self.loop.run_until_complete(self.selector.delete_worker(worker))
        self.workers.discard(worker)
        assert all(held.ended for held in self.held.values() if held.worker.name == worker)

    @rule(id=st.sampled_from("123456"), start=st.integers(0, 3))
    def reserve(self, id: str, start: int) -> None:
        reserving = self.selector.reserve(prompt(start), id=id)
        if not self.workers:
            with pytest.raises((NoWorker, UnknownModel)):
                self.loop.run_until_complete(reserving)
        elif self.selector.reservation(id) is not None:
            with pytest.raises(ValueError, match="held"):
                self.loop.run_until_complete(reserving)
        else:
            self.held[id] = self.loop.run_until_complete(reserving)

    @rule(id=st.sampled_from("123456"), failed=st.booleans())
    def release(self, id: str, failed: bool) -> None:
        if id in self.held:
            self.loop.run_until_complete(self._call(lambda: self.held[id].release(cached_tokens=0, failed=failed)))
            assert self.held[id].ended

    @rule(id=st.sampled_from("123456"))
    def report(self, id: str) -> None:
        if id in self.held:
            self.loop.run_until_complete(self._call(self.held[id].first_token))
            self.loop.run_until_complete(self._call(lambda: self.held[id].progress(3)))

    @staticmethod
    async def _call(action: Callable[[], None]) -> None:
        action()

    @invariant()
    def load_is_what_is_held(self) -> None:
        running = [held.worker.name for held in self.held.values() if not held.ended]
        for worker, [load] in self.selector.loads().items():
            assert load.requests == running.count(worker)
            assert load.context == 64 * load.requests
            assert 0 <= load.pending <= load.context


TestReserving = Reserving.TestCase
TestReserving.settings = hypothesis_settings(max_examples=20, stateful_step_count=20, deadline=None)
