"""A publisher of event streams as an engine has it, and an indexer served over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import zmq
from engine_publisher import Publisher, eventually
from index_client import Client, served

from indexer import Indexer, Target
from indexer.native import CORE_VARIABLE, CORES
from indexer.streams.reader import StreamStatus
from indexer.streams.sequence import SequenceSettings, StreamState

# These have no index, or one of each core.
_ONCE = {"test_implementations", "test_inbox", "test_hashing", "test_sequence"}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each test is of both cores."""
    metafunc.parametrize("core", CORES[-1:] if metafunc.module.__name__ in _ONCE else CORES, indirect=True)


@pytest.fixture(autouse=True)
def core(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The core of a test; those of unittest choose their own."""
    core = str(getattr(request, "param", CORES[-1]))
    monkeypatch.setenv(CORE_VARIABLE, core)
    return core


@pytest.fixture
def publishers() -> Iterator[Callable[..., Publisher]]:
    """Makes publishers that are closed at the end."""
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
    """An indexer with short deadlines; `client` or `running` starts it."""
    indexer = Indexer(sequence=SequenceSettings(replay_timeout=0.3, idle_check=1.0))
    yield indexer
    indexer.stop()


@pytest.fixture
def client(indexer: Indexer) -> Iterator[Client]:
    """A client of the indexer's HTTP API."""
    indexer.start()
    with served(indexer) as client:
        yield client


@pytest.fixture
def running(indexer: Indexer) -> Indexer:
    """The indexer on its own, started."""
    indexer.start()
    return indexer


@pytest.fixture
def stream(indexer: Indexer) -> Callable[[Target], StreamStatus]:
    """How the stream of a target stands."""

    def status(target: Target) -> StreamStatus:
        eventually(lambda: (report := indexer.report(target)) is not None and report.stream is not None)
        report = indexer.report(target)
        assert report is not None
        assert report.stream is not None
        return report.stream

    return status


@pytest.fixture
def caught_up(stream: Callable[[Target], StreamStatus]) -> Callable[..., None]:
    """Waits until a target has applied a batch, and its stream is in a state if one is given."""

    def wait(target: Target, seq: int | None, state: StreamState | None = None) -> None:
        eventually(lambda: (status := stream(target)).last_seq == seq and state in (None, status.state))

    return wait
