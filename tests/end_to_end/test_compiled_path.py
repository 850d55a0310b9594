"""Chats call compiled code only. `make test-compiled` runs this over compiled modules."""

from __future__ import annotations

import tomllib
from pathlib import Path

from benchmarks.request_path import interpreted_parts
from kvrouter.processes import KvrouterProcess

ROOT = Path(__file__).parents[2]
# These stay interpreted: a closure around a decoder, and the check of a stream's first event.
INTERPRETED = {"kvevents/decoding.py", "router/apis/stream_errors.py"}


def compiled() -> set[str]:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    patterns = build["hooks"]["mypyc"]["include"]
    return {str(path.relative_to(ROOT)) for pattern in patterns for path in ROOT.glob(pattern.lstrip("/"))}


async def test_a_chat_calls_only_what_can_be_compiled() -> None:
    with KvrouterProcess(["simulate", "--port", "0", "--prefill-ms", "0", "--step-ms", "1"]) as worker:
        files, generated = await interpreted_parts(worker.wait_until_listening())
    assert not generated, "give each an __init__ of its own"
    assert not files - compiled() - INTERPRETED
