"""The live page in a real browser, with simulated workers in processes of their own behind the router."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from chromium import CHROMIUM, SWITCHES, accessible, expect, playwright
from router_under_test import RouterUnderTest, router, until

from kvrouter.processes import KvrouterProcess

pytestmark = [pytest.mark.browser, pytest.mark.anyio]

SECONDS = 20_000  # milliseconds, as Playwright counts


@asynccontextmanager
async def opened(url: str, **options: Any) -> AsyncIterator[Any]:
    """A page in a browser, which must not complain."""
    errors: list[str] = []
    async with playwright.async_playwright() as drives:
        browser = await drives.chromium.launch(executable_path=CHROMIUM, args=SWITCHES)
        try:
            page = await browser.new_page(viewport={"width": 1400, "height": 1200}, **options)
            page.on("pageerror", lambda error: errors.append(str(error)))
            await page.goto(f"{url}/ui")
            yield page
        finally:
            await browser.close()
    assert errors == []


@asynccontextmanager
async def workers(count: int, *options: str) -> AsyncIterator[list[tuple[KvrouterProcess, str]]]:
    """Simulated workers in processes of their own."""
    async with AsyncExitStack() as stack:
        started = [stack.enter_context(KvrouterProcess(["simulate", *options])) for _ in range(count)]
        yield [(each, await asyncio.to_thread(each.wait_until_listening)) for each in started]


@asynccontextmanager
async def traffic(routed: RouterUnderTest) -> AsyncIterator[None]:
    """A few conversations that go on."""

    async def converse(number: int) -> None:
        turn = 0
        while True:
            turn += 1
            messages = [
                {"role": "system", "content": f"You are assistant {number % 2}. " * 30},
                {"role": "user", "content": f"question {turn % 7} " * 10},
            ]
            with suppress(Exception):  # a worker may die
                await routed.call("/v1/chat/completions", {"model": "simulated", "max_tokens": 4, "messages": messages})
            await asyncio.sleep(0.05)

    talking = [asyncio.create_task(converse(number)) for number in range(4)]
    try:
        yield
    finally:
        for task in talking:
            task.cancel()
        await asyncio.gather(*talking, return_exceptions=True)


async def shoot(page: Any, name: str) -> None:
    if folder := os.environ.get("SCREENSHOTS"):
        await page.screenshot(path=Path(folder) / f"{name}.png", full_page=True)


async def test_ten_workers_one_of_which_dies_and_comes_back() -> None:
    async with (
        workers(10) as fleet,
        router(*(url for _, url in fleet)) as routed,
        traffic(routed),
        opened(routed.url) as page,
    ):
        rows = page.locator("#rows .row")
        await expect(rows).to_have_count(10, timeout=SECONDS)
        await expect(page.locator("#status")).to_have_text("live")
        await expect(page.locator("#requests details").first).to_be_visible(timeout=SECONDS)
        await expect(page.locator("#prefixes details").first).to_be_visible(timeout=SECONDS)
        await expect(page.locator("#hits path").first).to_have_attribute("d", re.compile("M.*L"), timeout=SECONDS)
        await page.locator("#prefixes summary").first.click()
        await expect(page.locator("#prefixes details[open] code").first).to_be_visible()
        await page.locator("#requests summary").first.click()
        await expect(page.locator("#requests details[open] td").filter(has_text="cost of").first).to_be_visible()

        await page.select_option("#model", "simulated")
        await page.fill("#prompt", "Where would this go?")
        await page.keyboard.press("Tab")
        await page.locator("#explain button").press("Enter")
        await expect(page.locator("#explanation tbody tr")).to_have_count(10, timeout=SECONDS)
        await accessible(page)
        await shoot(page, "ten-workers")

        process, url = fleet[3]
        row = rows.filter(has_text=url.removeprefix("http://"))
        process.send_signal(signal.SIGKILL)
        await expect(row.locator(".state.bad").first).to_have_text("down", timeout=SECONDS)
        await expect(rows.first).to_contain_text(url.removeprefix("http://"))  # the worst come first
        await shoot(page, "a-worker-is-down")
        port = url.rpartition(":")[2]
        async with workers(1, "--port", port):
            await expect(row.locator(".state").first).not_to_have_text("down", timeout=SECONDS)


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_the_token_is_asked_for(scheme: str) -> None:
    async with (
        workers(1) as fleet,
        router(fleet[0][1], server={"token": "admin"}) as routed,
        opened(routed.url, color_scheme=scheme) as page,
    ):
        await expect(page.locator("#status")).to_contain_text("token is needed", timeout=SECONDS)
        await accessible(page)
        await page.keyboard.type("wrong")
        await page.keyboard.press("Enter")
        await expect(page.locator("#status")).to_contain_text("not right")
        await page.fill("#token", "admin")
        await page.keyboard.press("Enter")
        await expect(page.locator("#rows .row")).to_have_count(1, timeout=SECONDS)
        await accessible(page)


async def test_a_thousand_ranks_stay_smooth() -> None:
    async with (
        workers(8, "--dp-size", "125", "--blocks", "2048") as fleet,
        router(*(url for _, url in fleet)) as routed,
        traffic(routed),
        opened(routed.url) as page,
    ):
        await expect(page.locator("#states")).to_contain_text("1000 ranks", timeout=3 * SECONDS)
        assert await page.locator("#rows .row").count() < 60  # only those in sight are made
        await page.evaluate(MEASURE_FRAMES)
        for top in range(0, 30_000, 3_000):
            await page.evaluate(f"document.getElementById('scroll').scrollTop = {top}")
            await asyncio.sleep(0.3)
        frames = await page.evaluate("window.intervals")
        assert len(frames) > 60
        late = sum(each > 200 for each in frames)
        print(f"{len(frames)} frames, longest {max(frames):.0f} ms, {late} above 200 ms")
        assert late <= len(frames) / 20
        await expect(page.locator("#rows .row").first).to_be_visible()
        await page.fill("#filter", fleet[0][1].removeprefix("http://"))
        await expect(page.locator("#table")).to_have_attribute("aria-rowcount", "126", timeout=SECONDS)
        await accessible(page)
        await shoot(page, "a-thousand-ranks")
        before = await routed.metric("kvrouter_requests_total")

        async def goes_on() -> bool:
            return await routed.metric("kvrouter_requests_total") > before

        await until(goes_on)


MEASURE_FRAMES = """
() => {
  window.intervals = [];
  let last = performance.now();
  const next = (now) => { window.intervals.push(now - last); last = now; requestAnimationFrame(next); };
  requestAnimationFrame(next);
}
"""
