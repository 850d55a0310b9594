"""Fixtures of several tests of the worker."""

from __future__ import annotations

import pytest

import worker.reporter


@pytest.fixture
def steps_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reporter sends what its caller's steps send, however long the machine pauses between two calls."""
    monkeypatch.setattr(worker.reporter, "MAX_DELAY_S", 3600.0)
