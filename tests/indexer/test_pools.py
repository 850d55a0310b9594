"""Shared pools: what an index knows of their blocks, from recordings of real engines and from single changes."""

from __future__ import annotations

import gzip
import json
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from indexer import Indexer, MatchQuery, Registration, Target
from indexer.pools.blocks import MOST_PARTS, REST_BYTES, Change, PoolBlocks, StoredBlock, blocks_in, make_pool_blocks
from indexer.pools.keys import ObjectKeys
from indexer.pools.layout import PoolLayout
from indexer.pools.mooncake import MasterContent, MooncakeMaster
from indexer.pools.pool import PoolConfig, SharedPool
from kvevents import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from kvevents.recording import Record, read_recording

DATA = Path(__file__).parents[1] / "data" / "pools"
WORKERS = [Target("w0", 0, "tiny"), Target("w1", 0, "tiny")]
MASTER = 2  # source of the master's batches in the recording
ALL = 2**64 - 1


def nothing(_path: str) -> bytes:
    raise OSError


class RecordedPool:
    """An indexer of two recorded workers and their pool."""

    def __init__(self, indexer: Indexer, *, listings: bool = True) -> None:
        self.pool = SharedPool(PoolConfig("pool"))
        self.pool.unknown_because = None
        self.indexer = indexer
        indexer.pools = [self.pool]
        self.master = MasterContent(self.pool, MooncakeMaster("", ""), nothing)
        self._listings = listings
        for target in WORKERS:
            self.indexer.register(Registration(target, None, "vLLM", 32))

    def apply(self, record: Record) -> None:
        if record.source == MASTER:
            self.master.receive(int.from_bytes(record.frames[1], "big"), record.frames[2])
        else:
            self.indexer.index.apply_payload(WORKERS[record.source], record.frames[-1])

    def do(self, action: dict[str, Any]) -> None:
        """Take part in what was done. A listing with another number of keys than known replaces them."""
        if self._listings and action["what"] == "pool keys" and action["n"] != self.pool.blocks.sizes().blocks:
            self.pool.replace((key, False) for key in action.get("keys", ()))

    def predicted(self, request: dict[str, Any]) -> tuple[int, int]:
        """Return the tokens that a request's worker has itself, and those with the pool."""
        salt = request["extra"].get("cache_salt")
        query = MatchQuery("tiny", request["prompt_token_ids"], cache_salt=salt)
        matches = {match.target: match.matched_tokens for match in self.indexer.match(query)}
        own = matches.get(WORKERS[request["worker"]], 0)
        reached = [holdings.reach(own) for holdings in self.indexer.pooled(query, max(matches.values(), default=0))]
        return own, max(reached, default=own)


def played(pool: RecordedPool) -> Iterator[tuple[int, int, int, dict[str, Any]]]:
    """Play the recording. Yield what was predicted alone and with the pool, what was cached, and the request."""
    name = "vllm_mooncake_store_2workers"
    records = list(read_recording(DATA / f"{name}.kvrec"))
    with gzip.open(DATA / f"{name}.requests.jsonl.gz", "rt") as lines:
        steps = [json.loads(line) for line in lines]
    for step in sorted(steps, key=lambda step: step.get("t_start") or step["t"]):
        while records and records[0].received_at < (step.get("t_start") or step["t"]):
            pool.apply(records.pop(0))
        if step["kind"] == "admin":
            pool.do(step)
        else:
            yield *pool.predicted(step), step["cached_tokens"], step


@pytest.mark.parametrize(("listings", "exact"), [(True, 30), (False, 26)])
def test_recorded_answers_are_predicted_by_devices_and_pool(indexer: Indexer, listings: bool, exact: int) -> None:
    answers = [(own, reached, cached) for own, reached, cached, _ in played(RecordedPool(indexer, listings=listings))]
    assert len(answers) == 30
    assert sum(reached == cached for _, reached, cached in answers) == exact
    assert sum(own == cached for own, _, cached in answers) == 23


def test_salted_blocks_in_a_pool_are_found_with_their_salt_only(indexer: Indexer) -> None:
    pool = RecordedPool(indexer)
    salted = [(request, pool.predicted({**request, "extra": {}})) for *_, request in played(pool) if request["extra"]]
    assert [plain for _, plain in salted] == [(0, 0)] * 2
    assert len(salted) == 2


def test_worker_that_wrote_a_block_to_the_pool_holds_it_on_its_device_only(indexer: Indexer) -> None:
    pool = RecordedPool(indexer)
    tokens = list(range(64))
    block = BlockStored([7, 8], None, tokens, 32, medium="GPU")
    copy = BlockStored([7], None, tokens[:32], 32, medium="cpu")
    indexer.index.apply(WORKERS[0], EventBatch(0.0, [block, copy, BlockRemoved([7, 8], "GPU")]))
    indexer.index.apply(WORKERS[1], EventBatch(0.0, [block]))
    query = MatchQuery("tiny", [*tokens, 1])
    assert [(match.target, match.matched_tokens) for match in indexer.match(query)] == [(WORKERS[1], 64)]
    pool.pool.store([(key(7), False, True)])
    assert [holdings.intervals for holdings in indexer.pooled(query)] == [((0, 32),)]


def key(name: int, rank: int = 0) -> str:
    return f"tiny@tp_rank:{rank}@group:0@{'ab' * 24}{name:016x}"


@pytest.fixture
def blocks() -> PoolBlocks:
    return make_pool_blocks(1000)


def stored(name: int, part: int = 0, *, on_disk: bool = False, rest: int = 1) -> Change:
    return Change(name, bytes([rest]) * REST_BYTES, part, on_disk, True)


def removed(name: int, part: int = 0, *, on_disk: bool = False) -> Change:
    return Change(name, bytes(REST_BYTES), part, on_disk, False)


HASHES = array("Q", [11, 12, 13, 14, 15])
NAMES = [1, b"\xff" * 24 + (2).to_bytes(8, "big"), 3 - 2**64, 4, 5]


@pytest.mark.parametrize(
    ("changes", "reach", "ranges"),
    [
        ([], 0, []),
        ([stored(1), stored(2), stored(4)], 0, [(0, 2)]),
        ([stored(1), stored(2), stored(4)], 2, [(0, 2)]),
        ([stored(1), stored(2), stored(4)], 3, [(0, 2), (3, 4)]),
        ([stored(2), stored(3)], 1, [(1, 3)]),
        ([stored(1), stored(1, on_disk=True), removed(1)], 0, [(0, 1)]),
        ([stored(1), stored(1), removed(1)], 0, []),
        ([stored(1), stored(1, 1), stored(2)], 5, [(0, 1)]),
        ([stored(1), stored(1, 1), stored(2), stored(2, 1)], 0, [(0, 2)]),
        ([stored(1), stored(1, rest=2)], 0, []),
        ([stored(1, MOST_PARTS - 1)], 0, [(0, 1)]),
        ([removed(9), stored(0), stored(3)], 5, [(2, 3)]),
    ],
)
def test_block_counts_when_all_its_parts_are_stored(
    blocks: PoolBlocks, changes: list[Change], reach: int, ranges: list[tuple[int, int]]
) -> None:
    blocks.learn(HASHES, NAMES)
    blocks.apply(changes)
    found, needed = blocks.match(HASHES, reach, 0, ALL)
    assert found == ranges
    assert blocks.match(HASHES, reach, needed, ALL) == (ranges, needed)
    assert blocks.match(HASHES, reach, 1 << 40 | needed, ALL)[0] == []
    assert blocks.match(HASHES, reach, 0, 0) == ([], 0)
    blocks.clear()
    assert blocks.match(HASHES, reach, 0, ALL) == ([], 0)


def test_block_without_a_chain_is_unknown(blocks: PoolBlocks) -> None:
    blocks.apply([stored(1)])
    assert blocks.match(HASHES, 0, 0, ALL) == ([], 0)
    blocks.learn(HASHES, NAMES)
    assert blocks.match(HASHES, 0, 0, ALL) == ([(0, 1)], 1)


def test_reported_blocks_have_their_whole_hashes_and_parts(blocks: PoolBlocks) -> None:
    blocks.learn(HASHES, NAMES)
    blocks.apply([stored(1), stored(1, 2, on_disk=True), stored(2), stored(2, rest=2)])
    nothing = StoredBlock(0, bytes(REST_BYTES), 0)
    assert blocks.stored(HASHES[:3]) == [StoredBlock(1, b"\1" * REST_BYTES, 5), nothing, nothing]


def test_oldest_blocks_make_room_for_newer_ones(blocks: PoolBlocks) -> None:
    names = list(range(1, 5001))
    blocks.learn(array("Q", [name + 10_000 for name in names]), names)
    blocks.apply([stored(name) for name in names])
    sizes = blocks.sizes()
    assert (sizes.chain, sizes.blocks, sizes.replaced) == (1000, 1000, 8000)
    assert blocks.match(array("Q", range(14_001, 15_001)), 0, 0, ALL) == ([(0, 1000)], 1)
    assert blocks.match(array("Q", [14_000]), 0, 0, ALL) == ([], 0)
    blocks.apply([removed(name) for name in names[::2]])
    assert blocks.sizes().blocks == 500
    ranges, _ = blocks.match(array("Q", range(14_001, 15_001)), 1000, 0, ALL)
    assert ranges == [(start, start + 1) for start in range(1, 1000, 2)]


def test_tables_have_at_most_the_memory_of_the_settings() -> None:
    memory = 2**23
    blocks = make_pool_blocks(blocks_in(memory))
    names = list(range(1, 3 * blocks_in(memory)))
    blocks.learn(array("Q", [name << 20 for name in names]), names)
    blocks.apply([stored(name) for name in names])
    blocks.apply([removed(name) for name in names[::2]])
    assert blocks.sizes().chain == blocks_in(memory)
    assert blocks.sizes().bytes <= memory


@pytest.mark.parametrize(
    ("leading", "text", "name"),
    [
        (False, f"p@tiny@tp_rank:0@{'0' * 48}00000000000000ff", 255),
        (True, f"tag_org-model_tp2_{'00000000000000fe'}{'0' * 48}_R_k", 254),
        (False, "plainkey", None),
        (False, "1234567890", None),
        (False, "x" + "a" * 64, None),
        (False, "a" * 65, None),
        (False, f"tiny@{'0' * 15}f", 15),
        (True, f"tiny@{'0' * 15}f123", 15),
    ],
)
def test_hash_is_found_in_keys_of_any_form(leading: bool, text: str, name: int | None) -> None:
    keys = ObjectKeys(leading)
    change = keys.change(text, on_disk=False, stored=True)
    assert (change.name if change else None) == name
    if change is not None:
        assert keys.key(change.part, change.name, change.rest) == text


def test_forms_of_keys_are_the_parts_of_a_block() -> None:
    keys = ObjectKeys()
    changes = [keys.change(key(name, rank), on_disk=False, stored=True) for name in (1, 2) for rank in range(70)]
    assert [change.part for change in changes if change] == [*range(MOST_PARTS), *range(MOST_PARTS)]
    assert keys.refused
    assert keys.parts_with("tp_rank:1@") == 2
    assert keys.parts_with("other") == 0


class Master:
    """A master whose HTTP answers are made of `keys` and `counters`."""

    def __init__(self) -> None:
        self.keys: list[str] | None = []
        self.counters = {"master_evicted_key_count": 0, "master_active_clients": 2}
        self.listings = 0
        self.pool = SharedPool(PoolConfig("pool"))
        self.content = MasterContent(self.pool, MooncakeMaster("", "", most_keys=100), self.answer)

    def answer(self, path: str) -> bytes:
        if self.keys is None:
            raise OSError("refused")
        if path == "/metrics":
            counters = {**self.counters, "master_key_count": len(self.keys)}
            return b"# HELP x\n" + "".join(f"{name} {value}\n" for name, value in counters.items()).encode()
        self.listings += 1
        return "\n".join(self.keys).encode()

    @property
    def blocks(self) -> int:
        return self.pool.blocks.sizes().blocks if self.pool.known else -1


@pytest.fixture
def master() -> Master:
    return Master()


def test_content_is_listed_at_the_start_and_after_losses_that_no_event_reports(master: Master) -> None:
    assert master.blocks == -1
    master.keys = [key(1), key(2), "foreign"]
    master.content.check(0.0)
    assert (master.blocks, master.listings) == (2, 1)
    master.content.check(1.0)
    assert master.listings == 1
    master.keys = [key(1)]
    master.counters["master_evicted_key_count"] = 1
    master.content.check(2.0)
    assert master.blocks == -1, "listings have a minimum distance"
    master.content.check(6.0)
    assert (master.blocks, master.listings) == (1, 2)
    master.keys = None
    master.content.check(20.0)
    assert master.blocks == -1
    master.keys = [key(number) for number in range(101)]
    master.content.check(40.0)
    assert (master.blocks, master.listings) == (-1, 2)
    assert "most_keys" in (master.pool.unknown_because or "")


def test_gaps_and_restarts_make_the_content_unknown(master: Master) -> None:
    records = list(read_recording(DATA / "mooncake_master_lifecycle.kvrec"))
    master.content.check(0.0)
    lost_at = []
    for number, record in enumerate(records, 1):
        seq = int.from_bytes(record.frames[1], "big")
        master.content.receive(seq, record.frames[2])
        if not master.pool.known:
            lost_at.append(seq)
            master.content.check(10.0 * number)
            assert master.pool.known
    assert lost_at == [86, 1], "batches 30 to 85 were not recorded, then the master started again"
    master.content.receive(99, records[-1].frames[2])
    assert not master.pool.known
    master.content.check(10_000.0)
    master.content.receive(100, b"\x91")
    assert "unreadable" in (master.pool.unknown_because or "")


@pytest.mark.parametrize("media", [frozenset({"SHARED_STORAGE"}), frozenset({"STORAGE"})])
def test_pool_without_a_stream_is_known_by_the_events_of_its_workers(indexer: Indexer, media: frozenset[str]) -> None:
    (medium,) = media
    indexer.pools = [SharedPool(PoolConfig("files", workers=frozenset({"w0", "w1"}), media=media))]
    for worker in ("w0", "w1", "w2"):
        indexer.register(Registration(Target(worker, 0, "tiny"), None, "vLLM", 2))
    device = BlockStored([1, 2], None, [1, 2, 3, 4], 2, extra_keys=[["salt"], None])
    placeholder = BlockStored([1, 2], None, [], 0, medium=medium.lower())
    indexer.index.apply(WORKERS[0], EventBatch(0.0, [device, placeholder, AllBlocksCleared()]))
    salted, plain = MatchQuery("tiny", [1, 2, 3, 4, 5], cache_salt="salt"), MatchQuery("tiny", [1, 2, 3, 4, 5])
    assert (indexer.match(salted), indexer.pooled(plain)) == ([], [])
    assert [holdings.intervals for holdings in indexer.pooled(salted)] == [((0, 4),)]
    indexer.index.apply(WORKERS[1], EventBatch(0.0, [BlockRemoved([2], medium)]))
    assert [holdings.loadable(0) for holdings in indexer.pooled(salted)] == [2]
    indexer.index.apply(Target("w2", 0, "tiny"), EventBatch(0.0, [BlockRemoved([1], medium)]))
    assert [holdings.loadable(0) for holdings in indexer.pooled(salted)] == [2], "w2 does not use the pool"
    indexer.index.apply(WORKERS[1], EventBatch(0.0, [AllBlocksCleared(medium)]))
    assert indexer.pooled(salted) == []


def test_model_has_the_parts_whose_keys_name_it(indexer: Indexer) -> None:
    pool = SharedPool(PoolConfig("pool", models={"tiny": "tiny@", "other": "other@"}, objects=2))
    pool.unknown_because = None
    indexer.pools = [pool]
    for target in (WORKERS[0], Target("w1", 0, "other"), Target("w2", 0, "third")):
        indexer.register(Registration(target, None, "vLLM", 2))
        indexer.index.apply(target, EventBatch(0.0, [BlockStored([7], None, [1, 2], 2)]))
    keys = [key(7), key(7, 1), key(7).replace("tiny@", "other@")]

    def loadable(model: str) -> int:
        return sum(holdings.loadable(0) for holdings in indexer.pooled(MatchQuery(model, [1, 2, 3])))

    pool.store((each, False, True) for each in keys[:1])
    assert loadable("tiny") == 0, "the other rank is missing"
    pool.store((each, False, True) for each in keys[1:])
    assert [loadable(model) for model in ("tiny", "other", "third")] == [2, 0, 0]


PAGES = 12


def hicache_key(page: int, suffix: str, prefix: str = "tag_org-model") -> str:
    return f"{prefix}_{page:016x}{'cd' * 24}{suffix}"


def hicache(indexer: Indexer, layout: PoolLayout | None) -> tuple[SharedPool, Callable[[], list[tuple[int, int]]]]:
    """Return a pool of an SGLang worker that reported pages of two tokens, and what the pool holds of them."""
    pool = SharedPool(PoolConfig("pool"))
    pool.unknown_because = None
    indexer.pools = [pool]
    indexer.register(Registration(WORKERS[0], None, "SGLang", 2, pool_layout=layout))
    tokens = list(range(2 * PAGES))
    pages = BlockStored(list(range(1, PAGES + 1)), None, tokens, 2, medium="GPU")
    indexer.index.apply(WORKERS[0], EventBatch(0.0, [pages]))

    def held() -> list[tuple[int, int]]:
        found = indexer.pooled(MatchQuery("tiny", [*tokens, 1]))
        return [interval for holdings in found for interval in holdings.intervals]

    return pool, held


def test_objects_of_other_models_do_not_count_by_the_reported_prefix(indexer: Indexer) -> None:
    pool, held = hicache(indexer, PoolLayout("tag_org-model", objects=2))
    pool.store((hicache_key(page, "_0_k", "tag_org-model-large"), False, True) for page in range(1, 7))
    pool.store((hicache_key(page, "__k"), False, True) for page in range(1, 7))
    assert held() == [], "each page has two objects"
    pool.store((hicache_key(page, "__indexer"), False, True) for page in range(1, 5))
    assert held() == [(0, 8)]


def test_layout_of_a_later_probe_counts(indexer: Indexer) -> None:
    pool, held = hicache(indexer, None)
    for suffix, pages in (("__k", 8), ("_0_swa", 8), ("_1_swa", 4)):
        pool.store((hicache_key(page, suffix), False, True) for page in range(1, pages + 1))
    assert held() == [(0, 8)], "all objects are needed"
    layout = PoolLayout("tag_org-model", trailing=("_0_swa",), trailing_blocks=1)
    indexer.register(Registration(WORKERS[0], None, "SGLang", 2, pool_layout=layout))
    assert held() == [(0, 8)]
    pool.store((hicache_key(page, "_1_swa"), False, True) for page in range(5, 9))
    pool.store((hicache_key(page, "_0_swa"), False, False) for page in range(1, 7))
    assert held() == [(0, 16)]


def test_load_ends_where_the_last_pages_have_their_trailing_objects(indexer: Indexer) -> None:
    layout = PoolLayout("tag_org-model", trailing=("_swa", "_state"), trailing_blocks=2, least_tokens=9)
    pool, held = hicache(indexer, layout)
    pool.store((hicache_key(page, "__k"), False, True) for page in range(1, PAGES + 1))
    assert held() == [], "no trailing object is known yet"
    for suffix in ("_1_swa", "__state"):
        pool.store((hicache_key(page, suffix), False, True) for page in (1, 4, 5, 6, 9, 11))
    assert held() == [(0, 12)]
    (holdings,) = indexer.pooled(MatchQuery("tiny", list(range(2 * PAGES + 1))))
    assert [holdings.loadable(own) for own in (0, 3, 4)] == [12, 9, 0]
    pool.store([(hicache_key(5, "__state"), False, False)])
    assert held() == [(0, 2)]
    pool.store((hicache_key(page, suffix), False, True) for page in (12,) for suffix in ("_1_swa", "__state"))
    assert held() == [(0, 24)]
    pool.answers = True
    pool.lose("evictions")
    assert indexer.pool_samples(MatchQuery("tiny", list(range(2 * PAGES + 1)))) == []


def test_prompt_is_asked_for_while_the_content_is_unknown(indexer: Indexer) -> None:
    pool = SharedPool(PoolConfig("pool"))
    indexer.pools = [pool]
    indexer.register(Registration(WORKERS[0], None, "vLLM", 2))
    tokens = list(range(2 * 600))
    indexer.index.apply(WORKERS[0], EventBatch(0.0, [BlockStored(list(range(1, 601)), None, tokens, 2, medium="GPU")]))
    pool.replace((key(number, rank), False) for number in range(1, 501) for rank in range(2))
    query = MatchQuery("tiny", [*tokens, 1])
    pool.answers = True
    assert indexer.pool_samples(query) == []
    pool.lose("evictions")
    assert indexer.pooled(query) == []
    ((_, sample),) = indexer.pool_samples(query)
    assert (len(sample.keys), sample.keys[-1]) == (250, key(500, 1))
    assert sample.reported.intervals == sample.confirmed(set(sample.keys)).intervals == ((0, 1000),)
    missing = {sample.keys[0], sample.keys[101]}
    assert sample.confirmed(set(sample.keys) - missing).intervals == ((2 * 7, 2 * 200), (2 * 207, 1000))
    assert sample.confirmed(set()).intervals == ()
    pool.answers = False
    assert indexer.pool_samples(query) == []
