"""Tokens for the blocks of a trace: a trace names blocks, and the router's index reads tokens.

Each token of a block is the block's id. So equal blocks have equal tokens, and different blocks do not.
"""

from __future__ import annotations

from collections.abc import Sequence

from indexer.hashing import TOKEN_BYTES, PackedPrompt
from simulator.fleet.trace import TracedRequest

_TOKENS = 1 << 8 * TOKEN_BYTES
_HASHES = 1 << 64
# Block ids of traces are below it. Tokens above it fill the partial last blocks of prompts.
_FIRST_FILLER = _TOKENS // 2


def prompt_of(request: TracedRequest, number: int, block_tokens: int) -> PackedPrompt:
    """Return the tokens of a request's prompt. `number` makes the tokens of its partial last block unique."""
    tokens = [_packed(block) * block_tokens for block in request.blocks]
    rest = request.input_tokens - len(request.blocks) * block_tokens
    tokens.append(_packed(_FIRST_FILLER + number) * rest)
    return PackedPrompt(b"".join(tokens))


def tokens_of(blocks: Sequence[int], block_tokens: int) -> list[int]:
    """Return the tokens of blocks as an engine reports them."""
    tokens: list[int] = []
    for block in blocks:
        tokens += [block % _TOKENS] * block_tokens
    return tokens


def engine_hash(block: int) -> int:
    """Return the hash by which an engine names a block in its events."""
    return block % _HASHES


def _packed(token: int) -> bytes:
    return (token % _TOKENS).to_bytes(TOKEN_BYTES, "little")
