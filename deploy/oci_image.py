"""Makes the image of deploy/Dockerfile as an OCI archive, on a Linux machine without a container engine.

    python deploy/oci_image.py kvrouter.tar --name localhost/kvrouter:0.1.0

It needs root and mmdebstrap. It runs the Dockerfile's own instructions. What differs from `docker build`:

- The base is Debian's packages and this machine's Python of the same minor version; the patch version may differ.
- A wheel replaces the compilation. The default wheel has the native index core, and no module is compiled by mypyc.
- HEALTHCHECK is left out: OCI images have none.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
# What the modules of Python link against, and what the base image has for programs.
PACKAGES = (
    "ca-certificates,libbz2-1.0,libffi8,liblzma5,libncursesw6,libreadline8,libsqlite3-0,libssl3,libuuid1,netbase,"
    "tzdata,zlib1g"
)
PATH = "/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"
_FACTS = (
    "import json, os, sys, sysconfig; print(json.dumps([os.path.realpath(sys.executable), sysconfig.get_path('stdlib'),"
    " os.path.join(sysconfig.get_config_var('LIBDIR'), sysconfig.get_config_var('INSTSONAME') or ''),"
    " '%d.%d.%d' % sys.version_info[:3]]))"
)


class ImageError(Exception):
    """An image that cannot be made. The message says why."""


@dataclass(frozen=True)
class Instruction:
    """An instruction of a Dockerfile, for example `USER` and `10001:0`."""

    word: str
    rest: str


@dataclass
class Image:
    """The configuration of an image, as the last stage of a Dockerfile sets it."""

    user: str = ""
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=lambda: {"PATH": PATH})
    volumes: list[str] = field(default_factory=list)
    ports: list[str] = field(default_factory=list)

    def configuration(self, layers: list[str]) -> dict[str, Any]:
        """Return the configuration of an OCI image with these digests of uncompressed layers."""
        return {
            "architecture": {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine],
            "os": "linux",
            "config": {
                "User": self.user,
                "Env": [f"{name}={value}" for name, value in self.environment.items()],
                "Entrypoint": self.entrypoint,
                "Cmd": self.command,
                "Volumes": {each: {} for each in self.volumes},
                "ExposedPorts": {f"{each}/tcp": {} for each in self.ports},
            },
            "rootfs": {"type": "layers", "diff_ids": layers},
        }


def stages(text: str) -> list[list[Instruction]]:
    """Return the stages of a Dockerfile, each with the instructions after its FROM."""
    joined = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    found: list[list[Instruction]] = []
    for line in filter(None, joined.splitlines()):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            found.append([])
        elif found:
            found[-1].append(Instruction(word, rest.strip()))
    return found


def compiles(instruction: Instruction) -> bool:
    """Return whether an instruction compiles the project, which a wheel replaces."""
    return instruction.word == "RUN" and "requirements-build.txt" in instruction.rest


def base_of(text: str) -> tuple[str, str]:
    """Return the minor version of Python and Debian's name of the base image. Raises ImageError."""
    found = re.search(r"^ARG PYTHON=python:(\d+\.\d+)\.\d+-slim-(\w+)@", text, re.MULTILINE)
    if found is None:
        raise ImageError(f"{DOCKERFILE}: expected ARG PYTHON=python:VERSION-slim-DEBIAN@DIGEST")
    return found[1], found[2]


class Stage:
    """Folders on which the instructions of a stage work: read-only ones below, and one for the changes."""

    def __init__(self, folder: Path, name: str, below: list[Path]) -> None:
        self.changes = folder / name
        self._work = folder / f"{name}.work"
        self._root = folder / f"{name}.root"
        self._below = below
        self._directory = "/"
        self.image = Image()
        for each in (self.changes, self._work, self._root):
            each.mkdir()

    def execute(self, instruction: Instruction, others: dict[str, Stage]) -> None:
        """Carry out an instruction. Raises ImageError for one that is not known."""
        word, rest, image = instruction.word, instruction.rest, self.image
        if word == "RUN":
            self.run(rest)
        elif word == "COPY":
            self._copy(rest, others)
        elif word == "WORKDIR":
            self._directory = rest
            self.run(f"mkdir -p {shlex.quote(rest)}", "/")
        elif word == "ENV":
            for pair in shlex.split(rest):
                name, _, value = pair.partition("=")
                image.environment[name] = value.replace("$PATH", image.environment["PATH"])
        elif word == "USER":
            image.user = rest
        elif word == "EXPOSE":
            image.ports += rest.split()
        elif word == "VOLUME":
            image.volumes += json.loads(rest)
        elif word == "ENTRYPOINT":
            image.entrypoint = json.loads(rest)
        elif word == "CMD":
            image.command = json.loads(rest)
        elif word != "HEALTHCHECK":
            raise ImageError(f"{DOCKERFILE}: deploy/oci_image.py does not know the instruction {word}")

    def run(self, command: str, directory: str | None = None) -> None:
        """Run a shell command in the stage, with the network, certificates and pip's settings of this machine."""
        lower = ":".join(map(str, self._below))
        root = shlex.quote(str(self._root))
        script = (
            f"mount -t overlay overlay -o lowerdir={lower},upperdir={self.changes},workdir={self._work} {root}"
            f" && mount --rbind /dev {root}/dev && mount -t proc proc {root}/proc"
            f" && touch {root}/etc/resolv.conf && mount --bind /etc/resolv.conf {root}/etc/resolv.conf"
            f" && mount --bind /etc/ssl/certs {root}/etc/ssl/certs"
            f' && exec chroot {root} sh -ec "cd $0; $1" "$0" "$1"'
        )
        variables = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-ec", script, directory or self._directory, command],
            env=variables | {"HOME": "/root"} | self.image.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode:
            raise ImageError(f"{command}: exit status {done.returncode}\n{done.stdout[-4000:]}")

    def _copy(self, rest: str, others: dict[str, Stage]) -> None:
        """Copy files of the clone or of another stage, without what Python keeps of modules."""
        *sources, target = shlex.split(rest)
        source_root = ROOT
        if sources[0].startswith("--from="):
            source_root = others[sources.pop(0).removeprefix("--from=")].changes
        into = self.changes / os.path.join(self._directory, target).lstrip("/")
        for each in sources:
            source = source_root / each.lstrip("/")
            place = into / source.name if target.endswith("/") and source.is_file() else into
            place.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                ignored = shutil.ignore_patterns("__pycache__", "*.so") if source_root == ROOT else None
                shutil.copytree(source, place, symlinks=True, dirs_exist_ok=True, ignore=ignored)
            else:
                shutil.copy2(source, place)


def python_of(minor: str, command: str | None) -> tuple[str, Path, Path, Path]:
    """Return version, executable, standard library and shared library of this machine's Python.

    It is `command`, else the one of the version `minor` on PATH or of pyenv, else the one that runs this script.
    """
    versions = sorted(map(str, Path.home().glob(f".pyenv/versions/{minor}.*/bin/python")))
    for each in filter(None, (command, f"python{minor}", *versions, sys.executable)):
        try:
            found = subprocess.run([each, "-I", "-c", _FACTS], capture_output=True, text=True)
        except FileNotFoundError:
            continue
        if found.returncode == 0:
            executable, library, shared, version = json.loads(found.stdout)
            return version, Path(executable), Path(library), Path(shared)
    raise ImageError(f"no Python runs: tried {command or f'python{minor}'} and {sys.executable}")


def install_python(stage: Stage, executable: Path, library: Path, shared: Path) -> None:
    """Put this machine's Python and pip where the base image has them."""
    local = stage.changes / "usr/local"
    for folder in ("bin", "lib"):
        (local / folder).mkdir(parents=True, exist_ok=True)
    name = library.name  # python3.13
    ignored = shutil.ignore_patterns("__pycache__", "site-packages", "dist-packages", "test", "config-*", "_tkinter*")
    shutil.copytree(library, local / "lib" / name, ignore=ignored)
    (local / "lib" / name / "site-packages").mkdir()
    shutil.copy2(executable, local / "bin" / name)
    if shared.is_file():
        shutil.copy2(shared, local / "lib" / shared.name)
    for link in ("python3", "python"):
        (local / "bin" / link).symlink_to(name)
    stage.run("ldconfig && python -m ensurepip && ln -sf pip3 /usr/local/bin/pip")


def make(out: Path, name: str, cache: Path, wheel: Path | None, command: str | None) -> str:
    """Write the image, and return what differs from the one of `docker build`. Raises ImageError."""
    text = DOCKERFILE.read_text()
    minor, debian = base_of(text)
    version, *python = python_of(minor, command)
    base = debian_layer(cache, debian, PACKAGES)
    with tempfile.TemporaryDirectory(prefix="kvrouter-image-", dir=cache) as temporary:
        folder = Path(temporary)
        wheel = wheel or build_wheel(python[0], folder / "wheel")
        lowest = unpacked(base, folder / "debian")
        below = Stage(folder, "python", [lowest])
        install_python(below, *python)
        build = Stage(folder, "build", [below.changes, lowest])
        last = Stage(folder, "last", [below.changes, lowest])
        first, final = stages(text)
        for instruction in first:
            if compiles(instruction):
                shutil.copy2(wheel, build.changes / wheel.name)
                build.run(f"pip --python /opt/kvrouter/bin/python install --no-deps --no-index /{wheel.name}")
            else:
                build.execute(instruction, {})
        for instruction in final:
            last.execute(instruction, {"build": build})
        layers = [base]
        for stage in (below, last):
            layers.append(folder / f"{stage.changes.name}.tar")
            write_layer(stage.changes, layers[-1])
        write_image(out, name, layers, last.image)
    compiled = "" if "mypyc" in wheel.name else f", {wheel.name} in place of the compiled one"
    return f"Python {version} of this machine{compiled}, no HEALTHCHECK"


def build_wheel(python: Path, folder: Path) -> Path:
    """Return the project's wheel for a Python, with the native core."""
    build = [str(python), "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    done = subprocess.run(build, capture_output=True, text=True)
    if done.returncode:
        raise ImageError(f"{shlex.join(build)}: {done.stderr[-4000:]}")
    return next(folder.glob("*.whl"))


def debian_layer(cache: Path, debian: str, packages: str) -> Path:
    """Return a layer of Debian with these packages, which is made once."""
    layer = cache / f"{debian}-{hashlib.sha256(packages.encode()).hexdigest()[:12]}.tar"
    if not layer.exists():
        making = layer.with_suffix(".making.tar")
        command = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={packages}", debian, str(making)]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except FileNotFoundError:
            raise ImageError("mmdebstrap is missing: apt-get install mmdebstrap") from None
        if done.returncode:
            raise ImageError(f"{shlex.join(command)}: {done.stderr[-4000:]}")
        making.rename(layer)
    return layer


def unpacked(layer: Path, folder: Path) -> Path:
    """Unpack a layer into a new folder."""
    folder.mkdir()
    subprocess.run(["tar", "-xpf", layer, "--numeric-owner", "--exclude=./dev/*", "-C", folder], check=True)
    return folder


def write_layer(changes: Path, out: Path) -> None:
    """Write a folder as a layer. An overlay's mark of a removed file is written as a layer's mark."""

    removed = []

    def kept(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        if entry.ischr() and (entry.devmajor, entry.devminor) == (0, 0):
            folder, _, name = entry.name.rpartition("/")
            removed.append(tarfile.TarInfo(f"{folder}/.wh.{name}"))
            return None
        return entry

    with tarfile.open(out, "w") as layer:
        for each in sorted(changes.iterdir()):
            layer.add(each, each.name, filter=kept)
        for mark in removed:
            layer.addfile(mark)


def write_image(out: Path, name: str, layers: list[Path], image: Image) -> None:
    """Write layers and configuration as an OCI archive that `ctr images import` and `docker load` accept."""
    blobs: list[dict[str, Any]] = []
    with tarfile.open(out, "w") as archive:

        def add(kind: str, content: Any) -> dict[str, Any]:
            data = json.dumps(content).encode()
            digest = hashlib.sha256(data).hexdigest()
            write(f"blobs/sha256/{digest}", data)
            return {"mediaType": kind, "digest": f"sha256:{digest}", "size": len(data)}

        def write(path: str, data: bytes) -> None:
            entry = tarfile.TarInfo(path)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))

        for layer in layers:
            with layer.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            archive.add(layer, f"blobs/sha256/{digest}")
            kind = "application/vnd.oci.image.layer.v1.tar"
            blobs.append({"mediaType": kind, "digest": f"sha256:{digest}", "size": layer.stat().st_size})
        configuration = image.configuration([each["digest"] for each in blobs])
        manifest: dict[str, Any] = {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": add("application/vnd.oci.image.config.v1+json", configuration),
            "layers": blobs,
        }
        found = add(manifest["mediaType"], manifest) | {"annotations": {"io.containerd.image.name": name}}
        write("index.json", json.dumps({"schemaVersion": 2, "manifests": [found]}).encode())
        write("oci-layout", b'{"imageLayoutVersion": "1.0.0"}')


def main() -> int:
    """Make the image, and return the exit status."""
    parser = argparse.ArgumentParser(description="Make the image of deploy/Dockerfile without a container engine.")
    parser.add_argument("out", type=Path, help="file of the OCI archive")
    parser.add_argument("--name", default="localhost/kvrouter:latest", help="name of the image in the archive")
    parser.add_argument("--wheel", type=Path, help="the project's wheel; without: one is built from this clone")
    parser.add_argument("--python", help="the Python to put into the image; without: one of the Dockerfile's version")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache/kvrouter/images", help="folder for bases")
    given = parser.parse_args()
    if os.geteuid() != 0:
        print("oci_image: root is needed, for chroot and the owners of files", file=sys.stderr)
        return 1
    given.cache.mkdir(parents=True, exist_ok=True)
    try:
        differs = make(given.out, given.name, given.cache, given.wheel, given.python)
    except ImageError as error:
        print(f"oci_image: {error}", file=sys.stderr)
        return 1
    print(f"{given.out}: {given.name}. What differs from `docker build`: {differs}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
