"""Dumps of registered targets, and the restoration of saved targets when they register again."""

from __future__ import annotations

from collections.abc import Iterable

import structlog

from indexer.dump import DumpedStream, DumpError, SavedTarget, TargetDump
from indexer.index import Index
from indexer.streams.sequence import StreamSequence
from indexer.targets import Registration, Target, WorkerNames
from kvevents import EventBatch, EventSource, encode_batch
from kvevents.batches import batch_time
from kvevents.frames import StreamFrame

log = structlog.get_logger()


class SavedTargets:
    """Targets of a dump that have not registered again yet."""

    def __init__(self, targets: Iterable[SavedTarget] = ()) -> None:
        by_name = [(saved.about, saved) for saved in targets]
        self._saved = {Target(about.worker, about.dp_rank, about.model, about.tenant): it for about, it in by_name}

    def registrations(self) -> list[Registration]:
        """Return the registrations that the targets had when they were saved."""
        return [
            Registration(
                target,
                EventSource(target.dp_rank, about.endpoint, about.replay_endpoint, about.topic, about.curve_server_key),
                about.engine,
                about.block_size,
                about.adapter,
                about.capacity,
                about.additional_salt,
            )
            for target, about in [(target, saved.about) for target, saved in self._saved.items()]
        ]

    def restore(self, registration: Registration, sequence: StreamSequence, index: Index, names: WorkerNames) -> None:
        """Restore a target's blocks and the position of its stream, if the stream has the same endpoint."""
        packed = self._saved.pop(registration.target, None)
        if packed is None or registration.source is None:
            return
        saved = packed.about
        if saved.endpoint != registration.source.endpoint or registration.source.replay_endpoint is None:
            return
        try:
            index.restore(registration.target, packed.whole())
        except DumpError as error:
            log.warning("saved holdings not used", reason=str(error), **names.about(registration.target))
            return
        last = EventBatch(saved.stream.last_time, [], registration.target.dp_rank)
        sequence.resume(StreamFrame(saved.stream.last_seq, encode_batch(last)), saved.stream.complete)


def dump_target(registration: Registration, sequence: StreamSequence | None, index: Index) -> TargetDump | None:
    """Return the dump of a target, or None if its stream has no batch yet, or no replay of what a restart misses."""
    source, target = registration.source, registration.target
    last = sequence.last_frame if sequence else None
    status = index.status(target)
    if source is None or source.replay_endpoint is None or sequence is None or last is None or status is None:
        return None
    runs, holders = index.dump(target)
    return TargetDump(
        target.worker,
        target.dp_rank,
        target.model,
        target.tenant,
        registration.engine,
        source.endpoint,
        source.replay_endpoint,
        source.topic,
        registration.block_size,
        registration.adapter,
        registration.capacity,
        sorted(status.block_sizes),
        DumpedStream(last.seq, batch_time(last.payload) or 0.0, sequence.complete),
        runs,
        holders,
        source.curve_server_key,
        registration.additional_salt,
    )
