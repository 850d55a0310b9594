"""`kvrouter picker --endpoint-picker-config`: what is refused ends the command, and what is ignored is listed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvrouter.cli import app

FILE = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- {type: queue-scorer}
- {type: PLUGIN}
schedulingProfiles:
- {name: default, plugins: [{pluginRef: queue-scorer, weight: 2}]}
"""


def run(folder: Path, plugin: str, *options: str) -> Any:
    (folder / "epp.yaml").write_text(FILE.replace("PLUGIN", plugin))
    file = ["--endpoint-picker-config", str(folder / "epp.yaml")]
    return CliRunner().invoke(app, ["picker", "--worker", "http://127.0.0.1:1", *file, *options])


def test_refused_plugins_end_the_command(tmp_path: Path) -> None:
    result = run(tmp_path, "label-selector-filter")
    assert result.exit_code == 1
    assert "epp.yaml cannot be served:\nplugins: label-selector-filter: " in result.stderr


@pytest.mark.parametrize(("options", "policy"), [((), "least_loaded"), (("--policy", "round_robin"), "round_robin")])
def test_settings_of_the_file_are_used_unless_an_option_replaces_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], policy: str
) -> None:
    served: list[Any] = []
    monkeypatch.setattr("router.server.serving.serve_picker", lambda settings, _: served.append(settings))
    monkeypatch.setattr("kvrouter.commands.services.run_service", lambda *_: None)
    result = run(tmp_path, "max-score-picker", *options)
    assert result.exit_code == 0, result.output
    assert served[0].policy.name == policy
    assert "ignored: weight 2 of queue-scorer: the policy has one cost" in result.stderr
