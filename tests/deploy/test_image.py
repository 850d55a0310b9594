"""The container image and the compose file, and the search for vulnerabilities with a database served by the test."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "deploy" / "compose"
DOCKERFILE = ROOT / "deploy" / "Dockerfile"


def instructions() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile, with what follows each."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(word, rest.strip()) for word, _space, rest in (line.partition(" ") for line in text.splitlines() if line)]


def last_stage() -> list[tuple[str, str]]:
    found = instructions()
    begin = max(place for place, (word, _rest) in enumerate(found) if word == "FROM")
    return found[begin:]


def test_base_image_is_pinned_by_digest() -> None:
    arguments = dict(rest.split("=", 1) for word, rest in instructions() if word == "ARG")
    bases = [rest.split()[0] for word, rest in instructions() if word == "FROM"]
    assert len(bases) == 2
    for base in bases:
        assert re.fullmatch(r"[\w./-]+:\d+\.\d+\.\d+-[\w-]+@sha256:[0-9a-f]{64}", arguments[base.strip("${}")])


def test_image_runs_as_a_numeric_non_root_user() -> None:
    [user] = [rest for word, rest in last_stage() if word == "USER"]
    assert int(user.split(":")[0]) > 0


def test_last_stage_installs_no_packages() -> None:
    runs = " ".join(rest for word, rest in last_stage() if word == "RUN")
    assert "pip uninstall" in runs
    assert not re.search(r"\binstall (?!-d )|apt-get|curl|wget", runs.replace("uninstall", ""))


def test_image_has_a_health_check() -> None:
    [check] = [rest for word, rest in last_stage() if word == "HEALTHCHECK"]
    command = json.loads(check[check.index("CMD ") + 4 :])
    compile(command[-1], "healthcheck", "exec")
    assert "/health" in command[-1]


def test_copied_files_exist_and_are_not_ignored() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    allowed = [line.removeprefix("!") for line in ignored if line.startswith("!")]
    assert "*" in ignored
    for word, rest in instructions():
        if word == "COPY" and not rest.startswith("--from"):
            for source in shlex.split(rest)[:-1]:
                assert (ROOT / source).exists()
                assert any(fnmatch(source, pattern) or source.startswith(f"{pattern}/") for pattern in allowed)


def test_image_contains_every_package_of_the_project() -> None:
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    copied = {part for word, rest in instructions() if word == "COPY" for part in rest.split()[:-1]}
    assert set(packages["packages"]) <= copied


def test_dependencies_are_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "deploy" / "constraints.txt").read_text().lower().splitlines()
    pinned = {line.split("==")[0].replace("_", "-") for line in lines if "==" in line}
    [extras] = re.findall(r'"\.\[([\w,-]+)\]"', DOCKERFILE.read_text())
    wanted = project["dependencies"] + [
        each for extra in extras.split(",") for each in project["optional-dependencies"][extra]
    ]
    names = {re.match(r"[\w-]+", each)[0].lower().replace("_", "-") for each in wanted}  # type: ignore[index]
    assert names <= pinned


def test_requirements_have_hashes_and_pinned_versions() -> None:
    pins = dict(
        line.replace("_", "-").lower().split("==")
        for line in (ROOT / "deploy" / "constraints.txt").read_text().splitlines()
        if "==" in line
    )
    for name in ("requirements.txt", "requirements-build.txt"):
        text = re.sub(r"^#.*\n", "", (ROOT / "deploy" / name).read_text(), flags=re.MULTILINE)
        for entry in re.split(r"\n(?=\S)", text.strip()):
            package, version = re.match(r"([\w.-]+)==([^\s;]+)", entry).groups()  # type: ignore[union-attr]
            assert "--hash=sha256:" in entry, package
            assert pins.get(package.lower(), version) == version, package
        assert f"--require-hashes --requirement {name}" in DOCKERFILE.read_text()


@pytest.mark.helm
def test_hadolint_passes() -> None:
    linted = subprocess.run([Path(sys.executable).parent / "hadolint", DOCKERFILE], capture_output=True, text=True)
    assert linted.returncode == 0, linted.stdout


def compose() -> dict[str, Any]:
    return yaml.safe_load((COMPOSE / "compose.yaml").read_text())


def test_compose_services_are_restricted_and_pinned() -> None:
    services = compose()["services"]
    assert services.keys() == {"router", "worker-1", "worker-2", "prometheus", "grafana"}
    for name, service in services.items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["healthcheck"]["test"][0] == "CMD", name
        assert service["mem_limit"], name
        assert service["image"] == "kvrouter" or re.search(r":v?\d+\.\d+\.\d+$", service["image"]), name
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), name


def test_compose_mounts_exist() -> None:
    document = compose()
    for service in document["services"].values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert source in document["volumes"] or (COMPOSE / source).exists()
        for name in service.get("depends_on", {}):
            assert name in document["services"]


def test_prometheus_and_grafana_target_the_compose_services() -> None:
    services = compose()["services"]
    config = yaml.safe_load((COMPOSE / "prometheus.yaml").read_text())
    targets = [t for job in config["scrape_configs"] for each in job["static_configs"] for t in each["targets"]]
    assert {target.split(":")[0] for target in targets} == {"router", "worker-1", "worker-2"}
    [source] = yaml.safe_load((COMPOSE / "grafana" / "datasource.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    [provider] = yaml.safe_load((COMPOSE / "grafana" / "dashboards.yaml").read_text())["providers"]
    assert any(volume.split(":")[1] == provider["options"]["path"] for volume in services["grafana"]["volumes"])


SCRIPT = Path(__file__).parents[2] / "deploy" / "audit.py"


@pytest.fixture(scope="module")
def audit() -> ModuleType:
    spec = spec_from_file_location("audit", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    import sys

    sys.modules["audit"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def database() -> Iterator[str]:
    """A database that knows a vulnerability of the first package only."""

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))["queries"]
            body = json.dumps({"results": [{"vulns": [{"id": "TEST-1"}]}, *({} for _ in asked[1:])]}).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    server = HTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_bill_of_materials_lists_every_package_with_hashes(audit: ModuleType, tmp_path: Path, database: str) -> None:
    assert audit.main(["--output", str(tmp_path / "sbom.json"), "--database", database]) == 1
    bill = json.loads((tmp_path / "sbom.json").read_text())
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    assert {"uvicorn", "fastapi", "jiter"} <= {each["name"] for each in bill["components"]}
    assert all(each["hashes"] and each["purl"].startswith("pkg:pypi/") for each in bill["components"])


def test_known_vulnerabilities_are_named(audit: ModuleType, database: str) -> None:
    packages = [audit.Package("a", "1", ()), audit.Package("b", "2", ())]
    assert audit.known_vulnerabilities(packages, database) == {"pkg:pypi/a@1": ["TEST-1"]}


def test_missing_database_is_reported(audit: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--output", str(tmp_path / "sbom.json"), "--database", "http://127.0.0.1:1/"]
    assert audit.main(options) == 0
    assert "not checked for vulnerabilities" in capsys.readouterr().err
    assert audit.main([*options, "--strict"]) == 2
