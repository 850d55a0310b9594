"""The native core, made of `indexer/native`. Targets are numbers; events and dumps are MessagePack."""

from array import array
from collections.abc import Sequence
from typing import TypeAlias

_Outcome: TypeAlias = tuple[bool, bool, bool, list[tuple[int, str]], list[tuple[int, bytes]]]

def xxh3_64(data: bytes, seed: int) -> int:
    """XXH3-64 with a seed."""

def prefix_hashes(seed: int, tokens: bytes, block_size: int, start: int, end: int) -> bytes:
    """The prefix hashes of blocks `start` to `end` (not included) of a packed prompt, as an `array("Q")` has them."""

def common(one: str | bytes, other: str | bytes) -> int:
    """How many characters, or bytes, both begin alike. Raises TypeError for one of each kind."""

def token_places(tokens: bytes, token: int, start: int) -> list[int]:
    """Where a token is in a packed prompt, in bytes, from byte `start` on."""

def packed_numbers(json: bytes) -> bytes | None:
    """A list of integers from 0 to 2^32-1, as JSON, packed as `pack_tokens` does; None for anything else."""

def spread(matches: bytes, block_size: int, rows: array[int], tokens: array[int]) -> list[tuple[int, int, int]]:
    """Write the tokens of `Index.match`'s matches where they are more: `tokens` is an `array("I")` by row, `rows` an
    `array("i")` of each target's row, or -1. The rows, of those written, whose tokens are or were in other tiers than
    the GPU's, or had any tokens before: with their tokens in CPU memory and on disk."""

def costs(
    fixed: array[float], per_token: array[float], held: array[int], tokens: int, least: int, costs: array[float]
) -> None:
    """Write each row's cost: `fixed + per_token · max(tokens - held, least)`. `held` is an `array("I")`, the others are
    `array("d")`."""

def lowest(costs: array[float], near: float) -> list[int]:
    """The rows that cost at most `near` more than the lowest, as a share of it, in order; none that is infinite."""

def highest(held: array[int]) -> int:
    """The highest number of an `array("I")`; 0 where there is none."""

class JsonCheck:
    def __init__(self, names: list[str], kept: Sequence[str], elements: int, values: int, small: int) -> None:
        """`names`: fields that are not plain at the top of a body. `kept`: fields there that `named` keeps. `elements`:
        the most that a list there may have, but for one of numbers. `values`: the most that a body may have in all,
        names, lists and objects counting as several, where it has more than `small` bytes."""
    def named(self, body: bytes) -> bytes | None:
        """An object of the kept fields of a body that is surely one JSON object which every parser reads alike, with
        nothing rare in it; else None."""

def json_outline(body: bytes, most: int) -> tuple[bytes, list[tuple[int, int, int, int]], int] | None:
    """The same JSON with `""` for every string that is no name; where its outermost fields are: name, its end, value,
    its end; and how many values it has, as `JsonCheck` counts them. Beyond `most` it is cut off. None where a string is
    not as every parser reads it. Of other mistakes the outline has the same. Others run meanwhile."""

class Index:
    def __init__(self, secret: str, orphan_blocks: int, most_blocks: int) -> None: ...
    def add(self, model: str, tenant: str, adapter: str | None, capacity: int | None) -> int:
        """A new target's number."""
    def apply(
        self, target: int, payload: bytes, known: list[tuple[int, bytes]] | None = None, trusted: bool = False
    ) -> int | _Outcome:
        """Apply a batch. 0, or bits: 1, it cleared the cache; 2, it brought a new block size. Else: whether it is a
        batch; those two; rejected events with their reasons; foreign events, because of which nothing was applied: they
        may come again as `known`. `trusted`: msgspec wrote it."""
    def clear(self, target: int) -> None: ...
    def drop(self, target: int) -> None: ...
    def match(self, root: int, block_size: int, tokens: bytes, known: array[int], blocks: int) -> tuple[bytes, bytes]:
        """Matches, each of six native u32: target, blocks, and the blocks of each tier; and the prefix hashes that were
        made beyond those `known`."""
    def match_hashes(self, known: array[int]) -> bytes: ...
    def dump(self, target: int) -> bytes: ...
    def restore(self, target: int, dump: bytes, block_sizes: list[int]) -> bool: ...
    def status(
        self, target: int
    ) -> tuple[tuple[int, int, int, int], int, tuple[int, ...], list[int], int | None] | None: ...
    def sweep(self) -> None: ...
    def runs(self) -> int: ...
    def is_sound(self) -> bool: ...

class LiveReader:
    """ZeroMQ's live sockets, by their file descriptors, and what comes there on its way to an index. For one thread;
    others run while it reads and applies."""

    def __init__(self, functions: Sequence[int], index: Index, others: int) -> None:
        """`functions`: where libzmq's zmq_msg_init, _recv, _data, _size, _more and _close are; `others`: a file
        descriptor that tells of whatever else there is to do."""
    def follow(self, fd: int, socket: int) -> None: ...
    def leave(self, fd: int) -> None: ...
    def look_again(self, fd: int) -> None:
        """What a socket has may not be told any more."""
    def expect(self, fd: int, target: int, seq: int, largest: int) -> None:
        """Batches of a socket from `seq` on are to be applied to a target, as long as none has more than `largest`
        bytes."""
    def expect_nothing(self, fd: int) -> None:
        """Whatever comes is for the caller."""
    def read(self, seconds: float) -> int:
        """Wait so long, at most, for something to come, and receive it in rounds, as long as they follow each other
        closely and have what is expected, and nothing else. What is left of the last one: 0, nothing; 1, the rest of
        what is to be applied, with something to tell; 2, what was received."""
    def has_untold(self) -> bool:
        """Whether something was taken, and not told of by the last reading."""
    def rest(self) -> None:
        """What was taken and not told of is told of now."""
    def taken(self) -> list[tuple[int, int, int, bytes, int, float]]:
        """Of the sockets that had what was expected, and are told of: what `indexer.inbox.Taken` says."""
    def received(self) -> list[tuple[int, int, int, int, int | None, bytes]]:
        """Of the sockets that had their turn in the last round, by place: what `indexer.inbox.Received` says."""
    def messages(self, place: int) -> list[list[bytes]]:
        """The frames of a socket's messages."""
    def address(self, runs: Sequence[tuple[int, int]]) -> None:
        """What came at these places is to be applied to these targets. It must be in order."""
    def apply(self) -> tuple[int, int, bytes, int | _Outcome] | None:
        """Apply what is addressed and not applied yet, up to the first batch that there is something to tell of: its
        place, its sequence number, its payload, and what `Index.apply` says of it. None when all is applied."""
