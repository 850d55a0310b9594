"""The example that docs/disaggregation.md begins with runs as it stands."""

from __future__ import annotations

import re
import threading
from pathlib import Path


def test_documented_example_runs() -> None:
    text = (Path(__file__).parents[3] / "docs" / "disaggregation.md").read_text()
    example = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]
    before = set(threading.enumerate())
    exec(example, {"__name__": "example"})
    assert set(threading.enumerate()) <= before
