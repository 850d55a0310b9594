"""A CycloneDX bill of materials of the image, and its known vulnerabilities.

    python deploy/audit.py [--output sbom.json]

The exit status is 1 if there are vulnerabilities. If no advisory database is reachable, a message says so, and the
status is 0, or 2 with `--strict`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

REQUIREMENTS = Path(__file__).parent / "requirements.txt"
DATABASE = "https://api.osv.dev/v1/querybatch"
_SECONDS = 20


@dataclass(frozen=True)
class Package:
    """A pinned package, and the SHA-256 of its files."""

    name: str
    version: str
    hashes: tuple[str, ...]

    @property
    def purl(self) -> str:
        """The package URL."""
        return f"pkg:pypi/{self.name.lower()}@{self.version}"


def pinned_packages(text: str) -> list[Package]:
    """Return the packages of a requirements file with hashes."""
    entries = re.split(r"\n(?=[A-Za-z0-9])", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).strip())
    found = []
    for entry in entries:
        pin = re.match(r"([\w.-]+)==([^\s;]+)", entry)
        if pin is None:
            raise ValueError(f"no pinned package: {entry.splitlines()[0]}")
        found.append(Package(pin[1], pin[2], tuple(re.findall(r"--hash=sha256:([0-9a-f]{64})", entry))))
    return found


def bill_of_materials(packages: list[Package]) -> dict[str, Any]:
    """Return the packages as CycloneDX 1.6."""
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": {"type": "application", "name": "kvrouter"}},
        "components": [
            {
                "type": "library",
                "bom-ref": each.purl,
                "name": each.name,
                "version": each.version,
                "purl": each.purl,
                "hashes": [{"alg": "SHA-256", "content": digest} for digest in each.hashes],
            }
            for each in packages
        ],
    }


def known_vulnerabilities(packages: list[Package], database: str = DATABASE) -> dict[str, list[str]]:
    """Return the advisories of packages by package URL. Raises OSError without an answer."""
    queries = [{"package": {"purl": each.purl}} for each in packages]
    request = Request(database, json.dumps({"queries": queries}).encode(), {"content-type": "application/json"})
    try:
        with urlopen(request, timeout=_SECONDS) as answer:
            results = json.load(answer)["results"]
    except (URLError, ValueError, KeyError) as error:
        raise OSError(str(error)) from error
    return {
        each.purl: [advisory["id"] for advisory in result["vulns"]]
        for each, result in zip(packages, results, strict=True)
        if result.get("vulns")
    }


def main(arguments: list[str] | None = None) -> int:
    """Write the bill of materials, ask for vulnerabilities, and return the exit status."""
    parser = argparse.ArgumentParser(description="List the image's packages and their known vulnerabilities.")
    parser.add_argument("--output", type=Path, default=Path("sbom.json"), help="file for the bill of materials")
    parser.add_argument("--database", default=DATABASE, help="an advisory database with OSV's API")
    parser.add_argument("--strict", action="store_true", help="fail if the database is unreachable")
    options = parser.parse_args(arguments)
    packages = pinned_packages(REQUIREMENTS.read_text())
    options.output.write_text(json.dumps(bill_of_materials(packages), indent=1) + "\n")
    print(f"{len(packages)} packages: {options.output}")
    try:
        found = known_vulnerabilities(packages, options.database)
    except OSError as error:
        print(f"not checked for vulnerabilities: {options.database} is unreachable: {error}", file=sys.stderr)
        return 2 if options.strict else 0
    for purl, advisories in found.items():
        print(f"{purl}: {', '.join(advisories)}")
    print(f"{len(found)} packages with known vulnerabilities")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
