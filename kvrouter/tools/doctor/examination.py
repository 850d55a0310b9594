"""The examination of one worker, from its address to the match of a prompt that it has just computed.

Each step needs the previous ones, so that only the first cause is reported and not its consequences.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack, suppress
from itertools import pairwise
from typing import Any

import aiohttp

from indexer import Indexer, MatchQuery, Registration, Target
from kvevents import BlockStored
from kvevents.curve import KeyPair
from kvrouter.tools.doctor.findings import Finding
from kvrouter.tools.doctor.pools import SharedPrompt, used_pool
from kvrouter.tools.doctor.probes import (
    STREAMED_TOKENS,
    NewPrompt,
    RequestRefusedError,
    Worker,
    difference,
    new_prompt,
    stored,
)
from kvrouter.tools.doctor.stream import NoPublisherError, UnreachableError, WatchedStream
from router.apis.requests import ChatPrompt, TextPrompts
from router.fleet import worker as fleet
from router.fleet.discovery import DiscoveryError, Engine, RefusedKeyError, WorkerDescription, describe_worker
from router.fleet.event_streams import listens_elsewhere
from router.http.client import connection_problem
from router.settings import FleetSettings, Role, WorkerSettings
from router.tokens.permission import ids_sent_to
from router.tokens.tokenizer_source import TokenizerSource
from router.tokens.tokenizers import Tokenizers

CLOCK_TOLERANCE = 5.0
_UNKNOWN_BLOCK_SIZE = 64
# A buffered stream arrives in a few reads at its end. A shorter stream allows no conclusion.
_SHORTEST_STREAM = 0.05
_LATE_STREAMS = 3  # late streams until buffering is reported, because a busy worker may stutter
_MOST_STREAMS = 8
_READS_AT_ONCE = 2  # reads of an unbuffered part and of the end
_INSTRUCTION = {"role": "system", "content": "Be brief."}


class Examination:
    """The examination of one worker. `findings` are its problems, `passed` the confirmed steps."""

    def __init__(
        self,
        settings: WorkerSettings,
        session: aiohttp.ClientSession,
        indexer: Indexer,
        tokenizers: Tokenizers,
        source: TokenizerSource,
        keys: KeyPair | None,
        fleet_settings: FleetSettings,
        patience: float,
        shared: SharedPrompt | None = None,
    ) -> None:
        self.url = str(settings.url).rstrip("/")
        self.name = settings.name or self.url
        self._fleet_settings = fleet_settings
        self.findings: list[Finding] = []
        self.passed: list[str] = []
        self._settings = settings
        self._session = session
        self._indexer = indexer
        self._tokenizers = tokenizers
        self._source = source
        self._keys = keys
        self._patience = patience
        self._shared = shared

    async def run(self) -> None:
        """Run all steps."""
        examined = fleet.Worker(self._settings, problem=None)
        examined.key.apply(self.name, self._settings, self._fleet_settings)
        deadline = self._fleet_settings.probe_timeout
        try:
            async with asyncio.timeout(deadline):
                described = await describe_worker(self._session, self._settings, examined.key)
        except RefusedKeyError as error:
            self._found("worker_key", str(error))
            return
        except (DiscoveryError, TimeoutError) as error:
            self._found("worker_down", str(error) or f"no answer within {deadline} s")
            return
        models = described.base_models()
        if examined.role_with(described) is Role.ENCODE:
            self.passed.append(f"answers, and encodes media ({described.engine})")
            return
        if not models:
            self._found("no_models", f"{self.url}/v1/models lists no model")
            return
        model = models[0].model
        self.passed.append(f"answers, and serves {model} ({described.engine})")
        examined.describe(described)
        await self._source.provide(examined, models[0])
        await self._source.settled()
        self._examine_tokenizer(model)
        worker = Worker(self._session, self.url, model, examined.key.headers)
        try:
            if await self._caches(worker, described):
                await self._examine_streams(worker, described, model)
            await self._examine_streaming(worker)
            if examined.key.problem is not None:  # it was requested in the background
                self._found("worker_key", examined.key.problem)
        except RequestRefusedError as error:
            about_key = examined.key.refuses(error.status)
            self._found("worker_key" if about_key else "requests_refused", str(error))
        except (aiohttp.ClientError, TimeoutError) as error:
            self._found("requests_refused", f"a request failed: {connection_problem(error)}")

    def _examine_tokenizer(self, model: str) -> None:
        report = self._source.report().get(model)
        if report is None:
            return
        for found in self._source.findings():
            if found["model"] == model:
                self._found(found["finding"], found["detail"])
        self.passed.append(f"prompts become tokens: {tokenizer_line(report)}")

    async def _caches(self, worker: Worker, described: WorkerDescription) -> bool:
        """Return whether a repeated prompt is cached, as far as the worker reports it."""
        text = _unused_text(worker, described)
        await worker.complete(text, described.ranks[0])
        cached = await worker.complete(text, described.ranks[0])
        if cached == 0:
            evidence = "a prompt of several blocks was sent twice, and none of it was cached the second time"
            self._found("prefix_caching_off", evidence)
            return False
        if cached is None and (path := await worker.switched_off()):
            self._found("prefix_caching_off", f"GET {path} says so")
            return False
        if cached:
            self.passed.append(f"caches prefixes: {cached} tokens of a repeated prompt")
        return True

    async def _examine_streams(self, worker: Worker, described: WorkerDescription, model: str) -> None:
        if not described.streams:
            if described.engine is not Engine.OTHER:
                self._found("events_off", f"{described.engine} reports that it publishes no events")
            else:
                self._found("events_off", "neither the worker nor the settings name its event streams")
            return
        async with AsyncExitStack() as stack:
            watched = []
            for source in described.streams:
                stream = WatchedStream(source, self._keys)
                stack.push_async_callback(stream.close)
                if await self._connected(stream):
                    watched.append(stream)
            for stream in watched:
                rank = stream.source.dp_rank
                target = Target(self.url, rank, model)
                self._indexer.register(Registration(target, stream.source, described.engine, described.block_size))
                stack.callback(self._indexer.unregister, [target])
            for stream in watched:
                await self._examine_stream(worker, described, model, stream, watched)
            pool = next((each for each in self._indexer.pools if each.serves(Target(self.url, 0, model))), None)
            name = "" if pool is None else pool.config.name
            if pool is None:
                proposed = await used_pool(worker, [event for each in watched for event in each.received.stored()])
                if proposed is not None:
                    self._found("pool_missing", f"uses a shared pool that the settings lack: {proposed}")
                    name = proposed
            if self._shared is not None and watched and (name or self._shared.pulls):
                await self._send_shared(self._shared, worker, model, name, watched)

    async def _send_shared(
        self, shared: SharedPrompt, worker: Worker, model: str, pool: str, streams: list[WatchedStream]
    ) -> None:
        """Send the prompt of all workers, and record the hashes of first blocks that the worker reports."""
        before = shared.record(self.name, model, pool, streams)
        stream, deadline = streams[0], time.monotonic() + self._patience
        await worker.complete(shared.text, stream.source.dp_rank)
        while True:
            stream.arrived.clear()
            left = deadline - time.monotonic()
            if shared.record(self.name, model, pool, streams) > before or left <= 0:
                return
            with suppress(TimeoutError):
                await asyncio.wait_for(stream.arrived.wait(), left)

    async def _connected(self, stream: WatchedStream) -> bool:
        rank, source = stream.source.dp_rank, stream.source
        try:
            await stream.connect()
        except UnreachableError as error:
            elsewhere = listens_elsewhere(self.url, source.endpoint)
            self._found("endpoint_unreachable", f"{error}{elsewhere}", rank)
            return False
        except NoPublisherError as error:
            self._found("no_publisher", str(error), rank)
            return False
        self.passed.append(f"rank {rank}: connected to {source.endpoint}")
        return True

    async def _examine_stream(
        self,
        worker: Worker,
        described: WorkerDescription,
        model: str,
        stream: WatchedStream,
        all_streams: list[WatchedStream],
    ) -> None:
        rank, received = stream.source.dp_rank, stream.received
        found_before = len(self.findings)
        for _ in range(2):  # the first may have been published before the subscription
            text, another = (_unused_text(worker, described) for _ in range(2))
            expected = await new_prompt(self._tokenizers, model, TextPrompts([text]), TextPrompts([another]))
            await worker.complete(text, rank)
            # Engines that ignore the rank header choose a rank themselves.
            event = await self._stored_on(all_streams, expected)
            if any(each.received.topics for each in all_streams):
                break
        if not any(each.received.topics for each in all_streams):
            evidence = (
                f"connected to {stream.source.endpoint}; the worker computed a new prompt, and nothing was published"
            )
            self._found("stream_silent", evidence, rank)
            return
        if not received.topics:
            self.passed.append(f"rank {rank}: its prompt was computed by another rank")
            return
        self._examine_reading(stream)
        if len(self.findings) > found_before:
            return
        if event is None and expected is not None:
            evidence = f"a new prompt was sent: {difference(expected.token_ids, received.stored())}"
            self._found("tokens_differ", evidence, rank)
            return
        if event is not None:
            self._examine_stored(event, described, rank)
        await self._examine_chat(worker, model, stream, all_streams, described)
        self._examine_order(stream)
        await self._examine_replay(stream)
        if expected is not None and len(self.findings) == found_before:
            await self._examine_match(Target(self.url, rank, model), expected.token_ids)

    async def _stored_on(self, streams: list[WatchedStream], prompt: NewPrompt | None) -> BlockStored | None:
        """Return the event that stores a prompt, if it arrives in time. For unknown tokens, wait for any event."""
        deadline = time.monotonic() + self._patience
        while True:
            for stream in streams:
                stream.arrived.clear()
                if prompt is None and stream.received.topics:
                    return None
                if prompt is not None and (found := stored(prompt, stream.received.stored())):
                    return found
            waiting = [asyncio.create_task(stream.arrived.wait()) for stream in streams]
            try:
                left = max(deadline - time.monotonic(), 0)
                done, _ = await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in waiting:
                    task.cancel()
                await asyncio.gather(*waiting, return_exceptions=True)
            if not done:
                return None

    def _examine_reading(self, stream: WatchedStream) -> None:
        rank, received, topic = stream.source.dp_rank, stream.received, stream.source.topic
        if not any(published.startswith(topic) for published in received.topics):
            names = ", ".join(sorted(map(repr, received.topics)))
            self._found("topic_mismatch", f"subscribed to {topic!r}; the engine publishes under {names}", rank)
        elif received.unreadable:
            self._found("events_unreadable", received.unreadable[0], rank)
        elif any(event.block_hashes and not event.token_ids for event in received.stored()):
            self._found("events_without_tokens", "BlockStored events have no token_ids", rank)

    def _examine_stored(self, event: BlockStored, described: WorkerDescription, rank: int) -> None:
        if self._settings.block_size not in (None, event.block_size):
            evidence = f"the settings have {described.block_size} tokens, the engine's events {event.block_size}"
            self._found("block_size", evidence, rank)
        keys = event.extra_keys[0] if event.extra_keys else None
        if event.lora_name is not None or event.lora_id is not None:
            name = event.lora_name or event.lora_id
            self._found("adapter", f"a prompt for the base model was computed with the adapter {name!r}", rank)
        elif keys or event.cache_salt:
            self._found("salt", "a prompt sent without a salt was stored with one", rank)

    async def _examine_chat(
        self,
        worker: Worker,
        model: str,
        stream: WatchedStream,
        all_streams: list[WatchedStream],
        described: WorkerDescription,
    ) -> None:
        texts = [_unused_text(worker, described) for _ in range(2)]
        messages, others = ([_INSTRUCTION, {"role": "user", "content": text}] for text in texts)
        expected = await new_prompt(self._tokenizers, model, ChatPrompt(messages), ChatPrompt(others))
        if expected is None:
            return
        rank = stream.source.dp_rank
        try:
            await worker.chat(messages, rank)
        except RequestRefusedError:
            return  # a model without a chat template
        if await self._stored_on(all_streams, expected) is None:
            evidence = f"a new conversation was sent: {difference(expected.token_ids, stream.received.stored())}"
            self._found("chat_template", evidence, rank)
        else:
            self.passed.append(f"rank {rank}: prompts and conversations have the engine's tokens")

    def _examine_order(self, stream: WatchedStream) -> None:
        rank, batches = stream.source.dp_rank, stream.received.batches
        for (before, _, _), (after, _, _) in pairwise(batches):
            if after != before + 1:
                what = "batches are missing" if after > before else "two publishers, or a restarted one"
                self._found("sequence", f"number {after} followed {before}: {what}", rank)
                break
        ahead = min((batch.ts - arrived for _, arrived, batch in batches), key=abs, default=0.0)
        if abs(ahead) > CLOCK_TOLERANCE:
            side = "ahead of" if ahead > 0 else "behind"
            self._found("clock", f"the engine's clock is {abs(ahead):.0f} s {side} this one", rank)

    async def _examine_replay(self, stream: WatchedStream) -> None:
        rank = stream.source.dp_rank
        if stream.source.replay_endpoint is None:
            self._found("replay_missing", "the stream has no replay endpoint", rank)
            return
        try:
            batches = await stream.replayed()
        except (UnreachableError, NoPublisherError) as error:
            self._found("replay_silent", str(error), rank)
            return
        self.passed.append(f"rank {rank}: {batches} batches can be replayed")

    async def _examine_match(self, target: Target, token_ids: list[int]) -> None:
        query = MatchQuery(target.model, token_ids)
        deadline = time.monotonic() + self._patience
        while not (matched := max((m.matched_tokens for m in self._indexer.match(query)), default=0)):
            if time.monotonic() > deadline:
                evidence = f"a prompt of {len(token_ids)} tokens was computed and reported, but is not found"
                self._found("not_matched", evidence, target.dp_rank)
                return
            await asyncio.sleep(0.05)
        self.passed.append(f"rank {target.dp_rank}: {matched} of {len(token_ids)} tokens of a prompt are found")

    async def _examine_streaming(self, worker: Worker) -> None:
        """Check that tokens are streamed: the first token of a long answer arrives long before the last."""
        text = worker.unused_text(1)
        await worker.stream(text, 1)
        late = 0
        for _ in range(_MOST_STREAMS):
            one, many = await worker.stream(text, 1), await worker.stream(text, STREAMED_TOKENS)
            if many.whole < _SHORTEST_STREAM:
                return
            if one.whole > many.whole / 2:
                continue  # one token is as slow as many: the cause is another one
            if many.reads > _READS_AT_ONCE and many.first_byte < (one.whole + many.whole) / 2:
                first = f"the first of {STREAMED_TOKENS} tokens after {many.first_byte * 1000:.0f} ms"
                self.passed.append(f"streams: {first}, the last after {many.whole * 1000:.0f} ms")
                return
            late += 1
            if late == _LATE_STREAMS:
                evidence = (
                    f"{STREAMED_TOKENS} tokens lasted {many.whole * 1000:.0f} ms and the first arrived after "
                    f"{many.first_byte * 1000:.0f} ms, although one alone needs {one.whole * 1000:.0f} ms"
                )
                self._found("stream_buffered", evidence)
                return

    def _found(self, cause: str, evidence: str, dp_rank: int | None = None) -> None:
        self.findings.append(Finding(cause, self.name, evidence, dp_rank))


def tokenizer_line(report: dict[str, Any]) -> str:
    """Describe how a model's prompts become tokens, by the report of its tokenizer."""
    probes = report.get("probes", {})
    exact = sum(route == "local" for route in probes.values())
    source = "not at all, they are routed by their text alone" if report["source"] == "text" else report["source"]
    reading = f", by {report['reading']}" if report.get("reading") else ""
    compared = f"; {exact} of {len(probes)} probes have the engine's tokens" if exact else ""
    sent = f"; {ids_sent_to(report['ids_not_sent'])}" if "ids_not_sent" in report else ""
    return f"{source}{reading}{compared}{sent}"


def _unused_text(worker: Worker, described: WorkerDescription) -> str:
    """Return a text of several blocks that is in no cache."""
    return worker.unused_text(described.block_size or _UNKNOWN_BLOCK_SIZE)
