"""State machines of hypothesis, of both cores of the index."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings

from indexer.indexer import make_index
from indexer.native import CORE_VARIABLE


def case_of(machine: Any, core: str, examples: int, steps: int) -> Any:
    """The test of a machine that asks `make_index` for its index, which is of this core."""

    class OfCore(machine):  # type: ignore[misc]
        def make_index(self) -> Any:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv(CORE_VARIABLE, core)
                return make_index()

    OfCore.TestCase.settings = settings(max_examples=examples, stateful_step_count=steps, deadline=None)
    return OfCore.TestCase
