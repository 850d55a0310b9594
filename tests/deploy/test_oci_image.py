"""The image made without a container engine has what the Dockerfile lists."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import sys
import tarfile
import tomllib
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
from test_image import instructions, last_stage

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def oci_image() -> ModuleType:
    spec = spec_from_file_location("oci_image", ROOT / "deploy" / "oci_image.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules["oci_image"] = module  # Its dataclasses look up their module.
    spec.loader.exec_module(module)
    return module


def test_configuration_has_the_user_paths_and_entry_point_of_the_dockerfile(
    oci_image: ModuleType, tmp_path: Path
) -> None:
    stage = oci_image.Stage(tmp_path, "last", [])
    *_stages, final = oci_image.stages(oci_image.DOCKERFILE.read_text())
    for instruction in final:
        if instruction.word not in ("RUN", "COPY"):
            stage.execute(instruction, {})
    listed = dict(last_stage())
    found = stage.image.configuration([])["config"]
    assert found["User"] == listed["USER"]
    assert found["Entrypoint"] == json.loads(listed["ENTRYPOINT"])
    assert found["Cmd"] == json.loads(listed["CMD"])
    assert list(found["Volumes"]) == json.loads(listed["VOLUME"])
    assert list(found["ExposedPorts"]) == [f"{port}/tcp" for port in listed["EXPOSE"].split()]
    variables = dict(pair.split("=", 1) for pair in shlex.split(listed["ENV"]))
    path = variables.pop("PATH").replace("$PATH", oci_image.PATH)
    assert set(found["Env"]) == {f"PATH={path}", *(f"{name}={value}" for name, value in variables.items())}


def test_every_instruction_of_the_dockerfile_is_carried_out(oci_image: ModuleType) -> None:
    carried_out = [
        (each.word, each.rest) for stage in oci_image.stages(oci_image.DOCKERFILE.read_text()) for each in stage
    ]
    assert carried_out == [(word, rest) for word, rest in instructions() if word not in ("ARG", "FROM")]


def test_only_the_compilation_is_replaced(oci_image: ModuleType) -> None:
    first, _final = oci_image.stages(oci_image.DOCKERFILE.read_text())
    replaced = [each.rest for each in first if oci_image.compiles(each)]
    assert len(replaced) == 1
    assert replaced[0].startswith("apt-get update")
    assert replaced[0].endswith("install --no-deps /wheels/kvrouter-*.whl")


def test_base_has_the_minor_version_of_the_dockerfile(oci_image: ModuleType) -> None:
    minor, debian = oci_image.base_of(oci_image.DOCKERFILE.read_text())
    assert (
        f"Programming Language :: Python :: {minor}"
        in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    )
    assert debian.isalpha()


def test_unknown_instruction_is_refused(oci_image: ModuleType, tmp_path: Path) -> None:
    stage = oci_image.Stage(tmp_path, "last", [])
    with pytest.raises(oci_image.ImageError, match="does not know the instruction SHELL"):
        stage.execute(oci_image.Instruction("SHELL", '["/bin/bash"]'), {})


def test_copied_files_of_the_clone_have_their_places(oci_image: ModuleType, tmp_path: Path) -> None:
    stage = oci_image.Stage(tmp_path, "build", [])
    stage.execute(oci_image.Instruction("COPY", "README.md LICENSE ./"), {})
    stage.execute(oci_image.Instruction("COPY", "config.yaml /etc/kvrouter/config.yaml"), {})
    stage.execute(oci_image.Instruction("COPY", "worker worker"), {})
    found = {str(path.relative_to(stage.changes)) for path in stage.changes.rglob("*")}
    assert {"README.md", "LICENSE", "etc/kvrouter/config.yaml", "worker/__init__.py"} <= found
    assert not any("__pycache__" in path for path in found)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes the mark of a removed file")
def test_removed_file_of_a_lower_layer_is_removed_in_the_image(oci_image: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "usr" / "bin"
    folder.mkdir(parents=True)
    os.mknod(folder / "pip", 0o20000 | 0o600, os.makedev(0, 0))
    oci_image.write_layer(tmp_path, tmp_path.parent / "layer.tar")
    with tarfile.open(tmp_path.parent / "layer.tar") as layer:
        assert layer.getnames() == ["usr", "usr/bin", "usr/bin/.wh.pip"]


def test_archive_refers_to_its_blobs_by_digest(oci_image: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("content")
    oci_image.write_layer(tmp_path, tmp_path / "layer.tar")
    out = tmp_path / "image.tar"
    oci_image.write_image(out, "localhost/name:1", [tmp_path / "layer.tar"], oci_image.Image(user="10001:0"))
    with tarfile.open(out) as archive:

        def read(name: str) -> bytes:
            file = archive.extractfile(name)
            assert file is not None
            return file.read()

        blobs = [name for name in archive.getnames() if name.startswith("blobs/")]
        for name in blobs:
            assert hashlib.sha256(read(name)).hexdigest() == name.rpartition("/")[2]
        [found] = json.loads(read("index.json"))["manifests"]
        assert found["annotations"]["io.containerd.image.name"] == "localhost/name:1"
        manifest = json.loads(read(f"blobs/sha256/{found['digest'].removeprefix('sha256:')}"))
        digests = {each["digest"] for each in (found, manifest["config"], *manifest["layers"])}
        assert {f"blobs/sha256/{digest.removeprefix('sha256:')}" for digest in digests} == set(blobs)
