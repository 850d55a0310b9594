"""The check of an index against recordings: its client, the comparison, and the report."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
from rich.table import Column, Table

from kvevents.decoding import read_json
from kvrouter.tools.replay.expected_matches import AnsweredRequest, StoredPrefixes
from kvrouter.tools.replay.publication import SUBSCRIBE_TIMEOUT_S, LiveMessage, Pace, Publication, Recording

TIMEOUT_S = 10.0
TENANT = "default"
READ_TIMEOUT_S = 10.0  # seconds for the indexer to read the published batches
SETTLED_S = 0.1  # seconds without a change after which an answer is final
SETTLE_TIMEOUT_S = 2.0
_POLL_S = 0.002


class IndexerError(Exception):
    """An indexer that is unreachable, refuses, or sends an unreadable answer."""


@dataclass(frozen=True, slots=True)
class RankName:
    """The name of a DP rank at an indexer."""

    instance: str
    dp_rank: int


class _Rank(msgspec.Struct):
    dp_rank: int
    last_seq: int | msgspec.UnsetType | None = msgspec.UNSET


class _Worker(msgspec.Struct):
    worker: str
    ranks: list[_Rank] = []


class _Workers(msgspec.Struct):
    workers: list[_Worker]


class _Instance(msgspec.Struct):
    longest_matched: int = 0
    by_rank: dict[str, int] | None = msgspec.field(name="DP", default=None)


class IndexClient:
    """A client of one indexer. All methods raise IndexerError."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url.rstrip("/")

    async def register(
        self, rank: RankName, model: str, block_size: int | None, engine: str, endpoint: str, replay: str, topic: str
    ) -> None:
        """Register a stream, which the indexer then follows."""
        body = {
            "endpoint": endpoint,
            "replay_endpoint": replay,
            "type": engine,
            "modelname": model,
            "tenant_id": TENANT,
            "instance_id": rank.instance,
            "dp_rank": rank.dp_rank,
            "topic": topic,
        }
        await self._post("/register", body if block_size is None else body | {"block_size": block_size})

    async def unregister(self, rank: RankName, model: str) -> None:
        """Unregister a stream."""
        body = {"instance_id": rank.instance, "modelname": model, "dp_rank": rank.dp_rank, "tenant_id": TENANT}
        await self._post("/unregister", body)

    async def matched(
        self, ranks: list[RankName], model: str, token_ids: list[int], adapter: str | None, cache_salt: str | None
    ) -> list[int]:
        """Return the number of tokens that each rank holds; 0 for a rank that is not in the answer."""
        body: dict[str, Any] = {"model": model, "token_ids": token_ids, "tenant_id": TENANT}
        optional = {"lora_name": adapter, "cache_salt": cache_salt}
        answer = await self._post("/query", body | {name: value for name, value in optional.items() if value})
        try:
            tenants = read_json(answer, dict[str, dict[str, _Instance]])
        except msgspec.DecodeError as error:
            raise IndexerError(f"{self._url}/query sent an unreadable answer: {error}") from error
        instances = tenants.get(TENANT, {})
        return [_matched(instances.get(rank.instance, _Instance()), rank.dp_rank) for rank in ranks]

    async def last_seqs(self) -> dict[RankName, int | None] | None:
        """Return the last sequence number read from each stream; `None` if the indexer has no `/workers`."""
        try:
            async with self._session.get(f"{self._url}/workers") as response:
                if response.status != 200:
                    return None
                workers = read_json(await response.read(), _Workers).workers
        except msgspec.DecodeError:
            return None
        except (aiohttp.ClientError, TimeoutError) as error:
            raise IndexerError(f"{self._url} cannot be reached: {error or type(error).__name__}") from error
        return {
            RankName(worker.worker, rank.dp_rank): rank.last_seq
            for worker in workers
            for rank in worker.ranks
            if rank.last_seq is not msgspec.UNSET
        }

    async def _post(self, path: str, body: dict[str, Any]) -> bytes:
        try:
            async with self._session.post(self._url + path, json=body) as response:
                answer = await response.read()
                if response.status >= 300:
                    reason = answer[:500].decode(errors="replace")
                    raise IndexerError(f"{self._url}{path} answers {response.status}: {reason}")
                return answer
        except (aiohttp.ClientError, ValueError, TimeoutError) as error:
            raise IndexerError(f"{self._url} cannot be reached: {error or type(error).__name__}") from error


def _matched(instance: _Instance, dp_rank: int) -> int:
    if instance.by_rank is None:
        return instance.longest_matched
    return instance.by_rank.get(str(dp_rank), 0)


@asynccontextmanager
async def registered(
    client: IndexClient, recording: Recording, publication: Publication, model: str
) -> AsyncIterator[dict[int, RankName]]:
    """Register every source until the end of the block, and yield its name by source number. Raises IndexerError."""
    names = {
        number: RankName(f"{recording.name}/{source.worker}", source.dp_rank)
        for number, source in recording.sources.items()
    }
    try:
        for number, source in recording.sources.items():
            published = publication.sources[number]
            endpoints = published.endpoint, published.replay_endpoint, source.topic.decode(errors="replace")
            await client.register(names[number], model, source.block_size, source.engine, *endpoints)
        for published in publication.sources.values():
            try:
                await published.subscribed()
            except TimeoutError:
                raise IndexerError(
                    f"the indexer did not subscribe to {published.endpoint} within {SUBSCRIBE_TIMEOUT_S:g} s"
                ) from None
        yield names
    finally:
        for name in names.values():
            with suppress(IndexerError):  # the indexer may have ended, or never registered a source
                await asyncio.shield(client.unregister(name, model))


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A request with differing answers, in tokens by source. `ghosts` exceed all blocks stored since their start."""

    request: AnsweredRequest
    answers: dict[int, int]
    ghosts: frozenset[int]
    wrong: bool


@dataclass(slots=True)
class Score:
    """The number of a recording's requests that were answered as the engine did."""

    recording: str
    requests: int = 0
    right: int = 0
    seconds: float = 0.0
    mismatches: list[Mismatch] = field(default_factory=list)

    @property
    def ghosts(self) -> int:
        """The number of requests with a match that no engine can hold."""
        return sum(bool(mismatch.ghosts) for mismatch in self.mismatches)


async def check_indexer(
    client: IndexClient,
    recording: Recording,
    requests: Sequence[AnsweredRequest],
    publication: Publication,
    model: str,
    speed: float | None,
) -> Score:
    """Publish a recording up to each request's start, query the indexer for its prompt, and compare.

    Raises IndexerError, also if the indexer does not read the published batches in time.
    """
    async with registered(client, recording, publication, model) as names:
        check = _Check(client, recording, publication, model, names)
        await check.find_progress_report()
        pace = Pace(min(recording.started_at, requests[0].t_start), speed)
        started = time.monotonic()
        position = 0
        for request in requests:
            while position < len(recording.messages) and recording.messages[position].received_at < request.t_start:
                await pace.wait_for(recording.messages[position].received_at)
                await check.publish(recording.messages[position])
                position += 1
            await pace.wait_for(request.t_start)
            await check.ask(request)
        check.score.seconds = time.monotonic() - started
        return check.score


class _Check:
    def __init__(
        self,
        client: IndexClient,
        recording: Recording,
        publication: Publication,
        model: str,
        names: dict[int, RankName],
    ) -> None:
        self.score = Score(recording.name)
        self._client = client
        self._recording = recording
        self._publication = publication
        self._model = model
        self._names = names
        self._stored = {number: StoredPrefixes() for number in recording.sources}
        self._lives = dict.fromkeys(recording.sources, 0)
        self._reports_last_seq = False
        for number, source in recording.sources.items():
            for batch in source.batches_before():
                self._stored[number].apply(batch)

    async def find_progress_report(self) -> None:
        """Find out whether the indexer reports how far it has read."""
        known = await self._client.last_seqs()
        self._reports_last_seq = known is not None and set(self._names.values()) <= set(known)

    async def publish(self, message: LiveMessage) -> None:
        await self._publication.publish(message)
        stored = self._stored[message.source]
        if message.life != self._lives[message.source]:
            self._lives[message.source] = message.life
            stored.restart()
        if (batch := message.batch()) is not None:
            stored.apply(batch)

    async def ask(self, request: AnsweredRequest) -> None:
        """Query a request once all batches are read, and add the answers to the score."""
        asked = self._asked(request)
        if not asked:
            raise IndexerError(f"request {request.i}: worker {request.worker}, rank {request.dp_rank} is not recorded")
        if self._reports_last_seq:
            await self._wait_until_read()
        answers = await self._settled(request, asked)
        ghosts = frozenset(n for n, tokens in answers.items() if tokens > self._longest_stored(n, request))
        wrong = request.cached_tokens not in answers.values()
        self.score.requests += 1
        self.score.right += not wrong
        if wrong or ghosts:
            self.score.mismatches.append(Mismatch(request, answers, ghosts, wrong))

    def _asked(self, request: AnsweredRequest) -> list[int]:
        """Return the sources that may have answered: one, or all of the worker if the engine chose the rank."""
        return [
            number
            for number, source in self._recording.sources.items()
            if source.worker == request.worker and request.dp_rank in (None, source.dp_rank)
        ]

    async def _wait_until_read(self) -> None:
        expected = {
            self._names[number]: source.last_seq
            for number, source in self._publication.sources.items()
            if source.last_seq is not None
        }
        deadline = time.monotonic() + READ_TIMEOUT_S
        while True:
            known = await self._client.last_seqs() or {}
            behind = {name: seq for name, seq in expected.items() if known.get(name) != seq}
            if not behind:
                return
            if time.monotonic() > deadline:
                name, seq = next(iter(behind.items()))
                raise IndexerError(
                    f"the indexer has not read batch {seq} of {name.instance}, rank {name.dp_rank}, "
                    f"{READ_TIMEOUT_S:g} s after it was published: its last_seq is {known.get(name)}"
                )
            await asyncio.sleep(_POLL_S)

    async def _settled(self, request: AnsweredRequest, asked: list[int]) -> dict[int, int]:
        """Return the indexer's final answer by source.

        A wrong answer is final if it does not change. If the indexer does not report its progress, so is any
        answer.
        """
        answers = await self._answers(request, asked)
        unchanged_since = time.monotonic()
        deadline = unchanged_since + SETTLE_TIMEOUT_S
        while not (self._reports_last_seq and request.cached_tokens in answers.values()):
            now = time.monotonic()
            if now - unchanged_since > SETTLED_S or now > deadline:
                break
            await asyncio.sleep(_POLL_S)
            latest = await self._answers(request, asked)
            if latest != answers:
                answers, unchanged_since = latest, time.monotonic()
        return answers

    async def _answers(self, request: AnsweredRequest, asked: list[int]) -> dict[int, int]:
        adapter, salt = self._identity(request)
        ranks = [self._names[number] for number in asked]
        tokens = request.prompt_token_ids[:-1]  # the last token is always computed
        matched = await self._client.matched(ranks, self._model, tokens, adapter, salt)
        return dict(zip(asked, matched, strict=True))

    def _longest_stored(self, number: int, request: AnsweredRequest) -> int:
        block_size = self._recording.sources[number].block_size
        if block_size is None:
            return 0
        adapter, salt = self._identity(request)
        return self._stored[number].longest(request.prompt_token_ids[:-1], adapter, salt, block_size)

    def _identity(self, request: AnsweredRequest) -> tuple[str | None, str | None]:
        return (request.model if request.model not in ("", self._model) else None), request.cache_salt


def endpoints_table(publication: Publication) -> Table:
    """Return a table of the endpoints of a recording's sources."""
    table = Table("source", "worker", "rank", "endpoint", "replay endpoint", "topic", box=None)
    for number, published in publication.sources.items():
        source = published.source
        topic = source.topic.decode(errors="replace")
        place = (str(number), str(source.worker), str(source.dp_rank))
        table.add_row(*place, published.endpoint, published.replay_endpoint, topic)
    return table


def score_table(scores: Sequence[Score]) -> Table:
    """Return a table with a line for each recording."""
    table = Table(Column("recording", overflow="fold"), box=None)
    for name in ("as the engine", "ghosts", "seconds"):
        table.add_column(name, justify="right")
    for score in scores:
        figures = (f"{score.right}/{score.requests}", str(score.ghosts), f"{score.seconds:.1f}")
        table.add_row(score.recording, *figures)
    return table


def mismatch_lines(score: Score) -> list[str]:
    """Return a line for each request that the indexer answered differently."""
    return [f"{score.recording}: {_line(mismatch)}" for mismatch in score.mismatches]


def _line(mismatch: Mismatch) -> str:
    request = mismatch.request
    answers = ", ".join(
        f"source {number}: {tokens}{' (ghost)' if number in mismatch.ghosts else ''}"
        for number, tokens in mismatch.answers.items()
    )
    prompt = len(request.prompt_token_ids)
    return f"request {request.i}, {prompt} tokens: the engine has {request.cached_tokens}, the indexer {answers}"
