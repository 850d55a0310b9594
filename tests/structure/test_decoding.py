"""Bytes of others are decoded by `kvevents.decoding`, whose errors are of one type."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
_DECODERS = ("json.loads", "json.load", "msgspec.json.decode", "msgspec.msgpack.decode", "msgspec.convert")
_CLASSES = ("msgspec.json.Decoder", "msgspec.msgpack.Decoder")
# Files with decoders of their own, and whose bytes they read.
_ALLOWED = {
    "kvevents/decoding.py": "the decoders that all others use",
    "kvevents/batches.py": "events: it catches all of msgspec's errors, and rejects single events",
    "kvevents/dialects/arrays.py": "events, called by batches.py alone",
    "kvevents/dialects/maps.py": "events, called by batches.py alone",
    "kvevents/dialects/rfc1527.py": "events, called by batches.py alone",
    "http_api/routes.py": "bodies of clients",
    "router/auth/bodies.py": "bodies of clients",
    "router/apis/fields.py": "bodies of clients",
    "router/apis/json_edit.py": "bodies of clients",
    "router/apis/messages.py": "fields of clients' bodies",
    "router/app/routes/commands.py": "bodies of operators",
    "router/app/routes/workers.py": "bodies of operators",
    "router/tokens/model_files.py": "files of models",
    "indexer/native/index.py": "what the native index returns",
    "worker/disaggregation/registry.py": "values that were decoded before",
    "worker/disaggregation/layout.py": "values that were decoded before",
}


def decoders() -> Iterator[tuple[str, str]]:
    """Yield every use of a decoder: its file and place."""
    for package in ("http_api", "indexer", "kvevents", "router", "worker"):
        for path in (ROOT / package).rglob("*.py"):
            name = str(path.relative_to(ROOT))
            for node in ast.walk(ast.parse(path.read_text())):
                if not isinstance(node, ast.Call):
                    continue
                called = ast.unparse(node.func)
                awaited = called.endswith(".json") and not node.args and called.split(".")[-2] in ("response", "answer")
                if called in _DECODERS or called.removesuffix(".decode") in _CLASSES or awaited:
                    yield name, f"{name}:{node.lineno}"


def test_every_reader_of_others_bytes_uses_the_shared_decoders() -> None:
    found = list(decoders())
    assert [place for name, place in found if name not in _ALLOWED] == []
    assert set(_ALLOWED) - {name for name, _ in found} <= {"router/apis/json_edit.py"}
