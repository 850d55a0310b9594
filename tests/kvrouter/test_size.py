"""`kvrouter size`: the smallest fleet for a trace, by role."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvrouter.cli import app
from kvrouter.tools.traces.size import Goals, Sized, Sizing
from simulator.fleet.engine import LLAMA_70B
from simulator.fleet.trace import TracedRequest


def prompts(count: int, every: float, tokens: int = 9000, output: int = 40) -> list[TracedRequest]:
    """Return prompts that share nothing, one `every` some seconds."""
    blocks = [tuple(range(100 * number, 100 * number + tokens // 512)) for number in range(count)]
    return [TracedRequest(every * n, tokens, output, ids, ids, str(n)) for n, ids in enumerate(blocks)]


def test_smallest_fleet_serves_the_trace_and_no_smaller_one_does() -> None:
    tried: list[Sized] = []
    sizing = Sizing(prompts(80, 0.15), LLAMA_70B, Goals(1.0, 0.05, 0.95), show=tried.append)
    found = sizing.smallest(16)
    assert found is not None
    assert found.met >= 0.95
    assert sizing.best(found.fleet.workers - 1).met < 0.95
    assert found.met == max(each.met for each in tried if each.fleet.workers == found.fleet.workers)
    assert {each.fleet.prefill for each in tried if each.fleet.workers == 4} == {0, 1, 2, 3}


def test_no_fleet_is_found_if_none_can_serve_the_trace() -> None:
    assert Sizing(prompts(10, 1.0), LLAMA_70B, Goals(0.001, 0.05, 0.9)).smallest(3) is None


@pytest.mark.parametrize(("ttft", "status", "last"), [("2", 0, "Smallest fleet: "), ("0.001", 1, "No fleet")])
def test_command_shows_every_fleet_and_the_smallest(tmp_path: Path, ttft: str, status: int, last: str) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [
        {
            "timestamp": 1000 * each.arrival,
            "input_length": each.input_tokens,
            "output_length": each.output_tokens,
            "hash_ids": [*each.blocks, -1 - number],
        }
        for number, each in enumerate(prompts(20, 0.5))
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = CliRunner().invoke(app, ["size", "--trace", str(path), "--ttft", ttft, "--most", "2"])
    assert result.exit_code == status, result.output
    assert "within both goals" in result.output
    assert last in result.output
