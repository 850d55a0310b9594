"""The application of docs/ray.md, saved and started by the commands of that page."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.ray
PAGE = Path(__file__).parents[3] / "docs/ray.md"


def test_application_of_the_page_answers(tmp_path: Path) -> None:
    page = PAGE.read_text()
    code, commands = (page.partition(f"```{language}\n")[2].partition("```")[0] for language in ("python", "text"))
    (tmp_path / "app.py").write_text(code)
    _, run, request = commands.split("\n", 2)
    serve, curl = shlex.split(run), [*shlex.split(request), "--silent", "--max-time", "10"]
    serve[0] = str(Path(sys.executable).parent / serve[0])
    log = tmp_path / "log"
    with log.open("wb") as output:
        environment = os.environ | {"RAY_ADDRESS": "local"}  # another Ray than that of the other tests
        served = subprocess.Popen(
            serve, cwd=tmp_path, env=environment, stdout=output, stderr=output, preexec_fn=_receive_interrupts
        )
        try:
            for _ in range(60):
                assert served.poll() is None, log.read_text()
                asked = subprocess.run(curl, capture_output=True, timeout=60, check=False)
                if asked.stdout.startswith(b"{"):
                    break
                time.sleep(1)
            assert json.loads(asked.stdout)["usage"]["completion_tokens"] == 8, log.read_text()
        finally:
            served.send_signal(signal.SIGINT)
            served.wait(120)


def _receive_interrupts() -> None:
    # Tests that a shell runs in the background inherit that it ignores them.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
