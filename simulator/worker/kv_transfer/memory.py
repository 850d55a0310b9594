"""KV pages with real bytes, computed from the tokens as in a model: each token's from the previous one's.

The KV of a token has 64 bytes: a hash of the token, keyed by the KV of the previous token. The first key represents
model and adapter. Each layer's K and V has a slice of these bytes. Therefore the tokens determine all bytes of a
prompt, and an error spreads to all later tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulator.worker.cache import CachedSequence
from worker.kv_transfer import KVArgs
from worker.kv_transfer.transfer import TransferEngine

LAYERS = 2
BUFFERS = 2 * LAYERS  # all K, then all V
TOKEN_BYTES = 64 // BUFFERS  # bytes in each buffer


class FirstToken(NamedTuple):
    """The data that is sent besides the pages: the first token of the answer, and counts of its prompt's tokens."""

    room: int
    token: int
    prompt_tokens: int
    cached_tokens: int


AUX_BYTES = 8 * len(FirstToken._fields)


class KvMemory:
    """The pages of one DP rank, one for each block of its cache, and `aux_items` first tokens."""

    def __init__(self, engine: TransferEngine, num_blocks: int, block_size: int, aux_items: int, model: str) -> None:
        self._block_size = block_size
        self._model = model
        self._tokens = [
            engine.allocate(num_blocks * block_size * TOKEN_BYTES).reshape(-1, TOKEN_BYTES) for _ in range(BUFFERS)
        ]
        self._aux = engine.allocate(aux_items * AUX_BYTES).view(np.int64).reshape(aux_items, -1)

    @property
    def page_bytes(self) -> int:
        """The bytes of one page in all buffers."""
        return BUFFERS * self._block_size * TOKEN_BYTES

    def args(self) -> KVArgs:
        """Return the addresses of all buffers."""
        return KVArgs(
            kv_data_ptrs=[buffer.ctypes.data for buffer in self._tokens],
            kv_data_lens=[buffer.nbytes for buffer in self._tokens],
            kv_item_lens=[self._block_size * TOKEN_BYTES] * BUFFERS,
            page_size=self._block_size,
            kv_cache_dtype="uint8",
            aux_data_ptrs=[self._aux.ctypes.data],
            aux_data_lens=[self._aux.nbytes],
            aux_item_lens=[AUX_BYTES],
        )

    def compute(self, sequence: CachedSequence, start: int, end: int) -> None:
        """Compute the KV of the tokens from `start` to `end`, from the KV of the previous token."""
        if start == end:
            return
        if start:
            slot = self._slots(sequence, start - 1, start)[0]
            before = b"".join(buffer[slot].tobytes() for buffer in self._tokens)
        else:
            before = self._root(sequence.adapter)
        kv = _kv_of(sequence.tokens[start:end], before)
        slots = self._slots(sequence, start, end)
        for number, buffer in enumerate(self._tokens):
            buffer[slots] = kv[:, number]

    def wrong_pages(self, sequence: CachedSequence, num_tokens: int) -> int:
        """Return the number of pages whose bytes differ from those of the first `num_tokens` tokens."""
        kv = _kv_of(sequence.tokens[:num_tokens], self._root(sequence.adapter))
        slots = self._slots(sequence, 0, num_tokens)
        wrong = np.zeros(num_tokens, dtype=bool)
        for number, buffer in enumerate(self._tokens):
            wrong |= (buffer[slots] != kv[:, number]).any(axis=1)
        return len(np.unique(np.flatnonzero(wrong) // self._block_size))

    def write_first_token(self, item: int, first: FirstToken) -> None:
        """Write an aux item."""
        self._aux[item] = first

    def read_first_token(self, item: int) -> FirstToken:
        """Read an aux item."""
        return FirstToken(*self._aux[item].tolist())

    def _root(self, adapter: str | None) -> bytes:
        return blake2b(f"{self._model}\0{adapter or ''}".encode()).digest()

    def _slots(self, sequence: CachedSequence, start: int, end: int) -> NDArray[np.int64]:
        """Return the positions in the buffers of the tokens from `start` to `end`."""
        positions = np.arange(start, end)
        blocks = np.array(sequence.blocks, dtype=np.int64)
        slots: NDArray[np.int64] = (
            blocks[positions // self._block_size] * self._block_size + positions % self._block_size
        )
        return slots


def _kv_of(tokens: Sequence[int], before: bytes) -> NDArray[np.uint8]:
    """Return the KV of tokens after one with the KV `before`, as [token, buffer, byte]."""
    kv = []
    for token in tokens:
        before = blake2b(token.to_bytes(4, "little"), key=before).digest()
        kv.append(before)
    return np.frombuffer(b"".join(kv), np.uint8).reshape(len(tokens), BUFFERS, TOKEN_BYTES)
