"""The native core, built from `indexer/native`. Targets are numbers; events and dumps are MessagePack."""

from array import array
from collections.abc import Sequence
from typing import TypeAlias

from indexer.index import TreeRows

_Outcome: TypeAlias = tuple[bool, bool, bool, list[tuple[int, str]], list[tuple[int, bytes]]]

def xxh3_64(data: bytes, seed: int) -> int:
    """Return the XXH3-64 hash of `data` with a seed."""

def prefix_hashes(seed: int, tokens: bytes, block_size: int, start: int, end: int) -> bytes:
    """Return the prefix hashes of blocks `start` to `end` (not included) of a packed prompt.

    The result is the bytes of an `array("Q")`. `seed` is the prefix hash of the block before `start`.
    """

def common(one: str | bytes, other: str | bytes) -> int:
    """Return the length of the common prefix of two texts or of two byte strings.

    Raises TypeError for a text and a byte string.
    """

def token_places(tokens: bytes, token: int, start: int) -> list[int]:
    """Return the byte positions of a token in a packed prompt, from byte `start` on."""

def packed_numbers(json: bytes) -> bytes | None:
    """Return a JSON list of integers from 0 to 2^32-1 in the packed form of `pack_tokens`, or None for other JSON."""

def numbers_json(packed: bytes, before: bytes, after: bytes) -> bytes:
    """Return the token ids of a packed prompt as a JSON list, with text before and after it."""

def choose(
    fixed: array[float],
    per_token: array[float],
    shares: array[float],
    held: array[int],
    tokens: int,
    least: int,
    depths: array[int],
    others: array[float],
    replaced: dict[int, float],
    near: float,
) -> list[int]:
    """Return the rows with the lowest finite cost, and those that exceed it by at most the share `near`, in order.

    A row's cost is `fixed + per_token · max(tokens - paid, least)`, or its cost in `replaced`. `paid` are its cached
    tokens (`held`), and those for which other sessions pay: of the tokens between two `depths`, the share `others`,
    times the row's `shares`. `held` and `depths` are an `array("I")`; the other arrays are `array("d")`.
    """

def choose_target(
    index: Index,
    packed: bytes,
    roots: list[tuple[int, int, int, array[int]]],
    chunking: tuple[int, int, int, array[int]],
    length: int,
    numbers: array[int],
    in_flight: list[TreeRows],
    sent: TreeRows | None,
    units: array[int],
    held: array[int],
    lines: tuple[array[float], array[float], array[float]],
    prices: tuple[int, int, float, float, float],
    demand: tuple[dict[int, tuple[int, float, float]], int, float, float, float] | None,
    excluded: list[int],
) -> tuple[
    list[int],
    dict[int, tuple[int, int]],
    dict[int, int],
    list[int],
    list[tuple[int, int]],
    list[int],
    list[float],
    list[bytes],
]:
    """Choose a target for one packed prompt of `length` tokens: match, prefixes in flight and sent, and costs.

    - `roots`: for each block size the hash before the first block, the size, the number of blocks, and known hashes.
    - `chunking`: the same for the chunks of the trees.
    - `numbers`: an `array("i")` of the row of each target of the index; -1 for targets without a row.
    - `in_flight`, `sent`: trees, each with an `array("i")` of its holders' rows (-1 for none, -2 for unknown ones), and
      the number of chunks between two of its hashes.
    - `units`: an `array("I")` of each row's block size; 0 if it is not known.
    - `held`: an `array("I")` of zeros by row, which receives the tokens that each row holds.
    - `lines`: `fixed`, `per_token` and `shares`, as in `choose`.
    - `prices`: the tokens that are charged, the least of them, the prices of a token in CPU memory and on disk, and the
      share of `choose`'s `near`.
    - `demand`: forks of prompts by hash, the chunks between two hashes that are read, the time, the horizon of the
      demand, and the share of time that the fleet can spare; None if each prompt pays for itself.
    - `excluded`: rows that are not chosen.

    Returns the rows as `choose` does, the rows' tokens in CPU memory and on disk, the tokens without sent prefixes of
    rows where they differ, the rows with more tokens in flight than in the index, the tree and holder of rows that are
    not known, the parts that others pay for (`depths` and `others`), and the hashes that were computed: those of the
    chunks, then those of each root. The choice does not count while rows are not known.
    """

def holders(held: array[int], tokens: int) -> int:
    """Return how many rows of an `array("I")` are at least `tokens`."""

def highest(held: array[int]) -> int:
    """Return the highest number of an `array("I")`, or 0 if it is empty."""

class JsonCheck:
    """A check that accepts only plain JSON objects, which every parser reads alike."""

    def __init__(self, names: list[str], kept: Sequence[str], elements: int, values: int, small: int) -> None:
        """Create a check.

        - `names`: top-level fields whose presence makes a body be rejected.
        - `kept`: top-level fields that `named` returns.
        - `elements`: maximum length of a list in a top-level field, unless it is a list of numbers.
        - `values`: maximum number of values in a body; names, lists and objects count as several.
        - `small`: bodies of at most this number of bytes may have any number of values.
        """
    def named(self, body: bytes) -> bytes | None:
        """Return a JSON object of the body's kept fields, or None if the body is not plain."""

def json_outline(body: bytes, most: int) -> tuple[bytes, list[tuple[int, int, int, int]], int] | None:
    """Return the outline of a body: its JSON with `""` in place of every string that is no name.

    Further results are the positions of the outermost fields (start and end of the name, start and end of the value)
    and the number of values, as `JsonCheck` counts them. The outline is cut off beyond `most` values. Returns None if
    parsers may disagree about a string; other invalid JSON has an invalid outline. Releases Python's lock.
    """

class PoolBlocks:
    """The blocks of a shared pool. Its methods are thread-safe."""

    def __init__(self, limit: int, media: list[str]) -> None:
        """Create the empty blocks of a pool, as `indexer.pools.blocks.make_pool_blocks` describes."""
    def learn(self, prefix_hashes: array[int], names: array[int]) -> None:
        """Record the engine hashes of blocks. Both are an `array("Q")`."""
    def apply(self, changes: bytes) -> None:
        """Apply packed changes of 16 bytes each."""
    def clear(self) -> None:
        """Remove all objects."""
    def match(self, hashes: array[int], reach: int, needed: int, allowed: int) -> tuple[list[int], int]:
        """Return the bounds of the ranges of whole blocks, and `needed` with the parts found here."""
    def sizes(self) -> tuple[int, int, int, int]:
        """Return the entries of the chain, the blocks with objects, the bytes of both, and the replaced entries."""

class SharedPrefixes:
    """The tree that `indexer.shared_prefixes` describes. Its methods need Python's lock."""

    def add(self) -> int: ...
    def remove(self, holder: int) -> None: ...
    def chunks(self, holder: int) -> int: ...
    def parent(self, edge: int) -> int: ...
    def end(self, edge: int) -> int: ...
    def length(self, edge: int) -> int: ...
    def count(self, edge: int, holder: int) -> int: ...
    def hold(self, holder: int, hashes: array[int]) -> int: ...
    def hold_edge(self, holder: int, edge: int) -> None: ...
    def release(self, holder: int, edge: int) -> None: ...
    def split(self, edge: int, chunks: int) -> int: ...
    def longest(self, hashes: array[int]) -> dict[int, int]: ...
    def resumable(self, holder: int, hashes: array[int], window: int) -> int: ...
    def longest_of(self, holder: int, hashes: array[int]) -> int: ...
    def size(self) -> int: ...
    def is_sound(self) -> bool: ...

class Index:
    """An index of the blocks that targets hold. Its methods are thread-safe."""

    def __init__(self, secret: str, orphan_blocks: int, most_blocks: int) -> None:
        """Create an index.

        - `secret`: the secret of the prefix hashes.
        - `orphan_blocks`: maximum number of a target's blocks that wait for their parent.
        - `most_blocks`: maximum number of blocks that one target may hold.
        """
    def add(self, model: str, tenant: str, adapter: str | None, capacity: int | None) -> int:
        """Register a target and return its number."""
    def attach(self, target: int, pool: PoolBlocks | None) -> None:
        """Let a target's events report the chain and the blocks of a pool."""
    def apply(
        self, target: int, payload: bytes, known: list[tuple[int, bytes]] | None = None, trusted: bool = False
    ) -> int | _Outcome:
        """Apply a batch, and return its outcome.

        - `known`: the foreign events of an earlier call that the caller could decode, by their number.
        - `trusted`: whether msgspec encoded the batch.

        An ordinary outcome is a number: 0, plus 1 if the batch cleared the cache, plus 2 for a new block size. Any
        other outcome is a tuple: whether the payload is a batch, whether it cleared the cache, whether it has a new
        block size, the rejected events with their reasons, and the foreign events. If there are foreign events, nothing
        was applied: the caller calls again with `known`.
        """
    def clear(self, target: int) -> None:
        """Remove all blocks of a target."""
    def drop(self, target: int) -> None:
        """Remove a target. Its number may be reused."""
    def match(
        self, root: int, block_size: int, tokens: bytes, known: array[int], blocks: int, tier: int = 4
    ) -> tuple[bytes, bytes]:
        """Return the matches of a prompt's first `blocks` blocks, and the prefix hashes that are not in `known`.

        With a `tier` below 4, only blocks in this tier count. A match is six native unsigned 32-bit integers: target,
        matched blocks, and the blocks in each of four tiers.
        """
    def match_rows(
        self,
        root: int,
        block_size: int,
        packed: bytes,
        known: array[int],
        blocks: int,
        rows: array[int],
        tokens: array[int],
    ) -> tuple[list[tuple[int, int, int]], bytes]:
        """Match as `match` does. Write the matched tokens of each target to its row, unless the row has as many.

        - `rows`: an `array("i")` of each target's row; -1 for targets without a row.
        - `tokens`: an `array("I")` of tokens by row.

        Returns (row, tokens in CPU memory, tokens on disk) for the written rows that had tokens before or have tokens
        outside GPU memory, and the prefix hashes that are not in `known`.
        """
    def match_hashes(self, known: array[int]) -> bytes:
        """Return the matches of blocks with these prefix hashes, in the form of `match`."""
    def dump(self, target: int) -> bytes:
        """Return a target's blocks in the format of `indexer.dump`."""
    def restore(self, target: int, dump: bytes, block_sizes: list[int]) -> bool:
        """Restore an empty target from a dump. Returns False for an invalid dump, after which the target is empty."""
    def status(
        self, target: int
    ) -> tuple[tuple[int, int, int, int], int, tuple[int, ...], list[int], int | None] | None:
        """Return the state of a target, or None if it is not registered.

        The state is its blocks by tier, orphans, counters, block sizes, and smallest window.
        """
    def kept(self, target: int) -> tuple[int, int]:
        """Return the blocks of a target in GPU memory, and those that its events have removed; zeros if unknown."""
    def sweep(self) -> None:
        """Free a part of the memory of cleared and dropped blocks."""
    def runs(self) -> int:
        """Return the number of runs in the prefix tree."""
    def is_sound(self) -> bool:
        """Return whether the prefix tree's invariants hold (for tests)."""

class LiveReader:
    """A reader of live ZeroMQ sockets, named by their file descriptors, that applies their batches to an index.

    It is not safe for use by several threads. It releases Python's lock while it reads and applies.
    """

    def __init__(self, functions: Sequence[int], index: Index, others: int) -> None:
        """Create a reader.

        - `functions`: addresses of libzmq's zmq_msg_init, _recv, _data, _size, _more, _copy and _close.
        - `index`: the index to which batches are applied.
        - `others`: a file descriptor that becomes readable when the caller has other work.
        """
    def follow(self, fd: int, socket: int) -> None:
        """Begin to read a socket. `socket` is its address in libzmq."""
    def leave(self, fd: int) -> None:
        """Stop reading a socket."""
    def look_again(self, fd: int) -> None:
        """Read a socket in the next round even if its file descriptor does not signal."""
    def expect(self, fd: int, target: int, seq: int, largest: int) -> None:
        """Apply a socket's batches from number `seq` on to a target, until one has more than `largest` bytes."""
    def expect_nothing(self, fd: int) -> None:
        """Leave all of a socket's messages to the caller."""
    def read(self, seconds: float) -> int:
        """Wait at most `seconds` for messages, and read rounds while they hold expected batches only.

        Returns the part of the last round that the caller must handle: 0, nothing; 1, an applied batch to report and
        the batches after it, by `apply`; 2, all messages, by `received`.
        """
    def has_unreported(self) -> bool:
        """Return whether batches were applied that the last `read` did not report in `applied`."""
    def rest(self) -> None:
        """Report in `applied` all applied batches that were not reported yet."""
    def applied(self) -> list[tuple[int, int, int, bytes, int, float]]:
        """Return what `read` or `rest` reports: the fields of `indexer.inbox.AppliedBatches`, by socket."""
    def received(self) -> list[tuple[int, int, int, int, int | None, bytes]]:
        """Return the turns of the last round: the fields of `indexer.inbox.Received`, by place in the round."""
    def messages(self, place: int) -> list[list[bytes]]:
        """Return the frames of the messages of one turn, by message."""
    def address(self, runs: Sequence[tuple[int, int]]) -> None:
        """Choose turns (by place) and the targets to which `apply` will apply them. Each turn must be in order."""
    def apply(self) -> tuple[int, int, bytes, int | _Outcome] | None:
        """Apply the addressed batches until one must be reported.

        Returns that batch's place, sequence number, payload, and outcome as in `Index.apply`. Returns None once all
        batches are applied.
        """
