"""The bill of materials and the search for vulnerabilities, with a database served by the test."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

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
