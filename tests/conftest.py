"""Every run tries the same examples, so that a run says something about the change it tests.

`pytest --hypothesis-profile=default` looks for new ones.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def logs_as_they_come() -> Iterator[None]:
    """Commands that run in this process set up logging for themselves alone."""
    yield
    structlog.reset_defaults()
