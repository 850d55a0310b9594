"""The live page in a real browser, with simulated workers in processes of their own behind the router."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from chromium import accessible, expect, launched, playwright
from router_under_test import RouterUnderTest, router, until

from kvrouter.processes import KvrouterProcess
from router.observability.advice import advised

pytestmark = pytest.mark.browser

SECONDS = 20_000  # milliseconds, as Playwright counts


@asynccontextmanager
async def opened(url: str, **options: Any) -> AsyncIterator[Any]:
    """Open the page in a browser, and assert that it reports no errors."""
    errors: list[str] = []
    async with playwright.async_playwright() as drives:
        browser = await launched(drives)
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
    """Keep a few conversations running."""

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


async def save_screenshot(page: Any, name: str) -> None:
    if folder := os.environ.get("SCREENSHOTS"):
        await page.screenshot(path=Path(folder) / f"{name}.png", full_page=True)


async def test_page_follows_worker_that_dies_and_returns() -> None:
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
        await save_screenshot(page, "ten-workers")

        process, url = fleet[3]
        row = rows.filter(has_text=url.removeprefix("http://"))
        process.send_signal(signal.SIGKILL)
        await expect(row.locator(".state.bad").first).to_have_text("down", timeout=SECONDS)
        await expect(rows.first).to_contain_text(url.removeprefix("http://"))  # the worst come first
        await save_screenshot(page, "a-worker-is-down")
        port = url.rpartition(":")[2]
        async with workers(1, "--port", port):
            await expect(row.locator(".state").first).not_to_have_text("down", timeout=SECONDS)


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_page_asks_for_token(scheme: str) -> None:
    async with (
        workers(1) as fleet,
        router(fleet[0][1], server={"token": "admin"}) as routed,
        opened(routed.url, color_scheme=scheme) as page,
    ):
        await expect(page.locator("#status")).to_contain_text("token is required", timeout=SECONDS)
        await accessible(page)
        await page.keyboard.type("wrong")
        await page.keyboard.press("Enter")
        await expect(page.locator("#status")).to_contain_text("invalid")
        await page.fill("#token", "admin")
        await page.keyboard.press("Enter")
        await expect(page.locator("#rows .row")).to_have_count(1, timeout=SECONDS)
        await accessible(page)


async def test_page_scrolls_smoothly_with_thousand_ranks() -> None:
    async with (
        workers(8, "--dp-size", "125", "--blocks", "2048") as fleet,
        router(*(url for _, url in fleet)) as routed,
        traffic(routed),
        opened(routed.url) as page,
    ):
        await expect(page.locator("#states")).to_contain_text("1000 ranks", timeout=3 * SECONDS)
        await expect(page.locator("#rows .row")).to_have_count(8)  # the ranks of a worker are folded
        await page.uncheck("#grouped")
        assert 8 < await page.locator("#rows .row").count() < 60  # only those in sight are made
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
        await save_screenshot(page, "a-thousand-ranks")
        before = await routed.metric("kvrouter_requests_total")

        await until(lambda: routed.metric("kvrouter_requests_total"), lambda value: value > before)


MEASURE_FRAMES = """
() => {
  window.intervals = [];
  let last = performance.now();
  const next = (now) => { window.intervals.push(now - last); last = now; requestAnimationFrame(next); };
  requestAnimationFrame(next);
}
"""


async def test_screenshot_of_readme() -> None:
    """SCREENSHOTS=docs/pictures writes the picture again."""
    async with (
        workers(8, "--blocks", "512", "--max-model-len", "4096") as fleet,
        router(*(url for _, url in fleet)) as routed,
        traffic(routed),
        opened(routed.url) as page,
    ):
        await page.set_viewport_size({"width": 1280, "height": 1000})
        await expect(page.locator("#rows .row")).to_have_count(8, timeout=SECONDS)
        seconds = 90 if os.environ.get("SCREENSHOTS") else 5

        await until(lambda: page.evaluate(f"series.length > {seconds / 2}"), seconds=seconds + 30)
        assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        if folder := os.environ.get("SCREENSHOTS"):
            await page.screenshot(path=Path(folder) / "page.png")


# Charts and rows of a given feed


def rank(worker: str, requests: int = 0, **more: Any) -> dict[str, Any]:
    """Return a rank of the feed."""
    return {
        "worker": worker,
        "dp_rank": 0,
        "model": "m",
        "state": "ready",
        "reason": None,
        "role": "both",
        "requests": requests,
        "pending": 10 * requests,
        "context": 0,
        "others": 0,
        "kv_usage": 0.5,
        "stream": "live",
        "held": {"gpu": 1000, "cpu": 0, "disk": 0, "unknown": 0},
        "capacity": 4000,
        "lag_ms": 1,
        "seq": 7,
        "gaps": 0,
        "replays": 0,
        "lost": 0,
        **more,
    }


def point(time: int, **more: Any) -> dict[str, Any]:
    """Return a sample of the series."""
    nothing = dict.fromkeys(
        ("requests", "errors", "refused", "retried", "prompt", "overlap", "generated", "saved"), 0.0
    )
    unknown = dict.fromkeys(("predicted", "cached", "ttft_p50", "ttft_p90"))
    return {"time": time, "waiting": {}, **nothing, **unknown, **more}


@asynccontextmanager
async def page_with_feed(
    series: list[dict[str, Any]], ranks: list[dict[str, Any]], width: int = 1280, **more: Any
) -> Any:
    """Open the page with a feed of one update."""
    update = {
        "time": 0,
        "ranks": {f"{each['worker']} {each['dp_rank']} {each['model']}": each for each in ranks},
        "gone": [],
        "totals": {"workers": len(ranks), "up": len(ranks), "requests": 0, "queued": 0, "waiting": {}},
        "series": series,
        "requests": [],
        **more,
    }

    async def answer(route: Any) -> None:
        await route.fulfill(content_type="text/event-stream", body=f"data: {json.dumps(update)}\n\n")

    async with router("http://127.0.0.1:9") as routed, playwright.async_playwright() as drives:
        browser = await launched(drives)
        try:
            page = await browser.new_page(viewport={"width": width, "height": 900})
            await page.route("**/live", answer)
            await page.goto(f"{routed.url}/ui")
            await expect(page.locator("#rows .row").first).to_be_visible(timeout=SECONDS)
            yield page
        finally:
            await browser.close()


async def test_single_samples_between_gaps_are_drawn_to_scale() -> None:
    series = [point(time) for time in range(0, 40, 2)]
    series[5] |= {"ttft_p50": 0.031, "ttft_p90": 0.045}  # a sample between gaps
    for place in (10, 11, 12):
        series[place] |= {"ttft_p50": 0.02}
    async with page_with_feed(series, [rank("http://w-1")]) as page:
        assert await page.locator("#ttft circle").count() == 2
        heights = await page.locator("#ttft circle").evaluate_all("all => all.map(each => +each.getAttribute('cy'))")
        # 45 ms is near the top of a scale that ends at 50 ms.
        assert min(heights) < 25
        assert "50 ms" in await page.locator("#ttft .tick").all_text_contents()
        line = await page.locator("#ttft path").first.get_attribute("d")
        assert line.count("M") == 2
        assert line.count("L") == 2


@pytest.mark.parametrize("width", [1280, 390])
async def test_chart_labels_are_neither_cut_nor_stretched(width: int) -> None:
    series = [point(time, ttft_p50=0.0123, ttft_p90=123.4, prompt=1234567.0, saved=0.003) for time in range(0, 40, 2)]
    async with page_with_feed(series, [rank("http://w-1")], width) as page:
        texts = page.locator("svg.chart text")
        assert await texts.count() >= 6 * 4
        for measured in await texts.evaluate_all(MEASURE_TEXTS):
            assert measured["inside"], measured
            assert measured["stretched"] == pytest.approx(1, abs=0.02), measured
        assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        cut = "all => all.filter(each => each.scrollWidth > each.clientWidth).map(each => each.textContent)"
        assert await page.locator("#columns [role=columnheader]:visible").evaluate_all(cut) == []


MEASURE_TEXTS = """
(all) => all.map((each) => {
  const place = each.getBoundingClientRect(), own = each.getBBox();
  const chart = each.ownerSVGElement.getBoundingClientRect();
  const across = place.left >= chart.left - 0.5 && place.right <= chart.right + 0.5;
  return {text: each.textContent, stretched: (place.width / own.width) / (place.height / own.height),
          inside: across && place.top >= chart.top - 1 && place.bottom <= chart.bottom + 1};
})
"""


async def test_phone_shows_few_columns_and_details_in_row() -> None:
    ranks = [rank(f"http://worker-with-a-long-name-{number}.inference.svc:8000", number) for number in range(3)]
    async with page_with_feed([point(0), point(2)], ranks, 390) as page:
        shown = page.locator("#columns [role=columnheader]:visible")
        assert await shown.all_text_contents() == ["worker", "state", "held: gpu, cpu, disk", "requests"]
        is_cut = "each.scrollWidth > each.clientWidth || each.scrollHeight > each.clientHeight + 1"
        cut = f"all => all.filter(each => {is_cut}).map(each => each.textContent)"
        assert await page.locator("#columns [role=columnheader]:visible").evaluate_all(cut) == []
        assert await page.locator("#rows [data-column=worker]").evaluate_all(cut) == []
        assert await page.evaluate("document.querySelector('#scroll').scrollWidth <= innerWidth")
        await page.locator("#rows .row").first.click()
        await expect(page.locator("#detail")).to_contain_text("role both; holds 1,000 tokens (1,000 gpu)")
        await accessible(page)
        await save_screenshot(page, "phone")


async def test_rows_are_reachable_by_keyboard() -> None:
    ranks = [rank(f"http://w-{number:03}") for number in range(200)]
    async with page_with_feed([point(0), point(2)], ranks) as page:
        await page.focus("#filter")
        await page.keyboard.press("Tab")  # the choice to group
        await page.keyboard.press("Tab")  # the region that scrolls
        for _ in range(12):  # the heads of the columns
            await page.keyboard.press("Tab")
        focused = page.locator("#rows .row:focus")
        await expect(focused).to_contain_text("w-000")
        await page.keyboard.press("ArrowDown")
        await page.keyboard.press("ArrowDown")
        await expect(focused).to_contain_text("w-002")
        await page.keyboard.press("Enter")
        await expect(page.locator("#detail")).to_contain_text("http://w-002 rank 0, m: ready")
        await page.keyboard.press("End")
        await expect(focused).to_contain_text("w-199")
        await expect(focused).to_be_in_viewport()
        await page.keyboard.press("PageUp")
        await expect(focused).not_to_contain_text("w-199")
        await page.keyboard.press("Home")
        await expect(focused).to_contain_text("w-000")
        await accessible(page)


async def test_page_shows_version_findings_and_load_balance() -> None:
    ranks = [rank("http://w-1", 8), rank("http://w-2", 0), rank("http://w-3", 1, state="down")]
    about = {"version": "1.2.3", "build": "compiled", "core": "native", "policy": "kv_aware", "python": "3.11.7"}
    about |= {"models": {"m": {"workers": 2, "tokens": "by fastokens"}}}
    findings = advised([{"finding": "worker_down", "worker": "http://w-3", "detail": "refused the connection"}])
    series = [point(0), point(2, errors=1.5, refused=3, retried=0.5, saved=2.0, waiting={"saturated": 4})]
    async with page_with_feed(series, ranks, about=about, findings=findings) as page:
        await expect(page.locator("#about")).to_have_text("1.2.3 compiled, native index, policy kv_aware")
        await expect(page.locator("#models")).to_have_text("m on 2 workers; tokens by fastokens")
        await expect(page.locator("#wrong-title")).to_have_text("1 finding")
        advice = "Start the worker, or correct its URL"
        told = page.locator("#findings li")
        await expect(told).to_contain_text(f"worker down w-3: refused the connection{advice}")
        await expect(told).to_contain_text("See docs/reference/findings.md#worker_down")
        await expect(told.locator(".state.bad")).to_have_text("worker down")
        cells = page.locator("#strip i")
        await expect(cells).to_have_count(3)
        assert await cells.evaluate_all("all => all.map(each => each.style.getPropertyValue('--load'))") == [
            "100%",
            "0%",
            "15%",
        ]
        await expect(page.locator("#strip i.bad")).to_have_count(1)
        await expect(page.locator("#balance")).to_have_text(
            "Requests in flight: 0 to 8 per rank, mean 3; the busiest, w-1, has 2.7 times that."
        )
        for chart, now in (
            ("failures", "now 1.5 and 3 and 0.5"),
            ("waits", "now 4 and 0"),
            ("saved", "now 2 s"),
        ):
            label = await page.locator(f"#{chart} svg").get_attribute("aria-label")
            assert label.endswith(now), label
        await accessible(page)


async def test_values_are_read_by_pointer_and_keyboard() -> None:
    series = [point(1000 + 2 * number, predicted=number / 20, cached=number / 40) for number in range(20)]
    async with page_with_feed(series, [rank("http://w-1")]) as page:
        readout = page.locator("#hits-readout")
        await expect(readout).to_have_text("")
        box = await page.locator("#hits").bounding_box()
        await page.mouse.move(box["x"] + box["width"] - 5, box["y"] + 40)
        await expect(readout).to_contain_text("predicted 95.0 %, reported by engines 47.5 %")
        await page.mouse.move(0, 0)
        await expect(readout).to_have_text("")
        await page.focus("#hits")
        await page.keyboard.press("Home")
        await expect(readout).to_contain_text("predicted 0.0 %")
        await page.keyboard.press("ArrowRight")
        await expect(readout).to_contain_text("predicted 5.0 %")
        await expect(page.locator("#hits .cursor")).to_have_count(1)
        await accessible(page)
        await page.keyboard.press("Escape")
        await expect(readout).to_have_text("")
        assert await page.evaluate("series.length") == 20  # the feed ended, and was read again


async def test_range_of_charts_is_chosen() -> None:
    series = [point(86_400 + 2 * number) for number in range(200)]
    coarse = {
        "hour": [point(83_000 + 10 * number) for number in range(340)],
        "day": [point(240 * n) for n in range(360)],
    }
    async with page_with_feed(series, [rank("http://w-1")], coarse=coarse) as page:
        label = page.locator("#hits text").filter(has_text="ago")
        await expect(label).to_have_text("5 min ago")
        await page.locator("#ranges button", has_text="1 h").click()
        await expect(label).to_have_text("56.5 min ago")
        await page.locator("#ranges button", has_text="24 h").click()
        await expect(label).to_have_text("23.9 h ago")
        await expect(page.locator("#ranges [aria-pressed=true]")).to_have_text("24 h")


async def test_ranks_of_a_worker_are_folded() -> None:
    ranks = [rank(f"http://w-{number}", 1, dp_rank=place) for number in range(3) for place in range(40)]
    ranks[41]["state"] = "down"
    async with page_with_feed([point(0), point(2)], ranks) as page:
        rows = page.locator("#rows .row")
        await expect(rows).to_have_count(3)
        await expect(rows.first).to_contain_text("w-1")  # the worst state of its ranks
        await expect(rows.first.locator(".state.bad")).to_have_text("down")
        await expect(rows.first.locator("[data-column=requests]")).to_have_text("40")
        await rows.first.click()
        await expect(page.locator("#table")).to_have_attribute("aria-rowcount", "44")
        await expect(rows.first).to_have_attribute("aria-expanded", "true")
        await rows.first.focus()
        await page.keyboard.press("ArrowLeft")
        await expect(rows).to_have_count(3)
        await page.keyboard.press("Enter")
        await expect(page.locator("#table")).to_have_attribute("aria-rowcount", "44")
        await accessible(page)
        await page.uncheck("#grouped")
        await expect(page.locator("#table")).to_have_attribute("aria-rowcount", "121")


async def test_best_ten_of_a_decision_are_shown_and_sorted() -> None:
    candidates = [
        {"worker": f"http://w-{n:02}", "dp_rank": 0, "overlap": 100 - n, "terms": {"prefill": n}, "total": n}
        for n in range(25)
    ]
    told = {"tokens": 7, "choice": {"worker": "http://w-00", "dp_rank": 0}, "held": None, "unit": "tokens"}

    async def answer(route: Any) -> None:
        await route.fulfill(json=told | {"candidates": candidates})

    async with page_with_feed([point(0), point(2)], [rank("http://w-1")]) as page:
        await page.route("**/explain", answer)
        await page.fill("#prompt", "hi")
        await page.click("#explain button")
        rows = page.locator("#explanation tbody tr")
        await expect(rows).to_have_count(10)
        await expect(page.locator("#explanation")).to_contain_text("The best ten of 25; 15 more cost more.")
        await expect(rows.first).to_contain_text("w-00")
        await page.locator("#explanation th button").first.click()
        await page.locator("#explanation th button").first.click()
        await expect(rows.first).to_contain_text("w-09")
        await accessible(page)


async def test_update_of_a_thousand_ranks_takes_at_most_50_ms_of_script() -> None:
    ranks = [rank(f"http://w-{number}", number % 7, dp_rank=place) for number in range(8) for place in range(125)]
    async with page_with_feed([point(2 * number) for number in range(200)], ranks) as page:
        devtools = await page.context.new_cdp_session(page)
        await devtools.send("Performance.enable", {"timeDomain": "threadTicks"})  # CPU time, whatever else runs

        async def spent() -> dict[str, float]:
            answer = await devtools.send("Performance.getMetrics")
            return {each["name"]: each["value"] for each in answer["metrics"]}

        for folded in (True, False):
            await page.set_checked("#grouped", folded)
            await page.evaluate(PREPARE_UPDATES)
            before = await spent()
            await page.evaluate(TAKE_UPDATES)
            after = await spent()
            script, style, layout = (
                1000 * (after[name] - before[name]) / 20
                for name in ("ScriptDuration", "RecalcStyleDuration", "LayoutDuration")
            )
            rows = "folded by worker" if folded else "not folded"
            print(f"an update of 1,000 ranks, {rows}: {script:.1f} ms of script, {style + layout:.1f} ms of layout")
            assert script <= 50


PREPARE_UPDATES = """
() => {
  window.events = [];
  for (let number = 0; number < 20; number++) {
    const changed = {};
    for (const [key, row] of ranks) changed[key] = {...row, requests: row.requests + number % 3, pending: number};
    events.push(JSON.stringify({gone: [], ranks: changed, requests: [], series: [], totals, time: 0}));
  }
}
"""
TAKE_UPDATES = """
async () => {
  for (const event of events) {
    take(JSON.parse(event));
    await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
  }
}
"""
