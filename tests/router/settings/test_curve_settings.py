"""CURVE key files in the settings: loaded together with the settings, and used for event streams."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvevents.curve import create_key_pair
from router.app.embedded_index import running_indexer
from router.settings import ConfigError, Settings, load_settings


def test_curve_key_files_are_loaded_with_settings(tmp_path: Path) -> None:
    public, secret = create_key_pair(tmp_path, "some")
    stream = {"endpoint": "tcp://127.0.0.1:5557", "curve_server_key_file": str(public)}
    overrides = {
        "workers": [{"url": "http://127.0.0.1:1", "streams": [stream]}],
        "events": {"curve_secret_key_file": str(secret)},
    }
    settings = load_settings(None, overrides)
    (configured,) = settings.workers[0].streams or []
    assert configured.curve_server_key_file == public
    with running_indexer(settings) as indexer:
        assert indexer.registered() == []


def test_indexer_starts_without_curve_keys() -> None:
    with running_indexer(Settings()) as indexer:
        assert indexer.registered() == []


@pytest.mark.parametrize("content", [None, "nothing"])
def test_error_names_unreadable_curve_key_file(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "bad.key"
    if content is not None:
        path.write_text(content)
    stream = {"endpoint": "tcp://127.0.0.1:5557", "curve_server_key_file": str(path)}
    with pytest.raises(ConfigError, match=f"workers.0.streams.0.curve_server_key_file: .*{path}"):
        load_settings(None, {"workers": [{"url": "http://127.0.0.1:1", "streams": [stream]}]})
    with pytest.raises(ConfigError, match=f"events.curve_secret_key_file: .*{path}"):
        load_settings(None, {"events": {"curve_secret_key_file": str(path)}})


def test_public_key_file_is_refused_as_secret_key_file(tmp_path: Path) -> None:
    public, _ = create_key_pair(tmp_path, "some")
    with pytest.raises(ConfigError, match="holds no secret key"):
        load_settings(None, {"events": {"curve_secret_key_file": str(public)}})
