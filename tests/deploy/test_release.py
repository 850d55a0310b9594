"""A release: one version everywhere, notes, and files that name the home of the project and its image."""

from __future__ import annotations

import re
import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import yaml

ROOT = Path(__file__).parents[2]
HOME, IMAGE = "https://forge.example/team/kvrouter", "registry.example/team/kvrouter"
FILES = ("pyproject.toml", "CHANGELOG.md", "README.md", "docs/kubernetes.md")
CHART = Path("deploy/helm/kvrouter")
CHANGELOG = """# Changelog

## Unreleased

## 1.10.0 (2027-01-02)

- See [the API](docs/api.md#calls), [a picture](docs/a.svg) and [the format](https://example.com/).

## 1.1.0 (2027-01-01)

- Older.
"""


@pytest.fixture(scope="module")
def release() -> Iterator[ModuleType]:
    sys.path.insert(0, str(ROOT / "deploy"))
    try:
        import release

        yield release
    finally:
        sys.path.remove(str(ROOT / "deploy"))


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The files that a release reads, of version 1.10.0."""
    for name in (*FILES, CHART / "Chart.yaml", CHART / "values.yaml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    current = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for name in ("pyproject.toml", CHART / "Chart.yaml", "docs/kubernetes.md"):
        change(tmp_path / name, current, "1.10.0")
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    return tmp_path


def change(path: Path, old: str, new: str) -> None:
    """Replace a text, which the file must have."""
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def test_files_of_the_project_agree_on_a_version(release: ModuleType) -> None:
    assert release.agree(ROOT) == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_tag_is_the_version_of_all_files(release: ModuleType, checkout: Path) -> None:
    assert release.agree(checkout, "v1.10.0") == "1.10.0"


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        (CHART / "Chart.yaml", "appVersion: 1.10.0", "appVersion: 1.9.0", "Chart.yaml: names 1.10.0 and 1.9.0"),
        ("docs/kubernetes.md", "kvrouter:1.10.0", "kvrouter:1.9.0", "docs/kubernetes.md: names 1.9.0"),
        ("CHANGELOG.md", "## 1.10.0 ", "## 1.10.0rc1 ", r"CHANGELOG.md: has no section of 1.10.0: add '## 1.10.0"),
        ("CHANGELOG.md", "- See ", "## 1.9.0\n\n- See ", "CHANGELOG.md: the section of 1.10.0 is empty: write"),
        ("CHANGELOG.md", "## Unreleased\n", "## Unreleased\n- New.\n", "'Unreleased' has entries: move them"),
        ("pyproject.toml", 'version = "1.10.0"\n', 'dynamic = ["version"]\n', "pyproject.toml: has no version: add"),
    ],
)
def test_disagreement_names_file_and_fix(
    release: ModuleType, checkout: Path, name: str, old: str, new: str, message: str
) -> None:
    change(checkout / name, old, new)
    with pytest.raises(release.ReleaseError, match=message):
        release.agree(checkout, "v1.10.0")


def test_wrong_tag_is_refused(release: ModuleType, checkout: Path) -> None:
    with pytest.raises(release.ReleaseError, match=r"the tag v1\.10 is not v1\.10\.0"):
        release.agree(checkout, "v1.10")


def test_notes_are_the_section_of_the_version(release: ModuleType, checkout: Path) -> None:
    notes = release.notes(checkout, HOME, IMAGE)
    assert notes.startswith(
        f"- See [the API]({HOME}/blob/v1.10.0/docs/api.md#calls), [a picture]({HOME}/raw/v1.10.0/docs/a.svg)"
        " and [the format](https://example.com/)."
    )
    assert "Older" not in notes
    assert f"oci://{IMAGE}/charts/kvrouter --version 1.10.0" in notes
    assert f"cosign verify {IMAGE}:1.10.0" in notes
    assert f"{HOME}/.github/workflows/release.yml@refs/tags/v1.10.0" in notes


def test_stamped_checkout_names_home_and_image(release: ModuleType, checkout: Path) -> None:
    release.stamp(checkout, HOME, "v1.10.0", IMAGE)
    project = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]
    assert project["urls"]["Source"] == HOME
    assert all(url.startswith(HOME) for url in project["urls"].values())
    assert project["optional-dependencies"]["router"]
    links = re.findall(r"\]\((.+?)\)", (checkout / "README.md").read_text())
    assert f"{HOME}/raw/v1.10.0/docs/drawings/fleet.svg" in links
    assert all(link.startswith("https://") for link in links)
    values = yaml.safe_load((checkout / CHART / "values.yaml").read_text())
    assert (values["image"]["registry"], values["image"]["repository"]) == ("registry.example", "team/kvrouter")
    assert values["monitoring"]["prometheusRule"]["runbooks"] == f"{HOME}/blob/v1.10.0/docs/troubleshooting.md"
    assert yaml.safe_load((checkout / CHART / "Chart.yaml").read_text())["home"] == HOME


def test_wheels_are_stamped_without_an_image(release: ModuleType, checkout: Path) -> None:
    release.stamp(checkout, HOME, "v1.10.0")
    assert yaml.safe_load((checkout / CHART / "values.yaml").read_text())["image"]["registry"] == ""


def test_second_stamp_is_refused(release: ModuleType, checkout: Path) -> None:
    release.stamp(checkout, HOME, "v1.10.0", IMAGE)
    with pytest.raises(release.ReleaseError, match=r"pyproject\.toml: .* stamp a fresh checkout"):
        release.stamp(checkout, HOME, "v1.10.0", IMAGE)


def test_release_publishes_what_was_tested_and_signs_it() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]
    assert set(jobs["publish"]["needs"]) == {"check", "wheels", "chart"}
    assert jobs["publish"]["environment"] == "release"
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    for name in ("signed-image", "chart"):
        assert jobs[name]["permissions"]["id-token"] == "write"
        assert any("cosign sign --yes" in step.get("run", "") for step in jobs[name]["steps"])
    platforms = {each["platform"] for each in jobs["image"]["strategy"]["matrix"]["include"]}
    assert platforms == {"linux/amd64", "linux/arm64"}


def test_command_prints_the_error(release: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert release.main(["agree", "--tag", "v0"]) == 1
    assert capsys.readouterr().err.startswith("release: pyproject.toml: the tag v0 is not v")
