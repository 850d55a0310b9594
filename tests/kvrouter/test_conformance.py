"""Tests of `kvrouter replay --check`, which compares an indexer with recordings of real engines."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import aiohttp
import pytest
import zmq
from aiohttp import web
from aiohttp.test_utils import TestServer, unused_port
from click.testing import Result
from typer.testing import CliRunner

from kvrouter.cli import app
from kvrouter.processes import KvrouterProcess
from kvrouter.tools.replay.check import Score
from kvrouter.tools.replay.run import IndexerAddress, Place, check_recordings

DATA = Path(__file__).parents[1] / "data"
# By recording: the requests that the indexer predicts correctly, and all requests. No event explains the rest.
RIGHT = {
    "a_shared_system_prompt_2workers": (60, 60),
    "c_pressure_evictions": (90, 90),
    "c_pressure_evictions.vllm-0.16.0": (90, 90),
    "c_pressure_evictions.vllm-0.22.0": (90, 90),
    "c_pressure_evictions.vllm-0.24.0": (90, 90),
    "d_reset_prefix_cache": (5, 7),
    "e_dp2": (53, 53),
    "g_lora_salt_block64": (50, 50),
    "i_restart_seq_reset_and_replay_truncation": (41, 42),
    "k_report_mode_full_pressure": (80, 80),
    "l_hybrid_swa": (40, 40),
    "s1_sglang_radix_page16_evict": (299, 300),
    "s1_sglang_radix_page16_evict.sglang-0.4.6.post5": (299, 300),
    "s1_sglang_radix_page16_evict.sglang-0.5.20": (299, 300),
    "s3_sglang_salt_page32": (150, 150),
}


@pytest.fixture(scope="module")
def indexer() -> Iterator[str]:
    with KvrouterProcess(["indexer", "--port", "0"]) as process:
        yield process.wait_until_listening()


def recording(name: str) -> Path:
    (path,) = DATA.rglob(f"{name}.kvrec")
    return path


def check(indexer: str, name: str, **given: Any) -> Score:
    options: dict[str, Any] = {"requests": None, "place": Place(), "speed": None, "model": None, "verbose": False}
    (score,) = asyncio.run(check_recordings([recording(name)], indexer=IndexerAddress(indexer), **(options | given)))
    return score


def replay(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["replay", *map(str, arguments)], env={"COLUMNS": "200"})


def test_every_recording_has_its_score() -> None:
    recordings = {*DATA.rglob("*.kvrec")} - {*DATA.glob("pools/*")}  # with a pool, a device is not the whole truth
    assert {path.stem for path in recordings} == set(RIGHT)


@pytest.mark.parametrize("name", RIGHT)
def test_indexer_matches_equal_engine_answers(indexer: str, name: str) -> None:
    score = check(indexer, name)
    assert (score.right, score.requests) == RIGHT[name]
    assert score.ghosts == 0
    with urlopen(f"{indexer}/workers", timeout=60) as answer:
        assert json.load(answer) == {"workers": [], "publishers": []}


def test_exit_status_depends_on_expected_answers(indexer: str) -> None:
    path = recording("d_reset_prefix_cache")
    all_expected = replay(path, "--check", "--indexer", indexer, "--verbose")
    assert all_expected.exit_code == 1
    assert re.search(r"d_reset_prefix_cache +5/7 +0 ", all_expected.stdout)
    assert "request 4, 385 tokens: the engine has 0, the indexer source 0: 384" in all_expected.stdout
    assert replay(path, "--check", "--indexer", indexer, "--expect", "5").exit_code == 0
    assert replay(path, "--check", "--indexer", indexer, "--expect", "6").exit_code == 1


def test_check_without_indexer_starts_own_one() -> None:
    checked = replay(recording("e_dp2"), recording("s3_sglang_salt_page32"), "--check")
    assert checked.exit_code == 0, checked.output
    assert re.search(r"e_dp2 +53/53 +0 .*\n.*s3_sglang_salt_page32 +150/150 +0 ", checked.stdout)


def test_check_sends_token_to_indexer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVROUTER_SERVER__TOKEN", "s3cret")
    with KvrouterProcess(["indexer", "--port", "0"]) as process:
        url = process.wait_until_listening()
        assert replay(recording("e_dp2"), "--check", "--indexer", url).exit_code == 0
        refused = replay(recording("e_dp2"), "--check", "--indexer", url, "--token", "other")
    assert refused.exit_code == 1
    assert f"{url}/register answers 401" in refused.output


def test_check_can_use_recorded_pace(indexer: str) -> None:
    assert check(indexer, "s3_sglang_salt_page32", speed=0.5).seconds >= 1.2


def test_check_accepts_model_and_requests(indexer: str, tmp_path: Path) -> None:
    lines = [line for line in requests_of("g_lora_salt_block64") if line.get("model") == "tiny"]
    few = tmp_path / "few.jsonl"
    few.write_text("".join(json.dumps(line) + "\n" for line in lines))
    score = check(indexer, "g_lora_salt_block64", requests=few, model="tiny")
    assert (score.right, score.requests) == (len(lines), len(lines))


def test_check_names_ranks_missing_in_recording(indexer: str, tmp_path: Path) -> None:
    (line, *_) = (line for line in requests_of("e_dp2") if line["kind"] == "chat")
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps(line | {"headers": {"x-data-parallel-rank": "7"}}))
    checked = replay(recording("e_dp2"), "--check", "--requests", other, "--indexer", indexer)
    assert checked.exit_code == 1
    assert "worker 0, rank 7 is not recorded" in checked.output


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file has no requests"),
        (b"\n", "line 1: "),
        (b'{"kind": "chat", "t_start": 1}\n', "line 1: .*prompt_token_ids"),
        (b'{"kind": "admin"}\n{"kind": "other"}', "line 2: "),
        (b"\xff\xfe\n", "line 1: "),
    ],
)
def test_check_names_unreadable_requests(tmp_path: Path, content: bytes, message: str) -> None:
    requests = tmp_path / "bad.jsonl"
    requests.write_bytes(content)
    checked = replay(recording("e_dp2"), "--check", "--requests", requests, "--indexer", "http://127.0.0.1:1")
    assert checked.exit_code == 1
    assert re.search(f"kvrouter: {requests}: {message}", checked.output)


def test_check_finds_requests_beside_recording(tmp_path: Path) -> None:
    alone = tmp_path / "alone.kvrec"
    shutil.copy(recording("e_dp2"), alone)
    checked = replay(alone, "--check", "--indexer", "http://127.0.0.1:1")
    assert checked.exit_code == 1
    assert "alone.requests.jsonl(.gz) beside it" in checked.output


def test_check_reports_unreachable_indexer() -> None:
    url = f"http://127.0.0.1:{unused_port()}"
    checked = replay(recording("e_dp2"), "--check", "--indexer", url)
    assert checked.exit_code == 1
    assert f"kvrouter: {url} cannot be reached" in checked.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--expect", "3"], "need --check"),
        (["--fast", "--speed", "2"], "either --speed or --fast"),
        (["--check", "--bind-host", "0.0.0.0"], "--bind-host"),
        (["--bind-host", "192.0.2.1"], "cannot bind"),
    ],
)
def test_contradicting_options_are_rejected(arguments: list[str], message: str) -> None:
    refused = replay(recording("e_dp2"), *arguments)
    assert refused.exit_code == 1
    assert message in refused.output


def test_check_polls_indexer_without_progress_until_answer_settles(indexer: str) -> None:
    async def scored() -> Score:
        async with aiohttp.ClientSession() as session:

            async def pass_on(request: web.Request) -> web.Response:
                url = f"{indexer}{request.path}"
                async with session.post(url, data=await request.read()) as answer:
                    return web.Response(body=await answer.read(), status=answer.status)

            async with server(dict.fromkeys(("/register", "/unregister", "/query"), pass_on)) as url:
                path = recording("d_reset_prefix_cache")
                (score,) = await check_recordings([path], None, Place(), None, IndexerAddress(url), None, False)
                return score

    score = asyncio.run(scored())
    assert (score.right, score.requests) == RIGHT["d_reset_prefix_cache"]


def test_matches_beyond_stored_blocks_are_ghosts() -> None:
    """The indexer of this test reports every prompt as fully cached, without any event for it."""

    async def checked(name: str) -> tuple[Score, int]:
        with zmq.Context() as context, context.socket(zmq.SUB) as sub:
            sub.linger = 0
            sub.subscribe("")

            async def register(request: web.Request) -> web.Response:
                sub.connect((await request.json())["endpoint"])
                return web.json_response({}, status=201)

            async def query(request: web.Request) -> web.Response:
                held = len((await request.json())["token_ids"])
                return web.json_response({"default": {f"{name}/0": {"longest_matched": held, "GPU": held}}})

            async with server({"/register": register, "/query": query}) as url:
                (score,) = await check_recordings(
                    [recording(name)], None, Place(), None, IndexerAddress(url), None, False
                )
                command = await replay_in_thread(recording(name), "--check", "--expect", "0", "--indexer", url)
                return score, command.exit_code

    score, status = asyncio.run(checked("d_reset_prefix_cache"))
    assert score.ghosts > 0
    assert score.right < score.requests
    assert status == 1


async def replay_in_thread(*arguments: object) -> Result:
    """Run the command in a thread, because it starts its own event loop."""
    return await asyncio.to_thread(replay, *arguments)


@asynccontextmanager
async def server(handlers: dict[str, Any]) -> AsyncIterator[str]:
    """A server with these POST paths and no other."""
    served = web.Application(client_max_size=2**24)
    for path, handler in handlers.items():
        served.router.add_post(path, handler)
    async with TestServer(served) as running:
        yield str(running.make_url("")).rstrip("/")


def requests_of(name: str) -> list[dict[str, Any]]:
    text = gzip.decompress((DATA / f"{name}.requests.jsonl.gz").read_bytes())
    return [json.loads(line) for line in text.splitlines()]
