"""Bytes of others are decoded by `kvevents.decoding`, whose errors are of one type."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_DECODERS = {
    "json.loads",
    "json.load",
    "json.JSONDecoder",
    "jiter.from_json",
    "pickle.loads",
    *(f"msgspec.{form}.{name}" for form in ("json", "msgpack", "yaml", "toml") for name in ("decode", "Decoder")),
    "msgspec.convert",
}
_PACKAGES = ("http_api", "indexer", "kvevents", "kvrouter", "router", "simulator", "worker")
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
    "router/apis/billing_line.py": "bodies of clients: it catches every error",
    "router/apis/messages.py": "fields of clients' bodies",
    "router/app/routes/commands.py": "bodies of operators",
    "router/reservations/selection_bodies.py": "bodies that were decoded before",
    "router/app/routes/workers.py": "bodies of operators",
    "router/apis/usage.py": "the beginning of an object in an answer: it catches every error",
    "router/hooks/interface.py": "bodies of clients: it catches every error",
    "router/picker/model_rewrites.py": "objects that were decoded before",
    "router/tokens/model_files.py": "files of models",
    "simulator/worker/tokens.py": "files of models, and arguments of tools as an engine reads them",
    "simulator/worker/__main__.py": "settings of the one who starts it",
    "simulator/worker/host_tier.py": "questions of simulated workers",
    "simulator/fleet/trace.py": "files of traces",
    "kvrouter/tools/traces/recording.py": "records that were decoded before",
    "indexer/native/index.py": "what the native index returns",
    "worker/kv_transfer/registry.py": "values that were decoded before",
    "worker/kv_transfer/layout.py": "values that were decoded before",
}


def decoders_in(source: str) -> Iterator[int]:
    """Yield the lines of a module that name a decoder, whatever name it was imported by."""
    tree = ast.parse(source)
    imported: dict[str, str] = {}
    nodes = list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.Import):
            imported |= {each.asname or each.name.split(".")[0]: each.name for each in node.names if each.asname}
        elif isinstance(node, ast.ImportFrom):
            imported |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    last_names = {each.rpartition(".")[2] for each in (*_DECODERS, *imported)}
    for node in nodes:
        if isinstance(node, ast.Attribute | ast.Name):
            if (node.attr if isinstance(node, ast.Attribute) else node.id) not in last_names:
                continue
            first, dot, rest = ast.unparse(node).partition(".")
            if imported.get(first, first) + dot + rest in _DECODERS:
                yield node.lineno
        elif isinstance(node, ast.Await) and _is_json(node.value):  # of an HTTP client's answer
            yield node.lineno


def _is_json(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "json"


def decoders() -> Iterator[tuple[str, str]]:
    """Yield every use of a decoder: its file and place."""
    for package in _PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            name = str(path.relative_to(ROOT))
            for line in decoders_in(path.read_text()):
                yield name, f"{name}:{line}"


@pytest.mark.parametrize(
    "source",
    [
        "import json\njson.loads(x)",
        "import json as j\nj.loads(x)",
        "from json import loads as read\nread(x)",
        "from msgspec.json import Decoder",
        "import json\ndecode = json.JSONDecoder().raw_decode",
        "from msgspec import json\njson.decode(x)",
        "(await answer.json())['x']",
    ],
)
def test_decoders_are_found(source: str) -> None:
    lines = source if "\n" in source or "await" not in source else f"async def f():\n  {source}"
    assert list(decoders_in(lines + ("\nDecoder(x)" if lines.endswith("Decoder") else "")))


def test_every_reader_of_others_bytes_uses_the_shared_decoders() -> None:
    found = list(decoders())
    assert [place for name, place in found if name not in _ALLOWED] == []
    assert set(_ALLOWED) - {name for name, _ in found} <= {"router/apis/json_edit.py"}
