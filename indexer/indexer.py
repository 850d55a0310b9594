"""The indexer: registered targets, their event streams, and the index of their blocks, behind one object.

One file, because every question and every command reads the registrations.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import structlog

from indexer.dump import SavedTarget, TargetDump, write_dump
from indexer.hashing import Namespace, PackedPrompt, namespace_hash
from indexer.index import (
    DEFAULT_TENANT,
    MOST_BLOCKS,
    ORPHAN_BLOCKS,
    HashQuery,
    Index,
    Match,
    MatchQuery,
    RowMatches,
    TargetRows,
    TargetStatus,
    UnknownModelError,
    best_first,
    by_tokens,
)
from indexer.native import core_name
from indexer.pools.holdings import PoolHoldings
from indexer.pools.pool import SharedPool
from indexer.pools.samples import PoolSample
from indexer.saved import SavedTargets, dump_target
from indexer.streams.bound import BindSettings, Publisher, find_target
from indexer.streams.reader import StreamReader
from indexer.streams.sequence import SequenceSettings, StreamSequence
from indexer.streams.session import StreamSession, StreamStatus
from indexer.targets import Registration, Target, WorkerNames
from kvevents import EventSource, Tier
from kvevents.curve import KeyPair
from kvevents.sources import MOST_BLOCK_SIZE, canonical_source

log = structlog.get_logger()

_WINDOW_SECONDS = 0.25  # time for which a target without windows is assumed to have none


@dataclass(frozen=True, slots=True)
class TargetReport:
    """State of one registered target. `stream` is `None` if the target has no stream."""

    registration: Registration
    stream: StreamStatus | None
    holdings: TargetStatus


# Maximum number of cached (model, tenant, adapter) root hashes.
_MOST_ROOTS = 1024


class _BlockSizes:
    """Cache of block sizes in tokens, valid while the indexer's count of changes equals `changes`.

    `roots` has, by model, tenant and adapter, each block size with the hash that prompts of this namespace start from.
    Namespaces with a cache salt are not cached.
    """

    def __init__(self, changes: int) -> None:
        self.changes = changes
        self.of_model: dict[tuple[str, str], frozenset[int]] = {}
        self.of_target: dict[Target, int | None] = {}
        self.roots: dict[tuple[str, str, str | None], list[tuple[int, int]]] = {}


class Indexer:
    """Index of registered targets that follows their event streams. `start` and `stop` control its thread.

    - `registrations`: counts every registration and every removal.
    - `orphan_blocks`: maximum number of a target's blocks that wait for their parent.
    - `keys`: this subscriber's key pair for encrypted streams; None makes a temporary one.
    - `salted`: the targets with an additional salt.
    - `pools`: shared pools. A target loads from the first one that serves it.
    - `bindings`: the sockets that publishers connect to.
    - `pods`: workers by the names and addresses in publishers' topics. It is only replaced as a whole.
    """

    def __init__(
        self,
        secret: str = "",
        orphan_blocks: int = 65_536,
        sequence: SequenceSettings | None = None,
        keys: KeyPair | None = None,
        pools: Sequence[SharedPool] = (),
        bindings: BindSettings | None = None,
    ) -> None:
        self.pods: Mapping[str, str] = {}
        self.names = WorkerNames()
        self.pools = pools
        self.index = make_index(secret, orphan_blocks)
        self._secret = secret
        self._saved = SavedTargets()
        self._bindings = bindings or BindSettings()
        self._reader = StreamReader(self.index, sequence, keys, self.names, self._bindings, self._target_of)
        self._served: dict[tuple[str, str], dict[Target, Registration]] = {}  # by tenant and model
        self.salted: set[Target] = set()
        self.registrations = 0
        self._sizes = _BlockSizes(0)
        self._windows: dict[Target, int | None] = {}
        self._windows_until = 0.0
        self._pool_of: dict[Target, SharedPool] = {}

    def start(self) -> None:
        """Start to read the streams. Raises ValueError if a socket for publishers cannot be bound."""
        for endpoint in self._bindings.endpoints:
            self._reader.bind(endpoint)
        self._reader.start()

    def stop(self) -> None:
        """Stop reading and close every socket."""
        self._reader.stop()

    def register(self, registration: Registration) -> None:
        """Follow a target, unless it is followed already in the same way.

        Raises ValueError, whose text begins with the wrong field, for an unusable endpoint, rank or block size.
        """
        target = registration.target
        if registration.source is not None:
            registration = replace(registration, source=canonical_source(registration.source))
        if registration.block_size is not None and not 0 < registration.block_size <= MOST_BLOCK_SIZE:
            raise ValueError(f"block_size: {registration.block_size} is not from 1 to {MOST_BLOCK_SIZE}")
        pool = next((pool for pool in self.pools if pool.serves(target)), None)
        if pool is not None:
            pool.use_engine(registration)
        served = self._served.get((target.tenant, target.model), {})
        known = served.get(target)
        if known == registration:
            return
        stream = self._open(target, registration.source) if registration.source else None
        if known is not None:
            self._reader.remove(target)
            self.index.drop(target)
        self.index.add(target, registration.adapter, registration.capacity)
        if pool is not None:
            self._pool_of[target] = pool
            self.index.attach(target, pool.blocks)
        if stream is not None:
            if known is None:
                self._saved.restore(registration, stream.sequence, self.index, self.names)
                if pool is not None:
                    pool.learn(*self.index.dump(target))
            self._reader.follow(stream)
        self._served.setdefault((target.tenant, target.model), {})[target] = registration
        self.salted.discard(target)
        if registration.additional_salt is not None:
            self.salted.add(target)
        self.registrations += 1

    def _open(self, target: Target, source: EventSource) -> StreamSession:
        """Open a target's stream. Its publisher connects if the endpoint is a wildcard or bound."""
        fed = source.connects or self._reader.binds(source.endpoint)
        if fed:
            self._reader.bind(source.endpoint)
        return self._reader.open(target, source, fed)

    def _target_of(self, publisher: Publisher) -> Registration | str:
        """Return the registration of a publisher, or why it has none. Called in the reader's thread."""
        registered = [each for served in list(self._served.values()) for each in list(served.values())]
        return find_target(publisher, registered, self.pods)

    def publishers(self) -> list[Publisher]:
        """Return the publishers that connected to bound sockets."""
        return self._reader.publishers()

    def dump(self) -> Iterator[bytes]:
        """Yield a dump of the targets whose stream can be replayed. Raises TimeoutError after 30 seconds for one."""
        return write_dump(filter(None, map(self._dump_target, self.registered())), self._secret)

    def use_dump(self, targets: Iterable[SavedTarget]) -> None:
        """Restore these targets from a dump when they register."""
        self._saved = SavedTargets(targets)

    def register_saved(self) -> None:
        """Register all targets of the dump in use, with the registration that they had."""
        for registration in self._saved.registrations():
            try:
                self.register(registration)
            except ValueError as error:
                worker = self.names.get(registration.target.worker)
                log.warning("saved stream not followed", worker=worker, reason=str(error))

    def _dump_target(self, registration: Registration) -> TargetDump | None:
        if registration.source is None or registration.source.replay_endpoint is None:
            return None  # do not wait for the reader

        def read(_target: Target, sequence: StreamSequence | None) -> TargetDump | None:
            return dump_target(registration, sequence, self.index)

        return self._reader.between_batches(read, registration.target)

    def unregister(self, targets: Iterable[Target]) -> None:
        """Remove targets, their streams and their blocks."""
        for target in targets:
            served = self._served.get((target.tenant, target.model), {})
            if (registration := served.pop(target, None)) is None:
                continue
            if (source := registration.source) is not None and self._reader.binds(source.endpoint):
                self._unbind_unused(source.endpoint)
            if not served:
                del self._served[target.tenant, target.model]
            self.salted.discard(target)
            self._pool_of.pop(target, None)
            self.registrations += 1
            self._reader.remove(target)
            self.index.drop(target)

    def _unbind_unused(self, endpoint: str) -> None:
        """Close a bound socket that neither a setting nor a registration names."""
        used = any(each.source is not None and each.source.endpoint == endpoint for each in self.registered())
        if not used and endpoint not in self._bindings.endpoints:
            self._reader.unbind(endpoint)

    def registered(self) -> list[Registration]:
        return [known for served in self._served.values() for known in served.values()]

    def clear(self, target: Target) -> None:
        """Remove a target's blocks, because its cache was reset."""
        self.index.clear(target)

    def forget_former_process(self, targets: Iterable[Target], since: float) -> None:
        """Remove the blocks of targets whose engine started again after the monotonic time `since`.

        A target whose stream can be replayed keeps its blocks: the replay shows whether the engine started again. A
        target that was cleared since keeps what the new process reported.
        """
        for target in targets:
            stream = self._reader.sessions.get(target)
            if stream is None or (stream.replay is None and stream.began_at <= since):
                self.index.clear(target)

    def resync(self, target: Target) -> bool:
        """Remove a target's blocks, and read its stream again. Returns False if the stream has no replay."""
        return self._reader.resync(target)

    def agree(self, target: Target) -> None:
        """Record that a target holds what its events say, so that a missing first batch does not exist."""
        self._reader.agree(target)

    def suspend(self, targets: Iterable[Target], suspended: bool = True) -> None:
        """Show the streams of some targets as stale, because their worker does not answer, or stop doing so."""
        self._reader.suspend(targets, suspended)

    def stream(self, target: Target) -> StreamSession | None:
        """Return the session of a target's stream, for reading only; None if it has none. Cheaper than a status."""
        return self._reader.sessions.get(target)

    def stream_status(self, target: Target) -> StreamStatus | None:
        """Return the state of a target's stream; None if it has none."""
        return self._reader.status(target)

    def match(self, query: MatchQuery) -> list[Match]:
        """Return the prompt tokens that each target would serve from its cache: targets that hold any, the most first.

        An engine always computes the last token, so only full blocks before it count. Raises UnknownModelError, and
        OverflowError or TypeError for a token id that is not one.
        """
        return self._matches(query, len(query.token_ids) - 1)

    def match_rows(self, query: MatchQuery, rows: TargetRows, found: RowMatches) -> None:
        """Add to `found` the tokens that the targets in some rows would serve. Raises UnknownModelError."""
        roots = self.roots(query.model, query.adapter, query.cache_salt, query.tenant)
        token_ids = query.token_ids
        prompt = token_ids if isinstance(token_ids, PackedPrompt) else PackedPrompt.of(token_ids)
        for block_size, root in roots:
            self.index.match_rows(root, block_size, prompt, (prompt.length - 1) // block_size, rows, found)
        for target in self.salted:  # routed requests have no additional salt
            row = rows.row_of.get(target)
            if row is not None:
                found.clear(row)

    def has_pool(self, target: Target) -> bool:
        """Return whether a registered target loads from a pool."""
        return target in self._pool_of

    def loads_from(self, target: Target, holdings: PoolHoldings) -> bool:
        """Return whether a registered target loads these blocks: its pool holds them, and they have its block size."""
        pool = self._pool_of.get(target)
        if pool is None or pool.config.name != holdings.pool or target in self.salted:
            return False
        return self.block_size(target) == holdings.block_size

    def pooled(self, query: MatchQuery, reach: int = 0) -> list[PoolHoldings]:
        """Return what each shared pool holds of a prompt, for each block size: none without pools.

        - `reach`: the most tokens that a target holds itself. Behind them, a pool is asked up to its first missing
          block.

        The last token does not count, as in `match`. Raises OverflowError or TypeError as `match` does.
        """
        if not self.pools or not self.serves(query.model, query.tenant):
            return []
        prompt, tokens = PackedPrompt.of(query.token_ids), len(query.token_ids) - 1
        found = [
            pool.holdings(query.model, query.tenant, root, size, prompt, tokens // size, reach // size)
            for size, root in self.roots(query.model, query.adapter, query.cache_salt, query.tenant)
            for pool in self.pools
        ]
        return [holdings for holdings in found if holdings is not None]

    def pool_samples(self, query: MatchQuery) -> list[tuple[SharedPool, PoolSample]]:
        """Return the questions whether pools of unknown content have what they reported of a prompt."""
        asked = [pool for pool in self.pools if not pool.known and pool.answers]
        if not asked or not self.serves(query.model, query.tenant):
            return []
        reach = max([match.matched_tokens for match in self.match(query)], default=0)
        prompt, tokens = PackedPrompt.of(query.token_ids), len(query.token_ids) - 1
        found = [
            (pool, pool.sample(query.model, query.tenant, root, size, prompt, tokens // size, reach // size))
            for size, root in self.roots(query.model, query.adapter, query.cache_salt, query.tenant)
            for pool in asked
        ]
        return [(pool, sample) for pool, sample in found if sample is not None]

    def longest(self, query: MatchQuery) -> list[Match]:
        """Return the tokens of a sequence that each target holds, with its last block. Raises as `match` does."""
        return self._matches(query, len(query.token_ids))

    def longest_by_hash(self, query: HashQuery) -> list[Match]:
        """Return the tokens that targets hold of a prefix given by hashes, the most first.

        Raises UnknownModelError, OverflowError for a number that is not a hash, and ValueError for a bad block size.
        """
        served = self._with_salt(query.model, query.tenant, query.additional_salt)
        sizes = self.block_sizes(query.model, query.tenant)
        if query.block_size is None and len(sizes) != 1:
            raise ValueError(f"block_size: the workers of {query.model!r} use {sorted(sizes) or 'none yet'}; send one")
        if query.block_size is not None and query.block_size <= 0:
            raise ValueError(f"block_size: {query.block_size} is not a number of tokens; send one above 0")
        hashes = array("Q", query.prefix_hashes)
        return best_first(served, self.index.match_hashes(hashes, query.block_size or next(iter(sizes))))

    def report(self, target: Target) -> TargetReport | None:
        """Return the state of a target; None if it is not registered."""
        registration = self._served.get((target.tenant, target.model), {}).get(target)
        holdings = self.index.status(target)
        if registration is None or holdings is None:
            return None
        return TargetReport(registration, self._reader.status(target), holdings)

    def targets(self, model: str, tenant: str = DEFAULT_TENANT) -> Collection[Target]:
        """Return the registered targets that serve a model for a tenant. Raises UnknownModelError if no target does."""
        served = self._served.get((tenant, model))
        if served is None:
            raise UnknownModelError(f"no registered worker serves model {model!r} for tenant {tenant!r}")
        return served

    def serves(self, model: str, tenant: str = DEFAULT_TENANT) -> bool:
        """Return whether any registered target serves a model for a tenant."""
        return (tenant, model) in self._served

    def wait_until_caught_up(self, timeout: float) -> bool:
        """Wait until every stream is connected and replayed, at most `timeout` seconds. Returns whether all are."""
        deadline = time.monotonic() + timeout
        while not self._caught_up():
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.01)
        return True

    def _caught_up(self) -> bool:
        streams = (self._reader.status(known.target) for known in self.registered() if known.source is not None)
        return all(stream and not stream.state.waits for stream in streams)

    def block_size(self, target: Target) -> int | None:
        """Return a target's block size in tokens, from its events, or else from its registration."""
        known = self._block_sizes().of_target
        size = known.get(target)
        if size is None and target not in known:
            registration = self._served.get((target.tenant, target.model), {}).get(target)
            registered = registration.block_size if registration else None
            size = known[target] = max(self.index.block_sizes([target]), default=registered)
        return size

    def window(self, target: Target) -> int | None:
        """Return the fewest last tokens that a cache group of a target keeps; None if all keep whole prompts."""
        now = time.monotonic()
        if now >= self._windows_until:
            self._windows_until = now + _WINDOW_SECONDS
            self._windows = {known: window for known, window in self._windows.items() if window is not None}
        try:
            return self._windows[target]
        except KeyError:
            status = self.index.status(target)
            blocks = status.window if status is not None else None
            window = self._windows[target] = None if blocks is None else blocks * (self.block_size(target) or 1)
            return window

    def block_sizes(self, model: str, tenant: str = DEFAULT_TENANT) -> frozenset[int]:
        """Return the block sizes, in tokens, that the workers of a model use."""
        known = self._block_sizes().of_model
        sizes = known.get((tenant, model))
        if sizes is None:
            served = self._served.get((tenant, model), {})
            registered = {each.block_size for each in served.values() if each.block_size is not None}
            sizes = known[tenant, model] = frozenset(registered | self.index.block_sizes(served))
        return sizes

    def _block_sizes(self) -> _BlockSizes:
        changes = self.registrations + self.index.block_size_changes  # both only grow
        if self._sizes.changes != changes:
            self._sizes = _BlockSizes(changes)
        return self._sizes

    def held_in(self, query: MatchQuery, tier: Tier) -> list[Match]:
        """Return the prompt tokens that each target holds in one tier, the most first. Raises as `match` does."""
        found = self._found(query, len(query.token_ids) - 1, tier)
        return best_first(self._with_salt(query.model, query.tenant, query.additional_salt), found)

    def _matches(self, query: MatchQuery, tokens: int) -> list[Match]:
        salt, own = query.cache_salt, query.additional_salt
        matches = best_first(self._with_salt(query.model, query.tenant, own), self._found(query, tokens))
        if own is None and salt is not None and self.salted:
            found = self._found(replace(query, cache_salt=None), tokens)
            matches += best_first(self._with_salt(query.model, query.tenant, salt), found)
            matches.sort(key=by_tokens)
        return matches

    def _with_salt(self, model: str, tenant: str, additional_salt: str | None) -> Collection[Target]:
        """Return the targets of a model that registered with this additional salt. Raises UnknownModelError."""
        served = self.targets(model, tenant)
        if additional_salt is None and not self.salted:
            return served
        known = self._served[tenant, model]
        return {target for target, each in known.items() if each.additional_salt == additional_salt}

    def _found(self, query: MatchQuery, tokens: int, tier: Tier | None = None) -> list[Match]:
        """Return the matches of a prompt's first `tokens` tokens, for each block size; with `tier`, in that tier."""
        roots = self.roots(query.model, query.adapter, query.cache_salt, query.tenant)
        prompt = PackedPrompt.of(query.token_ids)
        found: list[Match] = []
        for block_size, root in roots:
            found += self.index.match_from(root, block_size, prompt, tokens // block_size, tier)
        return found

    def roots(
        self, model: str, adapter: str | None, cache_salt: str | None, tenant: str = DEFAULT_TENANT
    ) -> list[tuple[int, int]]:
        """Return the block sizes of a model, each with the hash that these prompts start from.

        Raises UnknownModelError.
        """
        known = self._block_sizes().roots
        key = model, tenant, adapter
        roots = known.get(key) if cache_salt is None else None
        if roots is None:
            self.targets(model, tenant)
            sizes = self.block_sizes(model, tenant)
            names = model, tenant, adapter, cache_salt
            roots = [(size, namespace_hash(Namespace(*names, size), self._secret)) for size in sizes]
            if cache_salt is None:
                if len(known) >= _MOST_ROOTS:
                    known.clear()
                known[key] = roots
        return roots


def make_index(secret: str = "", orphan_blocks: int = ORPHAN_BLOCKS, most_blocks: int = MOST_BLOCKS) -> Index:
    """Return an empty index of the implementation in use."""
    if core_name() == "native":
        from indexer.native.index import NativeIndex

        return NativeIndex(secret, orphan_blocks, most_blocks)
    from indexer.reference.index import PythonIndex

    return PythonIndex(secret, orphan_blocks, most_blocks)
