"""Real SGLang workers, each set started for the tests of one module or one test, and the table of results.

SGLANG_DIR    where the engine is installed (see `installation.py`)
SGLANG_TABLE  a file to write the table to, as Markdown
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.servers import running
from engine.sglang.installation import SglangInstallation
from engine.sglang.servers import SglangWorker
from engine.sglang.table import Table


@pytest.fixture(scope="session")
def installation() -> SglangInstallation:
    found = SglangInstallation(Path(os.environ.get("SGLANG_DIR", ".engine/sglang")).absolute())
    if not found.complete():
        pytest.fail(f"no SGLang in {found.directory}: run `make test-engine-sglang`")
    return found


@pytest.fixture(scope="session")
def logs(installation: SglangInstallation) -> Path:
    """The folder of the servers' logs."""
    return installation.directory / "logs"


@pytest.fixture(scope="session")
def table() -> Iterator[Table]:
    """The table of results, which is printed and written at the end."""
    table = Table()
    yield table
    print(f"\n{table}")
    if path := os.environ.get("SGLANG_TABLE"):
        Path(path).write_text(f"{table}\n")


@pytest.fixture(scope="module")
def fleet(installation: SglangInstallation, logs: Path) -> Iterator[list[SglangWorker]]:
    """Two workers with an adapter."""
    lora = ("--enable-lora", "--lora-backend", "torch_native", "--max-lora-rank", "8")
    adapter = ("--lora-paths", f"poet={installation.adapter('poet')}")
    workers = [SglangWorker(f"worker{number}", installation, logs, *lora, *adapter) for number in range(2)]
    with running(*workers):
        yield workers
