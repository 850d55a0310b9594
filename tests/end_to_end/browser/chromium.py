"""Chromium, driven by Playwright: found on the PATH, or where CHROMIUM says.

Screenshots go to the folder SCREENSHOTS, if that is set. Without the packages of `make test-browser` tests are skipped.
"""

from __future__ import annotations

import json
import os
import shutil
from typing import Any

import pytest

playwright = pytest.importorskip("playwright.async_api", reason="make test-browser installs it")
axe = pytest.importorskip("axe_playwright_python.async_playwright", reason="make test-browser installs it")
expect = playwright.expect

_CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
_SWITCHES = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking", "--disable-sync"]


async def launched(drives: Any) -> Any:
    """Launch the browser. The test fails if Chromium is not installed."""
    if _CHROMIUM is None:
        pytest.fail("no Chromium on the PATH: install one, or say by CHROMIUM where it is")
    return await drives.chromium.launch(executable_path=_CHROMIUM, args=_SWITCHES)


async def accessible(page: Any) -> None:
    """Assert that axe-core finds no serious violation."""
    found = (await axe.Axe().run(page)).response["violations"]
    serious = [each for each in found if each["impact"] in ("serious", "critical")]
    assert serious == [], json.dumps([(each["id"], [n["html"][:200] for n in each["nodes"][:3]]) for each in serious])
