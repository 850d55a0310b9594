"""What an indexer may be asked: a prompt, or the hashes of one, of a model and a tenant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from indexer.hashing import PackedPrompt

DEFAULT_TENANT = "default"


class MatchQuery:
    """A tokenized prompt and all that tells its blocks from others with the same tokens."""

    def __init__(
        self,
        model: str,
        token_ids: Sequence[int] | PackedPrompt,
        adapter: str | None = None,
        cache_salt: str | None = None,
        tenant: str = DEFAULT_TENANT,
    ) -> None:
        self.model = model
        self.token_ids = token_ids
        self.adapter = adapter
        self.cache_salt = cache_salt
        self.tenant = tenant


@dataclass(frozen=True, slots=True)
class HashQuery:
    """Prefix hashes of consecutive blocks from the start of a prompt. `block_size` in tokens, if there are several."""

    model: str
    prefix_hashes: list[int]
    block_size: int | None = None
    tenant: str = DEFAULT_TENANT


class UnknownModelError(LookupError):
    """Nobody registered serves this model for this tenant."""
