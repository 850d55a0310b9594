"""Clients and load generators of other projects, in processes of their own, through a router on simulated workers.

CLIENTS_DIR  the environment with the clients of requirements.txt
ENGINE_DIR   an installation of vLLM, for its load generator; without one that test is skipped
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from router_under_test import RouterUnderTest, router
from simulated_workers import simulated_workers

from simulator.worker.settings import BUNDLED_MODEL

pytestmark = pytest.mark.clients

CLIENTS = Path(os.environ.get("CLIENTS_DIR", ".clients")).absolute()
VLLM = Path(os.environ.get("ENGINE_DIR", ".engine")).absolute() / "venv"
PROGRAMS = Path(__file__).parent / "programs"
MODEL = "simulated"
SECONDS = 300  # for each client, whose imports alone need many on a busy machine
# LiteLLM has a list of prices, and otherwise downloads a newer one.
OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}


@dataclass(frozen=True)
class Row:
    """The requests of one client, as the router counted them."""

    client: str
    requests: float
    failed: float
    prompt_tokens: float
    predicted: float
    cached: float


@pytest.fixture(scope="module")
def table() -> Iterator[list[Row]]:
    """The rows of all clients, which are printed at the end."""
    rows: list[Row] = []
    yield rows
    print(f"\n{'client':<52}{'requests':>10}{'failed':>8}{'prompt tokens':>15}{'predicted':>11}{'cached':>9}")
    for row in rows:
        share = [f"{each / row.prompt_tokens:.1%}" for each in (row.predicted, row.cached)]
        print(f"{row.client:<52}{row.requests:>10.0f}{row.failed:>8.0f}{row.prompt_tokens:>15.0f}", end="")
        print(f"{share[0]:>11}{share[1]:>9}")


@pytest.fixture
async def routed() -> AsyncIterator[RouterUnderTest]:
    """A router on two workers with empty caches."""
    async with simulated_workers(2) as urls, router(*urls) as routed:
        await routed.until_live()
        yield routed


async def run(*command: str | Path) -> str:
    """Run a client and return its output. The test fails if the client does."""
    process = await asyncio.create_subprocess_exec(
        *map(str, command),
        env=os.environ | OFFLINE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), SECONDS)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, output.decode()[-8000:]
    return output.decode()


async def version(python: Path, *distributions: str) -> str:
    """Return the names and versions of distributions."""
    ask = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"
    versions = (await run(python, "-c", ask, *distributions)).split()
    return ", ".join(f"{name} {version}" for name, version in zip(distributions, versions, strict=True))


async def row_of(routed: RouterUnderTest, client: str) -> Row:
    """Count what a client sent, after its last answer."""
    await routed.until_released()
    total = await routed.metric("kvrouter_requests_total")
    refused = await routed.metric("kvrouter_requests_refused_total")
    answered = await routed.metric("kvrouter_requests_total", status="200")
    return Row(
        client,
        total + refused,
        total + refused - answered,
        await routed.metric("kvrouter_audit_prompt_tokens_total"),
        await routed.metric("kvrouter_audit_predicted_tokens_total"),
        await routed.metric("kvrouter_audit_cached_tokens_total"),
    )


def exported(folder: Path, name: str) -> Any:
    """Return the report that a load generator wrote below a folder."""
    [path] = folder.rglob(name)
    return json.loads(path.read_text())


def assert_served_from_caches(row: Row, requests: int) -> None:
    """Assert that all requests were answered, and that prompts were cached where the router predicted it."""
    assert row.failed == 0
    assert row.requests >= requests
    assert row.cached > 0.3 * row.prompt_tokens
    assert abs(row.predicted - row.cached) <= 0.05 * row.prompt_tokens


@pytest.mark.parametrize(
    ("program", "distributions"),
    [
        ("openai_client", ["openai"]),
        ("anthropic_client", ["anthropic"]),
        ("litellm_client", ["litellm"]),
        ("langchain_client", ["langchain-openai", "langchain-anthropic"]),
    ],
)
async def test_program_is_served(
    routed: RouterUnderTest, table: list[Row], program: str, distributions: list[str]
) -> None:
    python = CLIENTS / "bin" / "python"
    sent = int((await run(python, PROGRAMS / f"{program}.py", routed.url)).split()[-1])
    table.append(await row_of(routed, await version(python, *distributions)))
    assert_served_from_caches(table[-1], sent)


async def test_aiperf_finds_no_errors(routed: RouterUnderTest, table: list[Row], tmp_path: Path) -> None:
    options = {
        "model": MODEL,
        "url": routed.url,
        "endpoint-type": "chat",
        "tokenizer": BUNDLED_MODEL,
        "concurrency": 4,
        "conversation-num": 8,
        "conversation-turn-mean": 4,
        "conversation-turn-stddev": 0,
        "synthetic-input-tokens-mean": 200,
        "output-tokens-mean": 8,
        "random-seed": 1,
        "ui": "none",
        "artifact-dir": tmp_path,
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    await run(CLIENTS / "bin" / "aiperf", "profile", "--streaming", *words)
    report = exported(tmp_path, "profile_export_aiperf.json")
    table.append(await row_of(routed, await version(CLIENTS / "bin" / "python", "aiperf")))
    assert report["request_count"]["avg"] == 32
    assert not report.get("error_summary")
    assert_served_from_caches(table[-1], 32)


@pytest.mark.skipif(not (VLLM / "bin" / "vllm").exists(), reason="make test-engine installs vLLM")
async def test_vllm_bench_serve_finds_no_errors(routed: RouterUnderTest, table: list[Row], tmp_path: Path) -> None:
    options = {
        "backend": "openai-chat",
        "base-url": routed.url,
        "endpoint": "/v1/chat/completions",
        "model": MODEL,
        "tokenizer": BUNDLED_MODEL,
        "dataset-name": "prefix_repetition",
        "prefix-repetition-prefix-len": 256,
        "prefix-repetition-suffix-len": 32,
        "prefix-repetition-num-prefixes": 4,
        "prefix-repetition-output-len": 8,
        "num-prompts": 40,
        "max-concurrency": 4,
        "seed": 1,
        "result-dir": tmp_path,
        "result-filename": "result.json",
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    await run(VLLM / "bin" / "vllm", "bench", "serve", "--save-result", *words)
    result = exported(tmp_path, "result.json")
    table.append(await row_of(routed, await version(VLLM / "bin" / "python", "vllm")))
    assert (result["completed"], result.get("failed", 0)) == (40, 0)
    assert_served_from_caches(table[-1], 40)
