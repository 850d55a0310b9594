"""A clock and an index. This file also puts the folder on the path, so that tests below import the helpers here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from manual_clock import Clock

from indexer import Indexer


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def indexer() -> Iterator[Indexer]:
    indexer = Indexer()
    yield indexer
    indexer.stop()
