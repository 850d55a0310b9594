"""Settings of shared pools, and the pools that the router makes of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from indexer import Target
from router.app.embedded_index import mooncake_master, shared_pool
from router.settings import ConfigError, load_settings

MOONCAKE = "name: p, type: mooncake, master: 'http://m:9003', events: 'tcp://m:5557'"


@pytest.mark.parametrize(
    ("pools", "reason"),
    [
        ("[{name: p, type: mooncake}]", "needs master"),
        ("[{name: p, type: events}]", "needs media"),
        ("[{name: p, type: events, media: [STORAGE], workers: ['http://a'], master: 'http://m'}]", "only a pool of"),
        (f"[{{{MOONCAKE}, media: [cpu]}}]", "Remove media"),
        ("[{name: p, type: events, media: [STORAGE]}]", "List the workers"),
        ("[{name: p, type: events, media: [gpu], workers: ['http://a']}]", "GPU is no medium"),
        (f"[{{{MOONCAKE}}}, {{{MOONCAKE}}}]", "its own name"),
        (f"[{{{MOONCAKE}, objects: 65}}]", "pools.0.objects"),
        (f"[{{{MOONCAKE}, price: -0.1}}]", "pools.0.price"),
    ],
)
def test_pool_that_could_not_be_known_is_refused(tmp_path: Path, pools: str, reason: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"pools: {pools}")
    with pytest.raises(ConfigError, match=reason):
        load_settings(file)


def test_pools_of_the_settings(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        f"pools: [{{{MOONCAKE}, models: {{m: tiny@}}}}, "
        "{name: files, type: events, media: [storage], workers: ['http://a:1/']}]"
    )
    store, files = load_settings(file).pools
    assert (mooncake_master(store).url, mooncake_master(store).events) == ("http://m:9003/", "tcp://m:5557")
    assert shared_pool(store).serves(Target("http://b:1", 0, "m"))
    assert not shared_pool(store).serves(Target("http://b:1", 0, "other"))
    pool = shared_pool(files)
    assert (pool.known, pool.blocks.media) == (True, {"STORAGE"})
    assert [pool.serves(Target(url, 0, "m")) for url in ("http://a:1", "http://b:1")] == [True, False]


def test_pulls_exclude_fallbacks(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("pulls: {protocol: p2p}\npicker: {fallbacks: 1}")
    with pytest.raises(ConfigError, match=r"picker\.fallbacks"):
        load_settings(file)
