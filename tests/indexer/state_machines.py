"""Test cases of hypothesis state machines for a core of the index."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings

from indexer.indexer import make_index
from indexer.native import CORE_VARIABLE


def case_of(machine: Any, core: str, examples: int, steps: int) -> Any:
    """Return the test case of a machine whose `make_index` creates an index of this core."""

    class OfCore(machine):  # type: ignore[misc]
        def make_index(self) -> Any:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv(CORE_VARIABLE, core)
                return make_index()

    OfCore.TestCase.settings = settings(max_examples=examples, stateful_step_count=steps, deadline=None)
    return OfCore.TestCase
