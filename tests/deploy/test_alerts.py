"""The alert rules: Prometheus' own tool tests when they fire, and each links to its runbook."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "helm" / "kvrouter" / "files" / "alerts.yaml"
CASES = Path(__file__).parent / "alerts_test.yaml"
RUNBOOKS = "docs/troubleshooting.md"

_promtool = pytest.mark.promtool


def alerts() -> list[dict[str, Any]]:
    """The rules."""
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


@pytest.fixture
def promtool() -> str:
    found = shutil.which("promtool")
    assert found, "make test-alerts brings promtool"
    return found


@_promtool
def test_promtool_accepts_the_rules(promtool: str) -> None:
    checked = subprocess.run([promtool, "check", "rules", str(RULES)], capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@_promtool
def test_promtool_cases_fire_as_expected(promtool: str, tmp_path: Path) -> None:
    rules = yaml.safe_load(RULES.read_text())
    for rule in rules["groups"][0]["rules"]:
        del rule["annotations"]  # the cases are about when, not about words
    (tmp_path / "alerts.yaml").write_text(yaml.safe_dump(rules))
    shutil.copy(CASES, tmp_path)
    tested = subprocess.run(
        [promtool, "test", "rules", CASES.name], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_every_alert_has_a_firing_and_a_silent_case() -> None:
    cases = yaml.safe_load(CASES.read_text())["tests"]
    fired = {each["alertname"] for case in cases for each in case["alert_rule_test"] if each.get("exp_alerts")}
    silent = {each["alertname"] for case in cases for each in case["alert_rule_test"] if not each.get("exp_alerts")}
    names = {rule["alert"] for rule in alerts()}
    assert fired == names
    assert silent == names


def test_every_alert_links_to_its_runbook() -> None:
    page = (ROOT / RUNBOOKS).read_text()
    headings = {line.removeprefix("### ").lower() for line in page.splitlines() if line.startswith("### Kvrouter")}
    for rule in alerts():
        assert rule["annotations"]["runbook_url"] == f"{RUNBOOKS}#{rule['alert'].lower()}"
        assert rule["alert"].lower() in headings
    assert headings == {rule["alert"].lower() for rule in alerts()}
