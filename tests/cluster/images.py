"""The images that the cluster's pods run, as OCI archives: this clone's, and others from programs of this machine."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from control_plane import PROGRAMS

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "deploy"))

import oci_image  # noqa: E402

IMAGE = "registry.example.com/kvrouter:0.1.0"  # the name in docs/kubernetes.md
FOLDER = PROGRAMS / "images"


def make_images() -> None:
    """Make the images that do not exist or whose sources changed."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    _make_router()
    environment = Path(sys.executable).parent.parent
    [envoy] = environment.glob("lib/python*/site-packages/envoy/_bin/envoy")
    redis = environment / "bin"
    debian = oci_image.debian_layer(FOLDER, oci_image.base_of(oci_image.DOCKERFILE.read_text())[1], oci_image.PACKAGES)
    _make("localhost/pause:1", [], {"pause": PROGRAMS / "pause"}, "/usr/local/bin/pause")
    # The names are those of the chart's values, so that its releases run unchanged.
    _make("docker.io/envoyproxy/envoy:v1.38.0", [debian], {"envoy": envoy})
    servers = {"valkey-server": redis / "redis-server", "valkey-cli": redis / "redis-cli"}
    _make("docker.io/valkey/valkey:8.1.4", [debian], servers)


def archives() -> list[Path]:
    """Return the files of all images."""
    return sorted(FOLDER.glob("image-*.tar"))


def _make(name: str, below: list[Path], programs: dict[str, Path], entrypoint: str = "") -> None:
    """Make an image of layers and programs."""
    out = FOLDER / f"image-{name.rpartition('/')[2].partition(':')[0]}.tar"
    if out.exists():
        return
    with tempfile.TemporaryDirectory(dir=FOLDER) as temporary:
        folder = Path(temporary) / "changes"
        (folder / "usr/local/bin").mkdir(parents=True)
        for program, file in programs.items():
            shutil.copy2(file.resolve(), folder / "usr/local/bin" / program)
        layer = Path(temporary) / "layer.tar"
        oci_image.write_layer(folder, layer)
        image = oci_image.Image(user="10001:0", entrypoint=[entrypoint] if entrypoint else [])
        oci_image.write_image(out, name, [*below, layer], image)


def _make_router() -> None:
    """Make this clone's image if a file that it is made of changed."""
    sources = ["pyproject.toml", "config.yaml", "deploy", *_packages()]
    listed = subprocess.run(["git", "ls-files", *sources], cwd=ROOT, capture_output=True, text=True, check=True)
    digest = hashlib.sha256()
    for name in listed.stdout.splitlines():
        if not name.startswith("deploy/helm") and (ROOT / name).exists():
            digest.update(name.encode() + (ROOT / name).read_bytes())
    made, out = FOLDER / "kvrouter.sha256", FOLDER / "image-kvrouter.tar"
    if not out.exists() or not made.exists() or made.read_text() != digest.hexdigest():
        print("Making the image of this clone: a minute or two", flush=True)
        made.unlink(missing_ok=True)
        print(f"What differs from `docker build`: {oci_image.make(out, IMAGE, FOLDER, None, None)}", flush=True)
        made.write_text(digest.hexdigest())


def _packages() -> list[str]:
    stages = oci_image.stages(oci_image.DOCKERFILE.read_text())
    return [each.rest.split()[0] for stage in stages for each in stage if each.word == "COPY"][1:-2]
