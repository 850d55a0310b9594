"""Tests of `kvrouter config check`, `show` and `default`."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

from kvrouter.cli import app
from router.auth import hashed_key
from router.settings import Settings, load_settings

ROOT = Path(__file__).parents[2]


def config(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["config", *arguments])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "config.yaml"


def test_config_check_accepts_valid_file(file: Path) -> None:
    file.write_text("workers: [{url: 'http://w:1'}]\nkubernetes: {selector: app=vllm}\npolicy: {name: random}")
    checked = config("check", str(file))
    assert checked.exit_code == 0
    assert checked.stdout == f"{file}: no mistakes; 1 worker and the workers of the cluster, policy random\n"


def test_config_check_warns_that_metrics_show_tenants(file: Path) -> None:
    text = "workers: [{{url: 'http://w:1'}}]\nserver: {{token: t{port}}}\n"
    text += "tenants: {{named: {{team-a: {{keys: [{key}]}}}}}}"
    file.write_text(text.format(port="", key=hashed_key("k")))
    warning, last = config("check", str(file)).stdout.splitlines()
    assert "/metrics" in warning
    assert "server.admin_port" in warning
    assert "no mistakes" in last
    file.write_text(text.format(port=", admin_port: 9999", key=hashed_key("k")))
    assert len(config("check", str(file)).stdout.splitlines()) == 1


def test_config_check_reports_all_mistakes(file: Path) -> None:
    file.write_text("server: {prot: 1}\npolcy: {name: random}\nproxy: {attempts: 0}")
    checked = config("check", str(file))
    assert checked.exit_code == 1
    for hint in ("did you mean server.port?", "did you mean policy?", "proxy.attempts: "):
        assert hint in checked.stderr
    assert len(checked.stderr.splitlines()) == 3


def test_config_check_includes_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVROUTER_SEVER__PORT", "1")
    checked = config("check")
    assert checked.exit_code == 1
    assert "KVROUTER_SEVER__PORT: unknown setting; did you mean KVROUTER_SERVER__…?" in checked.stderr


def test_kubernetes_service_variables_are_not_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVROUTER_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("KVROUTER_PORT_8080_TCP", "tcp://10.0.0.1:8080")
    monkeypatch.setenv("KVROUTER_WORKERS", '[{"url": "http://w:1"}]')
    assert config("check").exit_code == 0


def test_config_show_masks_secrets(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text(
        "server: {port: 9000}\nreplicas: {redis: 'redis://u:hidden-1@r:6379/0?password=hidden-2'}\n"
        f"index: {{secret: hidden-3}}\nworkers: [{{url: 'http://u:hidden-4@w:1'}}]\n"
        f"tenants: {{named: {{team: {{keys: ['{'ab' * 32}']}}}}}}"
    )
    monkeypatch.setenv("KVROUTER_SERVER__TOKEN", "hidden-5")
    shown = config("show", str(file))
    assert shown.exit_code == 0
    assert "hidden" not in shown.stdout
    assert "abab" not in shown.stdout
    parsed = yaml.safe_load(shown.stdout)
    assert parsed["server"]["port"] == 9000
    assert parsed["server"]["token"] == "***"
    assert parsed["workers"][0]["url"] == "http://w:1/"
    assert parsed["policy"]["cpu_token"] == 0.1  # no secret, whatever its name


def test_config_show_prints_valid_settings(file: Path, tmp_path: Path) -> None:
    file.write_text("workers: [{url: 'http://w:1', weight: 2}]\nmodels: {m: {tokenizer: /m}}")
    again = tmp_path / "again.yaml"
    again.write_text(config("show", str(file)).stdout)
    assert load_settings(again) == load_settings(file)


def test_default_config_has_every_default(tmp_path: Path) -> None:
    begun = tmp_path / "begun.yaml"
    begun.write_text(config("default").stdout)
    assert begun.read_text() == (ROOT / "config.yaml").read_text()
    assert load_settings(begun) == Settings()


@pytest.mark.install
def test_wheel_contains_default_config(tmp_path: Path) -> None:
    import subprocess
    import sys

    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)],
        check=True,
        timeout=300,
    )
    [wheel] = tmp_path.glob("kvrouter-*.whl")
    with zipfile.ZipFile(wheel) as opened:
        assert opened.read("kvrouter/config.yaml") == (ROOT / "config.yaml").read_bytes()
