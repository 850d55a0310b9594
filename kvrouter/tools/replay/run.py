"""The two ways to replay a recording: publish it to subscribers, or check an indexer with it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from rich.console import Console

from kvrouter.processes import stop_signal
from kvrouter.tools.replay.check import (
    TIMEOUT_S,
    IndexClient,
    Score,
    check_indexer,
    endpoints_table,
    mismatch_lines,
    registered,
    score_table,
)
from kvrouter.tools.replay.expected_matches import UnusableRequestsError, base_model, load_requests, requests_beside
from kvrouter.tools.replay.publication import Pace, Publication, Recording, load_recording
from router.http.client import refuse_redirects


@dataclass(frozen=True, slots=True)
class Place:
    """The address to bind: source n at `port + 2n`, its replays at the next port. Port 0 binds free ones."""

    host: str = "127.0.0.1"
    port: int = 0


@dataclass(frozen=True, slots=True)
class IndexerAddress:
    """The URL of an indexer, and its token for registrations, if it needs one."""

    url: str
    token: str = ""


async def publish_recording(
    path: Path, place: Place, speed: float | None, indexer: IndexerAddress | None, model: str | None
) -> None:
    """Publish a recording, then answer replays until SIGINT or SIGTERM.

    Raises as `load_recording` does, OSError for the address, and IndexerError.
    """
    recording = load_recording(path)
    console = Console(highlight=False, soft_wrap=True)
    async with AsyncExitStack() as stack:
        stopped = stack.enter_context(stop_signal())
        publication = await stack.enter_async_context(Publication(recording, place.host, place.port))
        console.print(endpoints_table(publication))
        if indexer is not None:
            session = await stack.enter_async_context(_session(indexer))
            client = IndexClient(session, indexer.url)
            name = model or _model_beside(path, recording)
            await stack.enter_async_context(registered(client, recording, publication, name))
            console.print(f"registered at {indexer.url} as model {name!r}")
        publishing = asyncio.create_task(_publish_all(publication, recording, speed))
        stopping = asyncio.create_task(stopped.wait())
        try:
            await asyncio.wait((publishing, stopping), return_when=asyncio.FIRST_COMPLETED)
            if publishing.done():
                publishing.result()
                console.print(f"published {len(recording.messages)} batches; replays are answered until Ctrl-C")
                await stopping
        finally:
            publishing.cancel()
            stopping.cancel()
            await asyncio.gather(publishing, stopping, return_exceptions=True)


async def check_recordings(
    paths: Sequence[Path],
    requests: Path | None,
    place: Place,
    speed: float | None,
    indexer: IndexerAddress,
    model: str | None,
    verbose: bool,
) -> list[Score]:
    """Check an indexer with each recording in turn, and print the scores.

    `requests` are those of a single recording. Raises as `publish_recording` does, and UnusableRequestsError.
    """
    console = Console(highlight=False, soft_wrap=True)
    scores: list[Score] = []
    async with _session(indexer) as session:
        client = IndexClient(session, indexer.url)
        for path in paths:
            recording = load_recording(path)
            answered = load_requests(requests or requests_beside(path))
            name = model or base_model(answered, recording.adapters) or recording.name
            async with Publication(recording, place.host, place.port) as publication:
                scores.append(await check_indexer(client, recording, answered, publication, name, speed))
            if verbose:
                for line in mismatch_lines(scores[-1]):
                    console.print(line)
    console.print(score_table(scores))
    return scores


async def _publish_all(publication: Publication, recording: Recording, speed: float | None) -> None:
    pace = Pace(recording.started_at, speed)
    for message in recording.messages:
        await pace.wait_for(message.received_at)
        await publication.publish(message)


def _model_beside(path: Path, recording: Recording) -> str:
    try:
        requests = load_requests(requests_beside(path))
    except UnusableRequestsError:
        return recording.name
    return base_model(requests, recording.adapters) or recording.name


def _session(indexer: IndexerAddress) -> aiohttp.ClientSession:
    headers = {"Authorization": f"Bearer {indexer.token}"} if indexer.token else None
    return aiohttp.ClientSession(
        middlewares=(refuse_redirects,), headers=headers, timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)
    )
