"""The layout of SGLang's objects in a pool, from its `/server_info`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from indexer.pools.layout import PoolLayout
from kvevents.sources import ReportedFields
from router.fleet.hicache import hicache_layout

OBJECTS = {
    "pools": [
        {"pool": "kv", "suffixes": ["_1_k"], "hit_policy": "all_pages"},
        {"pool": "indexer", "suffixes": ["_1_indexer"], "hit_policy": "all_pages"},
        {"pool": "swa", "suffixes": ["_1_swa"], "hit_policy": "trailing_pages", "trailing_pages": 2},
        {"pool": "state", "suffixes": ["__state"], "hit_policy": "trailing_pages", "trailing_pages": 5},
    ],
    "key_prefix": "tag_org-model",
    "is_mla_backend": True,
    "pp_rank": 1,
    "pp_size": 2,
}


@pytest.mark.parametrize(
    ("info", "layout"),
    [
        ({}, None),
        ({"hicache_storage_backend": None, "hicache_object_layout": OBJECTS}, None),
        ({"hicache_storage_backend": "mooncake"}, PoolLayout(least_tokens=256)),
        (
            {"hicache_object_layout": OBJECTS, "hicache_storage_backend_extra_config": '{"prefetch_threshold": 64}'},
            PoolLayout("tag_org-model", 4, ("_swa", "_state"), 5, 64),
        ),
        (
            {
                "hicache_object_layout": {
                    "enabled": True,
                    "hicache_object_layout": OBJECTS | {"pools": OBJECTS["pools"][:1]},
                }
            },
            PoolLayout("tag_org-model", 2, least_tokens=256),
        ),
        ({"hicache_object_layout": {"enabled": False, "reason": "MHA"}}, PoolLayout(least_tokens=256)),
        ({"hicache_storage_backend_extra_config": "@extra.toml"}, PoolLayout(least_tokens=256)),
        ({"hicache_storage_backend_extra_config": {"prefetch_threshold": -1}}, PoolLayout(least_tokens=256)),
        ({"hicache_storage_backend_extra_config": {"prefetch_threshold": 512}}, PoolLayout(least_tokens=512)),
    ],
)
def test_layout_is_read_from_the_server(info: dict[str, Any], layout: PoolLayout | None) -> None:
    fields = ReportedFields()
    backend = {} if not info else {"hicache_storage_backend": "mooncake"}
    assert hicache_layout(json.dumps(backend | info).encode(), fields) == layout
    assert fields.refused == []


def test_invalid_layout_is_noted_and_ignored() -> None:
    fields = ReportedFields()
    info = {"hicache_storage_backend": "mooncake", "hicache_object_layout": {"pools": 7}}
    assert hicache_layout(json.dumps(info).encode(), fields) == PoolLayout(least_tokens=256)
    assert len(fields.refused) == 1
