"""The generated pages are current, and settings, metrics and commands named in the text exist."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from types import ModuleType

import pytest
from doc_pages import DOCS, ROOT, inline_code
from pydantic import BaseModel

from router.settings import Settings


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_reference", DOCS / "make_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_generated_pages_are_current(script: ModuleType) -> None:
    pages = script.pages()
    assert {path.name for path in (DOCS / "reference").iterdir()} == set(pages)
    for name, text in pages.items():
        assert (DOCS / "reference" / name).read_text() == text, "run `make docs-reference`"


def test_every_setting_has_a_description(script: ModuleType) -> None:
    rows = [line.split(" | ") for line in script.config_page().splitlines() if line.startswith("| `")]
    assert len(rows) > 100
    # The names of these settings describe them.
    silent = {row[0].strip("| `") for row in rows if not row[-1].strip(" |")}
    assert silent <= {"workers[].url", "models.<name>.tokenizer", "tenants.named.<name>.tokens_per_minute"}


FILES = (".json", ".jsonl", ".py", ".yaml")
OF_OTHERS = {"upstream.address"}  # an attribute of Envoy's


def test_settings_named_in_the_text_exist() -> None:
    """Look up each name among the settings and the values of the chart."""
    values = json.loads((ROOT / "deploy/helm/kvrouter/values.schema.json").read_text())["properties"]
    sections = {name: field.annotation for name, field in Settings.model_fields.items()}
    checked = 0
    for code in {code.partition(":")[0] for code in inline_code()} - OF_OTHERS:
        section, _, name = code.partition(".")
        kind = sections.get(section)
        if name.isidentifier() and not code.endswith(FILES) and isinstance(kind, type) and issubclass(kind, BaseModel):
            assert name in {*kind.model_fields, *values.get(section, {}).get("properties", {})}, code
            checked += 1
    assert checked > 40


def test_metrics_named_in_the_text_exist() -> None:
    """Look up each name in docs/metrics.md, which another test compares with the code."""
    metrics = (DOCS / "metrics.md").read_text()
    named = {name for code in inline_code() for name in re.findall(r"\bkvrouter_[a-z_]+", code)}
    assert len(named) > 40
    assert {name for name in named if name not in metrics} == set()


def test_commands_named_in_the_text_exist(script: ModuleType) -> None:
    names = {name.partition(" ")[0] for name, _ in script.registered_commands()}
    named = {found[1] for code in inline_code() if (found := re.match(r"kvrouter ([a-z][\w-]*)", code))}
    assert len(named) > 8
    assert named <= names
