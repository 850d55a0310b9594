"""`kvrouter replay-trace` in simulation, its figures, and the page it writes."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from benchmarks.policy.workloads import CONVERSATION, sessions
from kvrouter.cli import app
from kvrouter.tools.traces.live import Prompts
from kvrouter.tools.traces.plots import amount, duration, log_ticks, seconds
from kvrouter.tools.traces.results import Answer, Run, histogram, shape
from kvrouter.tools.traces.run import live_targets, open_trace
from simulator.fleet.trace import TraceLine, requests_of

VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """Elements that are closed in the order they were opened; what they link to and name."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.links: list[str] = []
        self.counts: dict[str, int] = {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        for name, value in attributes:
            if name == "id":
                self.ids.append(value or "")
            elif name == "aria-labelledby":
                self.references.append(value or "")
            elif name in ("src", "href"):
                self.links.append(value or "")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def invoke(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["replay-trace", *map(str, arguments)], terminal_width=200)
    return result.exit_code, result.output


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "made & up.jsonl"
    lines = sessions(CONVERSATION, 2.0, 90, Random(1))
    path.write_text("".join(json.dumps({**line_of(line), "cached_tokens": 7, "ttft_ms": 50}) + "\n" for line in lines))
    return path


def line_of(line: TraceLine) -> dict[str, object]:
    return {name: getattr(line, name) for name in ("timestamp", "input_length", "output_length", "hash_ids")}


def test_policies_are_compared_and_reported(trace: Path, tmp_path: Path) -> None:
    page, results = tmp_path / "report.html", tmp_path / "results.json"
    policies = ("--policy", "kv_aware", "--policy", "round_robin", "--policy", "random")
    code, output = invoke(trace, *policies, "--workers", 4, "--kv-tokens", 200_000, "-o", page, "--json", results)
    assert code == 0, output
    written = json.loads(results.read_text())
    by_policy = {run["label"]: run for run in written["runs"]}
    assert list(by_policy) == ["kv_aware", "round_robin", "random"]
    rates = {name: run["figures"]["hit_rate"] for name, run in by_policy.items()}
    assert written["workload"]["best_hit_rate"] >= rates["kv_aware"] > rates["round_robin"] + 0.1
    assert all(len(run["requests"]) == written["workload"]["requests"] for run in by_policy.values())
    assert len(by_policy["kv_aware"]["busy_seconds"]) == 4

    text = page.read_text()
    seen = Page(text)
    assert set(seen.references) <= set(seen.ids)
    assert len(set(seen.ids)) == len(seen.ids)
    assert seen.links == ["data:,"]  # nothing from elsewhere
    assert "http" not in text.replace("http-equiv", "")
    assert "made &amp; up.jsonl" in text
    assert "script" not in seen.counts
    for expected in ("round_robin", "Best possible hit rate", "Hit rate when recorded", "TTFT p99", "200,000 tokens"):
        assert expected in text
    # Hits, percentiles, distribution, a load for each policy, four of the workload, and the swatches of two lists.
    assert seen.counts["svg"] == 3 + 3 + 4 + 2 * 3


@pytest.mark.parametrize(
    "lines",
    [
        [TraceLine(0, 1, 1, [])],
        [TraceLine(5, 600, 0, [1, 2])],
        [TraceLine(0, 0, 0, []), TraceLine(0, 100, 1, [])],
        [TraceLine(1000 * n, 512 * 3, 1, [0, 1, 2]) for n in range(3)],
    ],
    ids=["one token", "one request", "no blocks", "all alike"],
)
def test_small_and_unusual_traces_are_replayed(lines: list[TraceLine], tmp_path: Path) -> None:
    path, page = tmp_path / "trace.jsonl", tmp_path / "report.html"
    path.write_text("".join(json.dumps(line_of(line)) + "\n" for line in lines))
    code, output = invoke(path, "-o", page)
    assert code == 0, output
    Page(page.read_text())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no requests"),
        ('{"timestamp": 0}\n', "line 1"),
        ('{"timestamp": 0, "input_length": 9000, "output_length": 1, "hash_ids": [1]}\n', "1 hash_ids are too few"),
        ('{"block_tokens": 0}\n', "block_tokens"),
        ("no json\n", "line 1"),
    ],
)
def test_file_without_trace_is_rejected(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(content)
    code, output = invoke(path)
    assert code == 1
    assert message in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--policy", "best"), "as an entry point of kvrouter.policies; expected kv_aware"),
        (("--engine", "1t"), "known engines are 70b, 8b"),
        (("--simulate", "--url", "http://a"), "either"),
        (("--policy", "random", "--url", "http://a"), "--policy and --extra need --simulate"),
        (("--url", "a"), "LABEL=URL"),
        (("--output", "no/such/folder.html"), "no/such/folder.html"),
        (("--url", "a=http://b", "--url", "a=http://c"), "different labels"),
    ],
)
def test_contradicting_options_are_rejected(trace: Path, arguments: tuple[str, ...], message: str) -> None:
    code, output = invoke(trace, *arguments)
    assert code == 1
    assert message in output


def test_url_can_have_label() -> None:
    plain, labelled = live_targets(["http://a:1/", "new=https://b/x?y=z"], None, "", 1.0, 9, "seed")
    assert (plain.label, plain.url) == ("a:1", "http://a:1")
    assert (labelled.label, labelled.url) == ("new", "https://b/x?y=z")
    assert plain.seed != labelled.seed


def test_late_recording_begins_at_zero(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"block_tokens": 64}\n'
        '{"timestamp": 9000, "input_length": 64, "output_length": 1, "hash_ids": [2]}\n'
        '{"timestamp": 7000, "input_length": 130, "output_length": 1, "hash_ids": [1, 2, 3]}\n'
    )
    opened = open_trace(path, None)
    assert [line.timestamp for line in opened.lines] == [0, 2000]
    assert requests_of(opened.lines, 1.0, opened.block_tokens)[0].blocks == (1, 2)


def test_best_hit_rate_is_of_unlimited_cache() -> None:
    lines = [TraceLine(1000 * n, 1024, 1, [n % 2 * 10, n % 2 * 10 + 1]) for n in range(4)]
    workload = shape(lines, requests_of(lines), 512)
    # The last token of a prompt is always computed, and with it its block.
    assert workload.best_hit_rate == pytest.approx(2 * 512 / 4096)
    assert workload.by_cache[0] == (512, 0.0)
    assert workload.working_set == 4 * 512


def test_load_is_requests_in_flight_by_time() -> None:
    run = Run("r", [Answer(0, 10, 1, 4, held=2, worker="a"), Answer(1, 10, 1, 1, worker="b")], ["a", "b", "c"])
    assert run.load(4, 4.0) == {"a": [0, 0, 1, 1], "b": [0, 1, 0, 0], "c": [0, 0, 0, 0]}
    assert run.busy_seconds() == {"a": 2, "b": 1, "c": 0}
    assert run.figures.busiest == 2


def test_prompts_share_tokens_of_shared_blocks() -> None:
    prompts = Prompts("seed", 16)
    first, second = (
        prompts.token_ids(TraceLine(0, length, 1, ids), number)
        for number, (length, ids) in enumerate([(40, [1, 2, 3]), (48, [1, 2, 4])])
    )
    assert (len(first), len(second)) == (40, 48)
    assert first[:32] == second[:32]
    assert first[32:40] != second[32:40]
    assert first == Prompts("seed", 16).token_ids(TraceLine(0, 40, 1, [1, 2, 3]), 0)
    assert first[:16] != Prompts("another", 16).token_ids(TraceLine(0, 16, 1, [1]), 0)
    assert len(prompts.text(TraceLine(0, 40, 1, [1, 2, 3]), 0).split()) == 40


@given(st.lists(st.floats(0.001, 1000), min_size=1), st.integers(1, 20))
def test_every_value_is_in_one_bin(values: list[float], bins: int) -> None:
    edges = [1001 * number / bins for number in range(bins + 1)]
    assert sum(histogram(values, edges)) == len(values)


def test_amounts_are_formatted_with_units() -> None:
    assert [seconds(each) for each in (0, 0.0042, 0.25, 1.234, 12.34, 123)] == [
        *("0 ms", "4.2 ms", "250 ms", "1.23 s", "12.3 s", "123 s")
    ]
    assert [duration(each) for each in (1, 60, 1200, 9000)] == ["1.0 s", "60 s", "20 min", "2.5 h"]
    assert [amount(each) for each in (7, 1500, 2.5e6)] == ["7", "1.5 k", "2.5 M"]
    assert log_ticks(1, 100, 9) == [1, 2, 5, 10, 20, 50, 100]
