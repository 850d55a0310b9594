"""The files around the code: workflows that call commands that exist, one version, metadata of the wheel."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def steps(workflow: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for job in workflow["jobs"].values():
        yield from job.get("steps", [])


def make_targets() -> set[str]:
    return set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_have_limits_and_call_existing_targets(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"]
    for name, job in workflow["jobs"].items():
        assert "timeout-minutes" in job or "uses" in job, name  # a called workflow has its own
        checks = job.get("strategy", {}).get("matrix", {}).get("check", [])
        assert set(checks) <= make_targets()
    for step in steps(workflow):
        for target in re.findall(r"\bmake ([\w-]+)", step.get("run", "")):
            assert target in make_targets()
        for script in re.findall(r"\bbash (\S+)", step.get("run", "")):
            assert (ROOT / script).is_file()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_by_digest(path: Path) -> None:
    used = re.findall(r"uses: (.+)", path.read_text())
    assert used
    for each in used:
        assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+|\./\.github/workflows/\w+\.yml", each), each


def test_changelog_begins_with_unreleased() -> None:
    headings = re.findall(r"^## (.+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased"


def test_wheel_names_its_licence() -> None:
    assert PROJECT["license"] == "Apache-2.0"
    assert all((ROOT / name).is_file() for name in PROJECT["license-files"])


def test_issue_templates_are_valid() -> None:
    for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"):
        template = yaml.safe_load(path.read_text())
        assert path.name == "config.yml" or (template["name"] and template["body"])
