"""The check of an index against recordings, and its report."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.table import Column, Table

from kvrouter.tools.replay.expected_matches import AnsweredRequest, StoredPrefixes
from kvrouter.tools.replay.index_client import IndexClient, IndexerError, RankName, registered
from kvrouter.tools.replay.publication import Pace, Publication
from kvrouter.tools.replay.recorded import LiveMessage, Recording

READ_TIMEOUT_S = 10.0  # seconds for the indexer to read the published batches
SETTLED_S = 0.1  # seconds without a change after which an answer is final
SETTLE_TIMEOUT_S = 2.0
_POLL_S = 0.002


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
