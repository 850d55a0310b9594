"""Traces: read, made up, and what is known of their blocks."""

from __future__ import annotations

import gzip
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from benchmarks.policy.workloads import AGENT, CONVERSATION, TOOL, Workload, ideal_seconds, sessions
from simulator.fleet.trace import BLOCK_TOKENS, TraceLine, read_trace, requests_of

LINES = b"""\
{"timestamp": 0, "input_length": 1200, "output_length": 400, "hash_ids": [0, 1, 2]}
{"timestamp": 3000, "input_length": 1700, "output_length": 10, "hash_ids": [0, 1, 3, 4]}
"""


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_public_trace_format_is_read(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress(LINES) if path.suffix == ".gz" else LINES)
    first, second = requests_of(read_trace(path).lines, speed=2.0)
    assert (first.arrival, second.arrival) == (0, 1.5)
    assert (first.input_tokens, first.output_tokens, first.blocks) == (1200, 400, (0, 1))
    assert first.session == second.session == "1"
    assert len(read_trace(path, limit=1).lines) == 1


def test_blocks_of_an_answer_are_those_of_the_next_turn() -> None:
    first, second = requests_of([TraceLine(0, 1200, 400, [0, 1, 2]), TraceLine(3000, 1700, 10, [0, 1, 3, 4])])
    assert first.finished == (0, 1, 3)
    assert second.finished == second.blocks == (0, 1, 3)


def test_last_answer_of_a_session_has_its_own_blocks() -> None:
    first, other = requests_of([TraceLine(0, 600, 1000, [0, 1]), TraceLine(1, 600, 1000, [2, 3])])
    assert len(first.finished) == len(other.finished) == 3
    assert first.finished[0] == 0
    assert not set(first.finished) & set(other.finished)


@pytest.mark.parametrize("workload", [CONVERSATION, AGENT, TOOL])
def test_generated_traces_match_their_workload(workload: Workload) -> None:
    lines = sessions(workload, 0.5, 400, Random(3))
    assert lines == sessions(workload, 0.5, 400, Random(3))
    assert lines != sessions(workload, 0.5, 400, Random(4))
    assert [line.timestamp for line in lines] == sorted(line.timestamp for line in lines)
    turns = Counter(line.session_id for line in lines)
    assert 0.4 * workload.turns < len(lines) / len(turns) <= 1.3 * workload.turns
    before: dict[int, int | None] = {}
    for line in lines:
        assert len(line.hash_ids) == -(-line.input_length // BLOCK_TOKENS)
        for parent, block in zip([None, *line.hash_ids], line.hash_ids, strict=False):
            assert before.setdefault(block, parent) == parent  # equal ids mean equal prefixes


def test_tool_workload_mixes_chats_and_calls_with_shared_prefixes() -> None:
    lines = sessions(TOOL, 1.0, 600, Random(1))
    starts = Counter(line.hash_ids[0] for line in lines)
    chats, *calls = ([line for line in lines if line.hash_ids[0] == start] for start in sorted(starts))
    shares = [len(each) / len(lines) for each in (chats, *calls)]
    assert shares == pytest.approx([0.45, 0.4, 0.15], abs=0.06)
    for each, system_tokens in zip(calls, (6144, 2560), strict=True):
        assert len({tuple(line.hash_ids[: system_tokens // BLOCK_TOKENS]) for line in each}) == 1
        assert len({line.session_id for line in each}) == len(each)


def test_ideal_seconds_count_a_prefix_once() -> None:
    lines = [TraceLine(0, 1024, 10, [0, 1]), TraceLine(1, 1536, 10, [0, 1, 2])]
    assert ideal_seconds(lines, token=1.0, output_token=10.0) == (1536 + 2 * 100) / 2
