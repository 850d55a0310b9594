"""Decides what a release contains. It needs nothing but Python; .github/workflows/ calls it.

    python deploy/release.py agree --tag v1.2.3           every file names this version
    python deploy/release.py notes --home URL --image REGISTRY/OWNER/kvrouter
    python deploy/release.py stamp --home URL --ref v1.2.3 --image REGISTRY/OWNER/kvrouter

`stamp` changes files of the checkout: it is for a fresh one. release_check.py rehearses the release.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
CHART = "deploy/helm/kvrouter"
VALUES = f"{CHART}/values.yaml"
# The files that name the version, and the places of it. Where a file has several, all are equal.
VERSIONS = {
    "pyproject.toml": r'^version = "(.+)"$',
    f"{CHART}/Chart.yaml": r"^(?:version|appVersion): (.+)$",
    "docs/kubernetes.md": r"/kvrouter:(\d+\.\d+\.\w+)",
}
URLS = """[project.urls]
Source = "{home}"
Documentation = "{home}/tree/{ref}/docs"
Changelog = "{home}/blob/{ref}/CHANGELOG.md"
Issues = "{home}/issues"

"""


class ReleaseError(Exception):
    """A fault of the release: the file, and what to change in it."""


def version_of(root: Path) -> str:
    """Return the version. Raises ReleaseError if two files disagree."""
    found: dict[str, set[str]] = {
        name: set(re.findall(pattern, (root / name).read_text(), re.MULTILINE)) for name, pattern in VERSIONS.items()
    }
    project = found["pyproject.toml"]
    if len(project) != 1:
        raise ReleaseError("pyproject.toml: has no version: add one to [project]")
    [version] = project
    for name, versions in found.items():
        if versions != project:
            names = " and ".join(sorted(versions)) or "no version"
            raise ReleaseError(f"{name}: names {names}, but pyproject.toml {version}: write {version} in both")
    return version


def section_of(changelog: str, version: str) -> str:
    """Return the text of a version in the changelog. Raises ReleaseError if it has none."""
    begin = re.search(rf"^## {re.escape(version)}(?: .*)?$", changelog, re.MULTILINE)
    if begin is None:
        raise ReleaseError(f"CHANGELOG.md: has no section of {version}: add '## {version} (date)' after 'Unreleased'")
    section = re.split(r"^## ", changelog[begin.end() :], maxsplit=1, flags=re.MULTILINE)[0].strip()
    if not section and version != "Unreleased":
        raise ReleaseError(f"CHANGELOG.md: the section of {version} is empty: write what users see of it")
    return section


def agree(root: Path, tag: str | None = None) -> str:
    """Return the version of all files, which is the tag's. Raises ReleaseError."""
    version = version_of(root)
    changelog = (root / "CHANGELOG.md").read_text()
    section_of(changelog, version)
    if tag is not None and tag != f"v{version}":
        raise ReleaseError(f"pyproject.toml: the tag {tag} is not v{version}: change the version, or tag v{version}")
    if tag is not None and section_of(changelog, "Unreleased"):
        raise ReleaseError(f"CHANGELOG.md: 'Unreleased' has entries: move them to the section of {version}")
    return version


def notes(root: Path, home: str, image: str) -> str:
    """Return the text of the release's page: the changelog, how to install it, how to verify it."""
    version = version_of(root)
    section = with_absolute_links(section_of((root / "CHANGELOG.md").read_text(), version), home, f"v{version}")
    return f"""{section}

## Installation

    pip install 'kvrouter[router]=={version}'
    helm install kvrouter oci://{image}/charts/kvrouter --version {version} --values values.yaml
    docker run --rm --publish 127.0.0.1:8080:8080 {image}:{version} serve --worker http://gpu-1:8000

The workflow of the release signs the image and the chart. For `charts/kvrouter` verify them in the same way:

    cosign verify {image}:{version} \\
      --certificate-identity {home}/.github/workflows/release.yml@refs/tags/v{version} \\
      --certificate-oidc-issuer https://token.actions.githubusercontent.com
"""


def with_absolute_links(text: str, home: str, ref: str) -> str:
    """Return Markdown whose links to files of the project work outside of the repository."""

    def absolute(link: re.Match[str]) -> str:
        kind = "raw" if re.search(r"\.(png|svg)$", link[1]) else "blob"
        return f"]({home}/{kind}/{ref}/{link[1]})"

    return re.sub(r"\]\((?!https?:|#)([^)\s]+)\)", absolute, text)


def stamp(root: Path, home: str, ref: str, image: str | None = None) -> None:
    """Write into the files of a checkout where the project lives and, for the chart, where its image is.

    - `home`: URL of the repository.
    - `ref`: tag or branch that links name.
    - `image`: registry and name of the image. With `None` the chart keeps its image.
    """
    if "[project.urls]" in (root / "pyproject.toml").read_text():
        raise ReleaseError("pyproject.toml: has [project.urls] already: stamp a fresh checkout")
    urls = URLS.format(home=home, ref=ref)
    _replace(root, "pyproject.toml", r"(?=^\[project.optional-dependencies\]$)", urls)
    readme = root / "README.md"
    readme.write_text(with_absolute_links(readme.read_text(), home, ref))
    _replace(root, f"{CHART}/Chart.yaml", r"\Z", f"home: {home}\n")
    _replace(root, VALUES, r"(?<=runbooks: )docs/", f"{home}/blob/{ref}/docs/")
    if image is not None:
        registry, _, repository = image.partition("/")
        _replace(root, VALUES, r'(?<=^  registry: )""', registry)
        _replace(root, VALUES, r"(?<=^  repository: )kvrouter$", repository)


def _replace(root: Path, name: str, pattern: str, text: str) -> None:
    path = root / name
    written, count = re.subn(pattern, lambda _: text, path.read_text(), count=1, flags=re.MULTILINE)
    if not count:
        raise ReleaseError(f"{name}: nothing matches {pattern}: change the file, or `stamp` in deploy/release.py")
    path.write_text(written)


def main(arguments: list[str] | None = None) -> int:
    """Run one command, and return the exit status."""
    parser = argparse.ArgumentParser(description="Decide what a release contains.")
    commands = parser.add_subparsers(dest="command", required=True)
    agreeing = commands.add_parser("agree", help="compare the versions of all files")
    agreeing.add_argument("--tag", help="the tag of the release, for example v1.2.3")
    noting = commands.add_parser("notes", help="print the notes of the release")
    stamping = commands.add_parser("stamp", help="write the home of the project into its files")
    for command in (noting, stamping):
        command.add_argument("--home", required=True, help="URL of the repository")
        command.add_argument("--image", required=command is noting, help="registry and name of the image")
    stamping.add_argument("--ref", required=True, help="tag or branch that links name")
    options = parser.parse_args(arguments)
    try:
        if options.command == "agree":
            print(agree(ROOT, options.tag))
        elif options.command == "notes":
            print(notes(ROOT, options.home, options.image))
        else:
            stamp(ROOT, options.home, options.ref, options.image)
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
