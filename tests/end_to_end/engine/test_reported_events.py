"""Events of a reporter, read by the decoder of the installed vLLM."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from engine.installation import Installation
from kvevents import EventBatch, WireForm, encode_batch
from worker import EventPublisher, Reporter

pytestmark = pytest.mark.engine

DECODE = """
import json, sys, msgspec
from vllm.distributed.kv_events import KVEventBatch
batch = msgspec.msgpack.decode(open(sys.argv[1], "rb").read(), type=KVEventBatch)
json.dump([batch.data_parallel_rank, [[type(event).__name__, msgspec.to_builtins(event)] for event in batch.events]],
          open(sys.argv[2], "w"))
"""


class ToFile(EventPublisher):
    wire_form = WireForm.VLLM_MAPS

    def __init__(self, path: Path) -> None:
        super().__init__(3)
        self._path = path

    def publish(self, batch: EventBatch) -> None:
        self._path.write_bytes(encode_batch(EventBatch(batch.ts, batch.events, self.dp_rank), self.wire_form))

    def shutdown(self) -> None:
        return


def test_vllm_decodes_every_reported_event(installation: Installation, tmp_path: Path) -> None:
    sent, read = tmp_path / "batch", tmp_path / "events.json"
    reporter = Reporter(ToFile(sent))
    reporter.stored([1, 2], None, [5, 6, 7, 8], 2, lora_name="sql", extra_keys=[["sql", "image"], ["sql"]])
    reporter.stored([3], None, [9, 9], 2, cache_salt="tenant", medium="CPU", group_idx=1)
    reporter.removed([2])
    reporter.cleared()
    reporter.step()
    subprocess.run([installation.python, "-c", DECODE, sent, read], check=True, timeout=120, capture_output=True)
    rank, events = json.loads(read.read_text())
    assert rank == 3
    names: list[str] = [name for name, _ in events]
    assert names == ["AllBlocksCleared", "BlockStored", "BlockStored", "BlockRemoved", "AllBlocksCleared"]
    first, salted, removed = (fields for _, fields in events[1:4])
    expected: dict[str, Any] = {
        "block_hashes": [1, 2],
        "parent_block_hash": None,
        "token_ids": [5, 6, 7, 8],
        "block_size": 2,
        "medium": "GPU",
        "lora_name": "sql",
        "extra_keys": [["sql", "image"], ["sql"]],
    }
    assert {name: first[name] for name in expected} == expected
    assert (salted["extra_keys"], salted["medium"], salted["group_idx"]) == ([["tenant"]], "CPU", 1)
    assert (removed["block_hashes"], removed["medium"]) == ([2], "GPU")
    reporter.shutdown()
