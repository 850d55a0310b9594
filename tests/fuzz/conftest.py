"""Fuzzers use the workers and routers of the end-to-end tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "end_to_end")]
