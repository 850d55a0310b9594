"""The layout of SGLang's HiCache in a shared pool, from the fields of `/server_info`.

- `hicache_storage_backend`: whether there is a pool. Its extra configuration may have a `prefetch_threshold`.
- `hicache_object_layout`: the beginning of its keys, and the endings of each page's objects by the pool of the device
  that they are from. Objects of pools with the policy `trailing_pages` are needed for the last pages of a hit only.
  Engines whose keys contain their tensor parallel rank report none.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from indexer.pools.layout import PoolLayout
from kvevents.decoding import read_json
from kvevents.sources import ReportedFields

# The tokens from which SGLang loads, where its configuration has no other number.
_LEAST_TOKENS: Final = 256
_MOST_TOKENS: Final = 2**31
_MOST_PAGES: Final = 2**20
_TRAILING: Final = "trailing_pages"


class _Server(msgspec.Struct):
    hicache_storage_backend: msgspec.Raw = msgspec.Raw()
    hicache_storage_backend_extra_config: msgspec.Raw = msgspec.Raw()
    hicache_object_layout: msgspec.Raw = msgspec.Raw()


class _Pool(msgspec.Struct):
    suffixes: list[str] = []
    hit_policy: str = ""
    trailing_pages: int = 1


class _Layout(msgspec.Struct):
    """The object layout, or the answer of `/get_hicache_l3_cache_layout`, which contains it."""

    pools: list[_Pool] = []
    key_prefix: str = ""
    pp_size: int = 1
    hicache_object_layout: _Layout | None = None


def hicache_layout(server_info: bytes, fields: ReportedFields) -> PoolLayout | None:
    """Return the layout of an engine's objects; None if it has no storage beside its own memory.

    `fields` gets a note on each invalid field. Raises msgspec.MsgspecError if the body is not a JSON object.
    """
    server = read_json(server_info, _Server)
    if not fields.text("hicache_storage_backend", server.hicache_storage_backend):
        return None
    threshold = _threshold(server.hicache_storage_backend_extra_config)
    layout = fields.struct("hicache_object_layout", server.hicache_object_layout, _Layout)
    if layout is not None and layout.hicache_object_layout is not None:
        layout = layout.hicache_object_layout
    if layout is None or not layout.pools:
        return PoolLayout(least_tokens=threshold)
    trailing = [pool for pool in layout.pools if pool.hit_policy == _TRAILING]
    suffixes = [suffix for pool in layout.pools if pool not in trailing for suffix in pool.suffixes]
    return PoolLayout(
        layout.key_prefix,
        max(len(suffixes) * max(layout.pp_size, 1), 1),
        tuple(_without_rank(suffix) for pool in trailing for suffix in pool.suffixes),
        min(max([pool.trailing_pages for pool in trailing], default=0), _MOST_PAGES),
        threshold,
    )


def _threshold(extra: msgspec.Raw) -> int:
    """Return the fewest tokens of a load. The extra configuration is an object, or a string with one, or a file."""
    try:
        given: Any = read_json(bytes(extra) or b"null")
        if isinstance(given, str):
            given = read_json(given)
    except msgspec.DecodeError:
        given = None
    threshold = given.get("prefetch_threshold") if isinstance(given, dict) else None
    return threshold if type(threshold) is int and 0 < threshold <= _MOST_TOKENS else _LEAST_TOKENS


def _without_rank(suffix: str) -> str:
    """Return an ending without the rank that it begins with: `_1_swa` is `_swa` for every rank."""
    rank, _, rest = suffix.removeprefix("_").partition("_")
    return f"_{rest}" if suffix.startswith("_") and (not rank or rank.isdigit()) else suffix
