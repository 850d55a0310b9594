"""Prefix hashes: one 64-bit number a block that stands for every token from the start of the prompt to its end.

`prefix_hash(i) = xxh3_64(token ids of block i as little-endian u32, then its extra key, seed = prefix_hash(i - 1))`.
The seed of the first block is the namespace's hash, so models, tenants, adapters, salts and block sizes never mix.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from struct import Struct
from typing import Any, Final, NamedTuple

import msgspec
from xxhash import xxh3_64_intdigest

from indexer.native import native_core

TOKEN_BYTES: Final = 4
_BIG_ENDIAN = sys.byteorder == "big"

_encode = msgspec.msgpack.Encoder().encode
_native = native_core()


class Namespace(NamedTuple):
    """What two prompts must share before their blocks can be the same."""

    model: str
    tenant: str
    adapter: str | None
    cache_salt: str | None
    block_size: int


def namespace_hash(namespace: Namespace, secret: str = "") -> int:
    """The root of a namespace's prefix hashes. With a secret, nobody without it can predict them."""
    # Of salts nothing is kept: there may be any number of them, and of any length.
    return (_known_hash if namespace.cache_salt is None else _namespace_hash)(namespace, secret)


def _namespace_hash(namespace: Namespace, secret: str) -> int:
    return xxh3_64_intdigest(_encode((secret, *namespace)))


_known_hash = lru_cache(maxsize=1024)(_namespace_hash)


def pack_tokens(token_ids: Iterable[int]) -> bytes:
    """Token ids as little-endian u32. Raises OverflowError or TypeError for anything that is no such id."""
    packed = array("I", token_ids)  # of another array, this is a plain copy
    if _BIG_ENDIAN:
        packed.byteswap()
    return packed.tobytes()


# So many blocks are taken out of a prompt at once.
_STRETCH: Final = 64


@lru_cache(maxsize=1024)
def _stretch(step: int, count: int) -> Struct:
    """Takes blocks of so many bytes out of a prompt."""
    return Struct(f"{step}s" * count)


def extend_prefix_hashes(
    hashes: array[int],
    seed: int,
    tokens: bytes,
    block_size: int,
    end: int,
    keys: Mapping[int, bytes] | Sequence[bytes | None] | None = None,
) -> None:
    """Append the prefix hashes of blocks `len(hashes)` to `end` (not included) of a packed prompt.

    `seed` is the hash before the first block of `tokens`, used while `hashes` is empty; `keys` are the blocks' extra
    keys, by their numbers.
    """
    step = block_size * TOKEN_BYTES
    start = len(hashes)
    previous: Any = hashes[-1] if hashes else seed  # only passed on: what is compiled would unpack an integer each time
    if keys is None:  # as of nearly all: there may be thousands of blocks
        made: list[Any] = []
        for first in range(start, end, _STRETCH):
            for block in _stretch(step, min(end - first, _STRETCH)).unpack_from(tokens, first * step):
                previous = xxh3_64_intdigest(block, previous)
                made.append(previous)
        hashes.fromlist(made)
        return
    for index in range(start, end):
        key = keys[index]
        block = tokens[index * step : (index + 1) * step]
        previous = xxh3_64_intdigest(block if key is None else block + key, previous)
        hashes.append(previous)


def _extend_natively(hashes: array[int], seed: int, tokens: bytes, block_size: int, end: int) -> None:
    """The same without keys by the native core, in a tenth of the time."""
    assert _native is not None
    hashes.frombytes(_native.prefix_hashes(hashes[-1] if hashes else seed, tokens, block_size, len(hashes), end))


_extend: Callable[[array[int], int, bytes, int, int], None] = (
    extend_prefix_hashes if _native is None else _extend_natively
)


class MediaSpan(NamedTuple):
    """Tokens `start` to `end` (not included) of a prompt stand for an image or the like, which the engine names so."""

    start: int
    end: int
    name: str

    def moved(self, tokens: int) -> MediaSpan:
        """The same so many tokens later."""
        return MediaSpan(self.start + tokens, self.end + tokens, self.name)


def media_keys(media: Iterable[MediaSpan], block_size: int) -> dict[int, bytes]:
    """The extra keys of the blocks that media have a share in, by the block's number.

    As vLLM makes them and tells of them (`generate_block_hash_extra_keys`, `to_event_extra_keys`): each item's name,
    and where it starts, counted from the block's first token.
    """
    names: dict[int, list[tuple[str, int]]] = {}
    for span in media:
        for block in range(span.start // block_size, -(-span.end // block_size)):
            names.setdefault(block, []).append((span.name, span.start - block * block_size))
    return {block: _encode(each) for block, each in names.items()}


# The namespaces whose hashes a prompt takes over from the one it goes on from: the latest ones.
_KEPT_NAMESPACES = 4


class _Hashes:
    """The first prefix hashes of a prompt in one namespace."""

    __slots__ = ("block_size", "hashes")

    def __init__(self, block_size: int, hashes: array[int]) -> None:
        self.block_size = block_size
        self.hashes = hashes


class PackedPrompt:
    """A prompt's token ids as the index reads them, and the prefix hashes that were made of it so far.

    Hashes are made no further than they are asked for, and once for each namespace. `media` are those of its tokens
    that stand for something else, in their order: its name takes part in the hashes of their blocks.
    """

    __slots__ = ("_made", "media", "tokens")

    def __init__(self, tokens: bytes, media: tuple[MediaSpan, ...] = ()) -> None:
        """`tokens` as of `pack_tokens`."""
        self.tokens = tokens
        self.media = media
        self._made: dict[int, _Hashes] = {}  # by seed

    @classmethod
    def of(cls, token_ids: PackedPrompt | Iterable[int]) -> PackedPrompt:
        """The prompt of these token ids. Raises as `pack_tokens` does."""
        return token_ids if isinstance(token_ids, PackedPrompt) else cls(pack_tokens(token_ids))

    def extended(self, tokens: bytes, common: int, media: tuple[MediaSpan, ...] = ()) -> PackedPrompt:
        """The prompt of `tokens`, whose first `common` ones are this prompt's: those are not hashed again."""
        prompt = PackedPrompt(tokens, media)
        # The list is a copy: another thread may be asking this one for hashes.
        for seed, made in list(self._made.items())[-_KEPT_NAMESPACES:]:
            prompt._made[seed] = _Hashes(made.block_size, made.hashes[: common // made.block_size])
        return prompt

    @property
    def hash_bytes(self) -> int:
        """What the hashes take that were made so far."""
        return sum(len(made.hashes) * made.hashes.itemsize for made in list(self._made.values()))

    def __len__(self) -> int:
        """The number of tokens."""
        return len(self.tokens) // TOKEN_BYTES

    def __iter__(self) -> Iterator[int]:
        """The token ids."""
        token_ids = array("I", self.tokens)
        if _BIG_ENDIAN:
            token_ids.byteswap()
        return iter(token_ids)

    def __eq__(self, other: object) -> bool:
        """Whether the other is a prompt of the same tokens, which stand for the same."""
        return isinstance(other, PackedPrompt) and (self.tokens, self.media) == (other.tokens, other.media)

    __hash__ = None  # type: ignore[assignment]

    def hashes(self, seed: int, block_size: int, end: int = 0) -> array[int]:
        """The prefix hashes of the first `end` blocks, or more of them, in the namespace whose hash is `seed`.

        The array grows when more are asked for.
        """
        made = self._made.get(seed)
        if made is None:
            made = self._made[seed] = _Hashes(block_size, array("Q"))
        hashes = made.hashes
        if end > len(hashes):
            if self.media and len(hashes) < self.keyed_blocks(block_size):
                self._extend_with_keys(hashes, seed, block_size, end)
            _extend(hashes, seed, self.tokens, block_size, end)
        return hashes

    def keyed_blocks(self, block_size: int) -> int:
        """How many blocks there are up to the last one that media have a share in."""
        return -(-self.media[-1].end // block_size) if self.media else 0

    def _extend_with_keys(self, hashes: array[int], seed: int, block_size: int, end: int) -> None:
        """Append hashes up to the last block before `end` that has a key."""
        begun = len(hashes)
        for block, key in media_keys(self.media, block_size).items():  # in their order
            if begun <= block < end:
                extend_prefix_hashes(hashes, seed, self.tokens, block_size, block)
                extend_prefix_hashes(hashes, seed, self.tokens, block_size, block + 1, {block: key})
