"""What is generated in docs/reference is current, and what is listed by hand is complete."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import pytest
from doc_pages import DOCS


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_reference", DOCS / "make_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_reference_is_current(script: ModuleType) -> None:
    pages = script.pages()
    assert {path.name for path in (DOCS / "reference").iterdir()} == set(pages)
    for name, text in pages.items():
        assert (DOCS / "reference" / name).read_text() == text, "run `make docs-reference`"


def test_every_setting_is_told_of(script: ModuleType) -> None:
    rows = [line.split(" | ") for line in script.config_page().splitlines() if line.startswith("| `")]
    assert len(rows) > 100
    # These are said by their names, or by the words above them.
    silent = {row[0].strip("| `") for row in rows if not row[-1].strip(" |")}
    assert silent <= {"workers[].url", "models.<name>.tokenizer", "tenants.named.<name>.tokens_per_minute"}
