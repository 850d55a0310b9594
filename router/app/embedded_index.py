"""The indexer of a router: it starts with a snapshot or another router's dump, and writes snapshots."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from indexer import Indexer
from indexer.pools.mooncake import MooncakeMaster
from indexer.pools.pool import PoolConfig, SharedPool
from indexer.snapshot import SnapshotWriter, load_from_peer, load_snapshot
from indexer.streams.bound import BindSettings
from kvevents.curve import load_key_pair
from router.app.pool_follower import MooncakeFollower
from router.settings import PoolSettings, Settings
from router.sharing.worker_processes import WorkerProcesses


@contextmanager
def running_indexer(settings: Settings, worker_processes: WorkerProcesses | None = None) -> Iterator[Indexer]:
    """Yield an indexer that reads its streams until the context ends.

    It starts with the index of another process, else the snapshot, else the dump of `index.peer`. If there are several
    processes, only the first writes snapshots. Raises OSError if an address of `events.bind` cannot be bound.
    """
    index = settings.index
    key_file = settings.events.curve_secret_key_file
    keys = load_key_pair(key_file, "events.curve_secret_key_file") if key_file else None
    pools = [(each, shared_pool(each)) for each in settings.pools]
    bindings = BindSettings(
        tuple(settings.events.bind), keys, settings.events.publisher_keys, bool(settings.server.token)
    )
    indexer = Indexer(index.secret, keys=keys, pools=[pool for _, pool in pools], bindings=bindings)
    saved = worker_processes.load_index(index.secret, settings.server.token) if worker_processes else []
    if not saved and index.snapshot:
        saved = load_snapshot(index.snapshot, index.secret)
    if not saved and index.peer:
        saved = load_from_peer(str(index.peer), index.secret, settings.server.token)
    indexer.use_dump(saved)
    followers = [MooncakeFollower(pool, mooncake_master(each)) for each, pool in pools if each.master is not None]
    for follower in followers:
        follower.start()
    try:
        indexer.start()
    except ValueError as error:
        indexer.stop()
        raise OSError(f"events.bind: {error}") from error
    try:
        if index.snapshot is None or (worker_processes and worker_processes.number):
            yield indexer
            return
        writer = SnapshotWriter(indexer, index.snapshot)
        writer.start()
        try:
            yield indexer
        finally:
            writer.stop()
    finally:
        indexer.stop()
        for follower in followers:
            follower.stop()


def shared_pool(settings: PoolSettings) -> SharedPool:
    """Return the empty pool of these settings."""
    workers = frozenset(str(url).rstrip("/") for url in settings.workers)
    media, master = settings.reported_media, "" if settings.master is None else str(settings.master).rstrip("/")
    return SharedPool(
        PoolConfig(settings.name, workers, settings.models, media, settings.objects, settings.memory, master)
    )


def mooncake_master(settings: PoolSettings) -> MooncakeMaster:
    """Return the master of a Mooncake Store."""
    assert settings.master is not None
    assert settings.events is not None
    return MooncakeMaster(str(settings.master), settings.events, settings.most_keys, settings.interval)
