"""Prefix hashes: one 64-bit number per block, which identifies all tokens from the start of the prompt to its end.

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
_encode_json = msgspec.json.Encoder().encode
_native = native_core()


class Namespace(NamedTuple):
    """The attributes that two prompts must share before their blocks can be equal."""

    model: str
    tenant: str
    adapter: str | None
    cache_salt: str | None
    block_size: int


def namespace_hash(namespace: Namespace, secret: str = "") -> int:
    """Return the hash that a namespace's prefix hashes start from. A secret makes them unpredictable without it."""
    # Hashes of salts are not cached, because salts may be of any number and any length.
    return (_cached_hash if namespace.cache_salt is None else _namespace_hash)(namespace, secret)


def _namespace_hash(namespace: Namespace, secret: str) -> int:
    return xxh3_64_intdigest(_encode((secret, *namespace)))


_cached_hash = lru_cache(maxsize=1024)(_namespace_hash)


def pack_tokens(token_ids: Iterable[int]) -> bytes:
    """Return token ids as little-endian u32. Raises OverflowError or TypeError for an id that is not one."""
    packed = array("I", token_ids)  # of another array, this makes a plain copy
    if _BIG_ENDIAN:
        packed.byteswap()
    return packed.tobytes()


# Number of blocks that are unpacked from a prompt at once.
_STRETCH: Final = 64


@lru_cache(maxsize=1024)
def _stretch(step: int, count: int) -> Struct:
    """Return a Struct that unpacks `count` blocks of `step` bytes each."""
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

    - `seed`: hash before the first block of `tokens`, used while `hashes` is empty.
    """
    step = block_size * TOKEN_BYTES
    start = len(hashes)
    previous: Any = hashes[-1] if hashes else seed  # Any: compiled code would unbox an int each time
    if keys is None:  # nearly always; there may be thousands of blocks
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
    """Append prefix hashes of blocks without keys, in a tenth of the time that Python needs."""
    assert _native is not None
    hashes.frombytes(_native.prefix_hashes(hashes[-1] if hashes else seed, tokens, block_size, len(hashes), end))


_extend: Callable[[array[int], int, bytes, int, int], None] = (
    extend_prefix_hashes if _native is None else _extend_natively
)


class MediaSpan(NamedTuple):
    """Tokens `start` to `end` (not included) that represent an image or other media, which the engine calls `name`."""

    start: int
    end: int
    name: str

    def moved(self, tokens: int) -> MediaSpan:
        return MediaSpan(self.start + tokens, self.end + tokens, self.name)


def media_keys(media: Iterable[MediaSpan], block_size: int) -> dict[int, bytes]:
    """Return the extra keys of the blocks that contain media tokens, by block number.

    A key has the form that vLLM uses (`generate_block_hash_extra_keys`, `to_event_extra_keys`): the name of each item,
    and its start relative to the block's first token.
    """
    names: dict[int, list[tuple[str, int]]] = {}
    for span in media:
        for block in range(span.start // block_size, -(-span.end // block_size)):
            names.setdefault(block, []).append((span.name, span.start - block * block_size))
    return {block: _encode(each) for block, each in names.items()}


# Number of latest namespaces whose hashes an extended prompt copies.
_KEPT_NAMESPACES = 4


class _Hashes:
    """The first prefix hashes of a prompt in one namespace.

    The constructor is written by hand, because mypyc does not compile a generated one and each request makes some.
    """

    __slots__ = ("block_size", "hashes")

    def __init__(self, block_size: int, hashes: array[int]) -> None:
        self.block_size = block_size
        self.hashes = hashes


class PackedPrompt:
    """A prompt's packed token ids, and its prefix hashes as far as they were computed.

    Hashes are computed on demand, and once per namespace. `media` are the spans of media tokens in order; their names
    take part in the hashes of their blocks. `length` is the number of tokens.
    """

    __slots__ = ("_made", "length", "media", "tokens")

    def __init__(self, tokens: bytes, media: tuple[MediaSpan, ...] = ()) -> None:
        """Make a prompt of `tokens`, which `pack_tokens` returned."""
        self.tokens = tokens
        self.length = len(tokens) // TOKEN_BYTES
        self.media = media
        self._made: dict[int, _Hashes] = {}  # by seed

    @classmethod
    def of(cls, token_ids: PackedPrompt | Iterable[int]) -> PackedPrompt:
        """Return the prompt of these token ids. Raises OverflowError or TypeError for an id that is not one."""
        return token_ids if isinstance(token_ids, PackedPrompt) else cls(pack_tokens(token_ids))

    def extended(self, tokens: bytes, common: int, media: tuple[MediaSpan, ...] = ()) -> PackedPrompt:
        """Return the prompt of `tokens`, whose first `common` tokens are this prompt's, with the hashes of those."""
        prompt = PackedPrompt(tokens, media)
        # The list is a copy, because another thread may compute hashes of this prompt.
        for seed, made in list(self._made.items())[-_KEPT_NAMESPACES:]:
            prompt._made[seed] = _Hashes(made.block_size, made.hashes[: common // made.block_size])
        return prompt

    @property
    def hash_bytes(self) -> int:
        """Memory of the computed hashes in bytes."""
        return sum(len(made.hashes) * made.hashes.itemsize for made in list(self._made.values()))

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        token_ids = array("I", self.tokens)
        if _BIG_ENDIAN:
            token_ids.byteswap()
        return iter(token_ids)

    def json(self, before: bytes = b"", after: bytes = b"") -> bytes:
        """Return the token ids as a JSON list, with text before and after it."""
        if _native is None:
            return before + _encode_json(list(self)) + after
        return bytes(_native.numbers_json(self.tokens, before, after))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PackedPrompt) and (self.tokens, self.media) == (other.tokens, other.media)

    __hash__ = None  # type: ignore[assignment]

    def hashes(self, seed: int, block_size: int, end: int = 0) -> array[int]:
        """Return at least `end` prefix hashes that begin with the hash `seed`. Later calls extend the same array."""
        made = self._made.get(seed)
        if made is None:
            made = self._made[seed] = _Hashes(block_size, array("Q"))
        hashes = made.hashes
        if end > len(hashes):
            if self.media and len(hashes) < self.keyed_blocks(block_size):
                self._extend_with_keys(hashes, seed, block_size, end)
            _extend(hashes, seed, self.tokens, block_size, end)
        return hashes

    def all_hashes(self, seed: int, block_size: int) -> array[int]:
        """Return the prefix hashes of all full blocks, which begin with the hash `seed`."""
        return self.hashes(seed, block_size, self.length // block_size)

    def keyed_blocks(self, block_size: int) -> int:
        """Return the number of blocks up to the last one with media tokens."""
        return -(-self.media[-1].end // block_size) if self.media else 0

    def _extend_with_keys(self, hashes: array[int], seed: int, block_size: int, end: int) -> None:
        """Append the hashes up to the last block before `end` that has a key."""
        begun = len(hashes)
        for block, key in media_keys(self.media, block_size).items():  # in order of their blocks
            if begun <= block < end:
                extend_prefix_hashes(hashes, seed, self.tokens, block_size, block)
                extend_prefix_hashes(hashes, seed, self.tokens, block_size, block + 1, {block: key})
