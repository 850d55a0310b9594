"""A recording as streams to publish: each source's worker and rank, its messages, and their times."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvevents import BlockStored, EventBatch, MalformedBatchError, decode_batch
from kvevents.events import identity_of
from kvevents.frames import MalformedFrameError, parse_live, parse_replay
from kvevents.recording import Channel, Record, TornRecordingError, read_recording


class UnusableRecordingError(ValueError):
    """A file without streams to publish."""


@dataclass(slots=True)
class Life:
    """One publisher from its start to its end: its known batches by sequence number."""

    batches: dict[int, bytes] = field(default_factory=dict)
    first_live: int | None = None
    last_live: int | None = None

    @property
    def first_to_come(self) -> int:
        """The sequence number of the first live batch. Lower ones were published before the recording began."""
        return max(self.batches, default=-1) + 1 if self.first_live is None else self.first_live


@dataclass(frozen=True, slots=True)
class LiveMessage:
    """A recorded PUB message. `seq` is `None` for one that is not a frame of a stream."""

    received_at: float
    source: int
    life: int
    seq: int | None
    frames: list[bytes]

    def batch(self) -> EventBatch | None:
        """Return the message's events; `None` if they are unreadable."""
        return None if self.seq is None else _decoded(self.frames[-1])


@dataclass(slots=True)
class Source:
    """One recorded stream. `worker` counts the recording's workers from 0; `block_size` is in tokens."""

    number: int
    worker: int
    dp_rank: int
    engine: str
    topic: bytes
    replay_has_topic: bool
    block_size: int | None
    adapters: frozenset[str]
    lives: list[Life]

    def batches_before(self) -> list[EventBatch]:
        """Return the batches before the recording, as far as a replay has them."""
        first = self.lives[0]
        return _decoded_all(first.batches[seq] for seq in sorted(first.batches) if seq < first.first_to_come)


@dataclass(frozen=True, slots=True)
class Recording:
    """The sources by number, and their live messages in the order of their arrival."""

    name: str
    sources: dict[int, Source]
    messages: list[LiveMessage]

    @property
    def started_at(self) -> float:
        """The arrival of the first live message (unix seconds); infinity without one."""
        return self.messages[0].received_at if self.messages else math.inf

    @property
    def adapters(self) -> frozenset[str]:
        """The adapters that events name."""
        return frozenset().union(*(source.adapters for source in self.sources.values()))


def load_recording(path: Path) -> Recording:
    """Load a recording, also one that was cut off. Raises UnusableRecordingError and OSError."""
    try:
        records = list(read_recording(path, torn_end=True))
    except TornRecordingError as error:
        raise UnusableRecordingError(str(error)) from error
    messages: list[LiveMessage] = []
    lives: dict[int, list[Life]] = {}
    for record in records:
        of_source = lives.setdefault(record.source, [Life()])
        if record.channel is Channel.LIVE:
            messages.append(_live_message(record, of_source))
        else:
            _add_replayed(record, of_source[-1])
    if not any(life.batches for of_source in lives.values() for life in of_source) and not messages:
        raise UnusableRecordingError(f"{path}: the file has no batches")
    sources: dict[int, Source] = {}
    worker, last_rank = -1, 0
    for number in sorted(lives):
        batches = _decoded_all(payload for life in lives[number] for payload in life.batches.values())
        rank = next((batch.dp_rank for batch in batches if batch.dp_rank is not None), 0)
        if worker < 0 or rank <= last_rank:  # ranks of a worker follow each other
            worker += 1
        last_rank = rank
        sources[number] = _source(number, worker, rank, records, batches, lives[number])
    return Recording(path.stem, sources, messages)


def _live_message(record: Record, lives: list[Life]) -> LiveMessage:
    try:
        frame = parse_live(record.frames)
    except MalformedFrameError:
        return LiveMessage(record.received_at, record.source, len(lives) - 1, None, record.frames)
    last = lives[-1].last_live
    if last is not None and frame.seq <= last:
        lives.append(Life())
    life = lives[-1]
    life.batches[frame.seq] = frame.payload
    life.first_live = frame.seq if life.first_live is None else life.first_live
    life.last_live = frame.seq
    return LiveMessage(record.received_at, record.source, len(lives) - 1, frame.seq, record.frames)


def _add_replayed(record: Record, life: Life) -> None:
    try:
        frame = parse_replay(record.frames)
    except MalformedFrameError:
        return
    if frame is not None:
        life.batches.setdefault(frame.seq, frame.payload)


def _decoded_all(payloads: Iterable[bytes]) -> list[EventBatch]:
    return [batch for payload in payloads if (batch := _decoded(payload)) is not None]


def _decoded(payload: bytes) -> EventBatch | None:
    try:
        return decode_batch(payload)
    except MalformedBatchError:
        return None


def _source(
    number: int, worker: int, dp_rank: int, records: Sequence[Record], batches: Sequence[EventBatch], lives: list[Life]
) -> Source:
    live = next((r.frames for r in records if r.source == number and r.channel is Channel.LIVE), [b""])
    replayed = next((r.frames for r in records if r.source == number and r.channel is Channel.REPLAY), None)
    stored = [event for batch in batches for event in batch.events if isinstance(event, BlockStored)]
    signed = any(isinstance(name, int) and name < 0 for event in stored for name in event.block_hashes)
    return Source(
        number,
        worker,
        dp_rank,
        "SGLang" if signed else "vLLM",  # vLLM's hashes are unsigned
        live[0],
        replayed is None or len(replayed) == 4,
        next((event.block_size for event in stored if event.token_ids), None),
        _adapters(stored),
        lives,
    )


def _adapters(stored: Sequence[BlockStored]) -> frozenset[str]:
    names: set[str] = set()
    for event in stored:
        try:
            name = identity_of(event, names).adapter
        except ValueError:
            continue
        if name is not None:
            names.add(name)
    return frozenset(names)
