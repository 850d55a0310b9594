"""The cluster that the tests use, and the table of what a load lost."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "deploy"))

ROWS = pytest.StashKey[list[tuple[str, int, int]]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[ROWS] = []


@pytest.fixture(scope="session")
def kubeconfig() -> str:
    """Return the kubeconfig of the cluster that `run.py` made, or that the user named."""
    return os.environ["KUBECONFIG"]


@pytest.fixture(scope="session")
def image() -> str:
    """Return the name of the image of this clone, which the cluster's nodes have or can pull."""
    return os.environ["IMAGE"]


@pytest.fixture
def rows(request: pytest.FixtureRequest) -> list[tuple[str, int, int]]:
    """Return the rows of the table that is printed at the end: what happened, requests, lost ones."""
    return request.config.stash[ROWS]


@pytest.fixture(scope="session")
def folder() -> Path:
    """Return the folder of the node that `run.py` made. On other clusters, skip the test, which acts on the node."""
    if "CLUSTER_FOLDER" not in os.environ:
        pytest.skip("acts on the node: runs only on the cluster that this command makes")
    return Path(os.environ["CLUSTER_FOLDER"])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if rows := config.stash[ROWS]:
        terminalreporter.write_line("\n| under load | requests | lost |\n|---|---|---|")
        for what, requests, lost in rows:
            terminalreporter.write_line(f"| {what} | {requests:,} | {lost} |")
