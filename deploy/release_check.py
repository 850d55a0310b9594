"""Rehearses a release: builds and installs each artifact as far as a machine without a container engine can.

    make release-check [ARGS=--compiled]

It needs the extra `release`. The steps work on a copy of the tracked files, in a temporary folder.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE, STDOUT
from typing import Any

import helm_python
from release import CHART, ROOT, VALUES, VERSIONS, ReleaseError, agree, notes, stamp

NOT_CHECKED = (
    "the image: it needs a container engine (deploy/Dockerfile; `make test-helm` lints it)",
    "signatures of image and chart, and the image's bill of materials: they need the workflow's identity",
    "publishing: the package index, the container registry, the release's page",
    "wheels of other platforms and other Python versions",
)
_SECONDS = 1800  # for each command


class Rehearsal:
    """A release of the tracked files, made in a temporary folder with names of an example."""

    home = "https://forge.example/team/kvrouter"
    image = "registry.example/team/kvrouter"

    def __init__(self, folder: Path) -> None:
        self.source = folder / "source"
        self.artifacts = folder / "artifacts"
        self.environment = folder / "environment"
        self.version = agree(ROOT)

    def check_workflows(self) -> str:
        """Check the workflows against their schema."""
        files = sorted(ROOT.glob(".github/workflows/*.yml"))
        checker = str(Path(sys.executable).parent / "check-jsonschema")
        run([checker, "--builtin-schema", "vendor.github-workflows", *map(str, files)])
        return ", ".join(path.name for path in files)

    def build_sdist(self) -> str:
        """Copy and stamp the tracked files, build the sdist, and a wheel from the sdist."""
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
        for name in filter(None, listed.stdout.split("\0")):
            if (ROOT / name).is_file():
                (self.source / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.source / name)
        stamp(self.source, self.home, f"v{self.version}", self.image)
        run([sys.executable, "-m", "build", "--outdir", str(self.artifacts), str(self.source)])
        run([sys.executable, "-m", "twine", "check", "--strict", *map(str, self.artifacts.iterdir())])
        return ", ".join(sorted(path.name for path in self.artifacts.iterdir()))

    def install_wheel(self) -> str:
        """Install the wheel in an empty environment, and run the demo from there."""
        venv.create(self.environment, with_pip=True)
        [wheel] = self.artifacts.glob("*.whl")
        self._run("python", "-m", "pip", "install", "--quiet", f"{wheel}[demo]")
        return self._try(wheel, "index core: native")

    def install_plain_wheel(self) -> str:
        """Build and install the wheel for all other platforms, which has nothing compiled."""
        plain = self.artifacts / "plain"
        build = [sys.executable, "-m", "build", "--wheel", "--outdir", str(plain), str(self.source)]
        run(build, environment={"HATCH_BUILD_NO_HOOKS": "1"})
        [wheel] = plain.glob("*-py3-none-any.whl")
        return self._try(wheel, "index core: python")

    def install_compiled_wheel(self) -> str:
        """Build the compiled wheel from the sdist as cibuildwheel does, install it, and run its test."""
        settings: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]
        [sdist] = self.artifacts.glob("*.tar.gz")
        with tarfile.open(sdist) as archive:
            archive.extractall(self.artifacts / "compiled", filter="data")
        [unpacked] = (self.artifacts / "compiled").iterdir()
        self._run("sh", "-c", f"{settings['before-build']} build")
        self._run("python", "-m", "build", "--no-isolation", "--wheel", str(unpacked), **settings["environment"])
        [wheel] = (unpacked / "dist").glob("*.whl")
        tried = self._try(wheel, "(compiled; index core: native")
        self._run("sh", "-c", settings["test-command"])
        return tried

    def pack_chart(self) -> str:
        """Pack the chart with the official Helm library, and compare its version and its image with the release's."""
        path = Path(helm_python.package(self.source / CHART, destination=self.artifacts))
        self._expect(path.name, f"kvrouter-{self.version}.tgz", f"{CHART}/Chart.yaml")
        with helm_python.Chart.load(path) as chart:
            rendered = "\n".join(chart.render({}, name="rehearsal", namespace="default").values())
        images = set(re.findall(r'^\s*(?:- )?image: "?([^"\s]+)', rendered, re.MULTILINE))
        if images != {f"{self.image}:{self.version}"}:
            raise ReleaseError(f"{VALUES}: the packed chart names {images}, not {self.image}:{self.version}")
        return f"{path.name}, with the image {self.image}:{self.version}"

    def _expect(self, seen: str, wanted: str, file: str) -> None:
        if wanted not in seen or self.version not in seen:
            raise ReleaseError(f"{file}: expected {wanted!r} of version {self.version}, got {seen!r}")

    def _try(self, wheel: Path, wanted: str) -> str:
        """Install a wheel over the installed one, compare its version, and run the demo."""
        self._run("python", "-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall", str(wheel))
        seen = self._run("kvrouter", "--version").strip()
        self._expect(seen, wanted, "pyproject.toml")
        self._run("kvrouter", "demo", "--conversations=4")
        return f"{wheel.name}: {seen}; the demo ran"

    def _run(self, *command: str, **environment: str) -> str:
        """Run a command of the environment, outside of the clone."""
        path = f"{self.environment}/bin:{os.environ['PATH']}"
        return run([*command], self.environment, {"PATH": path} | environment)


def run(command: list[str], folder: Path = ROOT, environment: dict[str, str] | None = None) -> str:
    """Return a command's output. Raises ReleaseError with the end of it if the command fails."""
    variables = os.environ | (environment or {})
    try:
        done = subprocess.run(
            command, cwd=folder, env=variables, stdout=PIPE, stderr=STDOUT, text=True, timeout=_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise ReleaseError(f"{shlex.join(command)}: did not end within {_SECONDS} s") from None
    if done.returncode:
        raise ReleaseError(f"{shlex.join(command)}: exit status {done.returncode}\n{done.stdout[-4000:]}")
    return done.stdout


def check(compiled: bool) -> None:
    """Run the steps of a release, and print them and what is not checked. Raises ReleaseError at the first failure."""
    with tempfile.TemporaryDirectory(prefix="kvrouter-release-") as folder:
        rehearsal = Rehearsal(Path(folder))
        text = notes(ROOT, rehearsal.home, rehearsal.image)
        print(f"version     {rehearsal.version} in {', '.join(VERSIONS)}")
        print(f"notes       {len(text.splitlines())} lines, from CHANGELOG.md", flush=True)
        steps: dict[str, Callable[[], str]] = {
            "workflows": rehearsal.check_workflows,
            "sdist": rehearsal.build_sdist,
            "chart": rehearsal.pack_chart,
            "wheel": rehearsal.install_wheel,
            "plain": rehearsal.install_plain_wheel,
        }
        if compiled:
            steps["compiled"] = rehearsal.install_compiled_wheel
        for name, step in steps.items():
            print(f"{name:<12}{step()}", flush=True)
    print("\nNot checked here:")
    skipped = () if compiled else ("the compiled wheel: ARGS=--compiled builds it in some minutes",)
    print("\n".join(f"- {each}" for each in (*skipped, *NOT_CHECKED)))


def main() -> int:
    """Run the steps of a release, and return the exit status."""
    parser = argparse.ArgumentParser(description="Build and install each artifact of a release.")
    parser.add_argument("--compiled", action="store_true", help="build the compiled wheel, too: some minutes")
    try:
        check(parser.parse_args().compiled)
    except ReleaseError as error:
        print(f"release-check: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
