"""Fixtures: publishers of event streams like those of engines, and an indexer with its HTTP API."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import zmq
from engine_publisher import Publisher
from index_client import Client, served
from waiting import eventually

from indexer import Indexer, Target
from indexer.native import CORE_VARIABLE, CORES
from indexer.streams.reader import StreamStatus
from indexer.streams.sequence import SequenceSettings, StreamState

# Modules that run once: they use no index, or create one of each core themselves.
_ONCE = {"test_implementations", "test_inbox", "test_hashing", "test_sequence"}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test with each core, or with the one that its marker `core` names."""
    cores = CORES[-1:] if metafunc.module.__name__ in _ONCE else CORES
    if (only := metafunc.definition.get_closest_marker("core")) is not None:
        cores = only.args
    metafunc.parametrize("core", cores, indirect=True)


@pytest.fixture(autouse=True)
def core(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Core of the indexes that the test creates. State machines choose their core themselves."""
    core = str(getattr(request, "param", CORES[-1]))
    monkeypatch.setenv(CORE_VARIABLE, core)
    return core


@pytest.fixture
def publishers() -> Iterator[Callable[..., Publisher]]:
    """Function that creates publishers, which are closed after the test."""
    made: list[Publisher] = []
    with zmq.Context[zmq.Socket[bytes]]() as context:

        def make(topic: bytes = b"", hwm: int = 0) -> Publisher:
            made.append(Publisher(context, topic, hwm))
            return made[-1]

        yield make
        for publisher in made:
            publisher.close()


@pytest.fixture
def publisher(publishers: Callable[..., Publisher]) -> Publisher:
    return publishers()


@pytest.fixture
def indexer() -> Iterator[Indexer]:
    """Indexer with short deadlines, which `client` or `running` starts."""
    indexer = Indexer(sequence=SequenceSettings(replay_timeout=0.3, idle_check=1.0))
    yield indexer
    indexer.stop()


@pytest.fixture
def client(indexer: Indexer) -> Iterator[Client]:
    """Client of the HTTP API of the started indexer."""
    indexer.start()
    with served(indexer) as client:
        yield client


@pytest.fixture
def running(indexer: Indexer) -> Indexer:
    """Started indexer without an HTTP API."""
    indexer.start()
    return indexer


@pytest.fixture
def stream(indexer: Indexer) -> Callable[[Target], StreamStatus]:
    """Function that returns the status of a target's stream, once the target has one."""

    def status(target: Target) -> StreamStatus:
        eventually(lambda: (report := indexer.report(target)) is not None and report.stream is not None)
        report = indexer.report(target)
        assert report is not None
        assert report.stream is not None
        return report.stream

    return status


@pytest.fixture
def caught_up(stream: Callable[[Target], StreamStatus]) -> Callable[..., None]:
    """Function that waits until a target's last applied batch is `seq` and its stream is in `state`, if given."""

    def wait(target: Target, seq: int | None, state: StreamState | None = None) -> None:
        eventually(lambda: (status := stream(target)).last_seq == seq and state in (None, status.state))

    return wait
