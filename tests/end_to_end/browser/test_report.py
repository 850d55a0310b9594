"""The report of a replay in a real browser: in simulation and of routers, light and dark."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest
from chromium import accessible, expect, launched, playwright
from router_under_test import router

from kvrouter.tools.traces.run import DEFAULT_POLICIES
from simulator.worker import SimulatedWorkerSettings
from simulator.worker.serve import running

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "trace.jsonl"
    lines = [
        {
            "timestamp": 40 * number,
            "input_length": 512 * (2 + number // 10) + 100,
            "output_length": 4 + number % 7,
            "hash_ids": [0, *(number % 10 * 100 + block for block in range(2 + number // 10))],
        }
        for number in range(40)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


async def written(trace: Path, *options: str) -> Path:
    """Run the command and return the path of its report."""
    page = trace.with_suffix(".html")
    command = (sys.executable, "-m", "kvrouter", "replay-trace", str(trace), "-o", str(page), *options)
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 0, output.decode()
    return page


async def check_report(page: Path, name: str, runs: int, title: str) -> None:
    """Assert that a report is complete and accessible in light, dark and narrow browsers."""
    complaints: list[str] = []
    requested: list[str] = []
    async with playwright.async_playwright() as drives:
        browser = await launched(drives)
        try:
            for scheme, width in (("light", 1280), ("dark", 1280), ("dark", 420)):
                opened = await browser.new_page(
                    viewport={"width": width, "height": 900},
                    color_scheme=scheme,  # type: ignore[arg-type]
                )
                opened.on("pageerror", lambda error: complaints.append(str(error)))
                opened.on("console", lambda message: complaints.append(message.text))
                opened.on("request", lambda request: requested.append(request.url))
                await opened.goto(page.as_uri())
                await expect(opened.locator("#compared")).to_have_text(title)
                await expect(opened.locator("section").first.locator("tbody tr")).to_have_count(runs)
                await expect(opened.locator("polyline.curve")).to_have_count(runs + 1)  # and the cache's
                await opened.locator("summary").first.press("Enter")
                await expect(opened.locator("details table").first).to_be_visible()
                assert await opened.evaluate("document.documentElement.scrollWidth <= innerWidth")
                await accessible(opened)
                if folder := os.environ.get("SCREENSHOTS"):
                    await opened.screenshot(path=Path(folder) / f"{name}-{scheme}-{width}.png", full_page=True)
        finally:
            await browser.close()
    assert complaints == []
    assert {url.partition(":")[0] for url in requested} <= {"file", "data"}


async def test_report_compares_policies(trace: Path) -> None:
    page = await written(trace, "--workers", "4", "--kv-tokens", "30000")
    await check_report(page, "policies", len(DEFAULT_POLICIES), "Results of each policy")


async def test_report_compares_routers(trace: Path) -> None:
    quick = SimulatedWorkerSettings(prefill_s_per_token=1e-5, base_step_s=0.001)
    async with (
        running(quick) as one,
        running(quick) as two,
        router(one, two) as ours,
        router(one, two, policy={"name": "round_robin"}) as theirs,
    ):
        page = await written(trace, "--url", f"ours={ours.url}", "--url", f"theirs={theirs.url}")
    await check_report(page, "routers", 2, "Results of each router")
