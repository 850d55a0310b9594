"""The check for a foreign package with the name of one of ours, earlier on Python's path."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import kvrouter
from router.server.sockets import listen

OURS = Path(kvrouter.__file__).resolve().parent.parent
AS_MODULE = [sys.executable, "-P", "-m", "kvrouter"]
AS_COMMAND = [str(Path(sys.executable).parent / "kvrouter")]
# This worker does not exist, in case the command starts by mistake.
SERVE = ["serve", "--port=0", "--worker=http://127.0.0.1:1"]
BROKEN = "raise ImportError('the other one was imported')"


def run(command: list[str], first: Path) -> tuple[int, str]:
    """Run a command that looks for packages in a folder first: its exit status, and all it printed."""
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=os.environ | {"PYTHONPATH": str(first)}, cwd=first
    )
    return done.returncode, done.stdout + done.stderr


def package(folder: Path, name: str) -> Path:
    """Another package of that name."""
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(BROKEN)
    return folder / name


def module(folder: Path, name: str) -> Path:
    """A module of that name."""
    (folder / f"{name}.py").write_text(BROKEN)
    return folder / f"{name}.py"


@pytest.mark.parametrize("make", [package, module])
@pytest.mark.parametrize("name", ["router", "indexer", "worker", "simulator", "kvevents", "http_api"])
def test_foreign_package_is_named_with_both_paths(tmp_path: Path, make: Callable[[Path, str], Path], name: str) -> None:
    foreign = make(tmp_path, name)
    status, output = run([*AS_MODULE, *SERVE], tmp_path)
    assert status == 1
    [line] = output.splitlines()
    assert line.startswith("kvrouter: another ")
    assert f"finds {foreign} before {OURS / name}" in line


def test_installed_command_detects_foreign_package(tmp_path: Path) -> None:
    foreign = package(tmp_path, "router")
    status, output = run([*AS_COMMAND, *SERVE], tmp_path)
    assert status == 1
    [line] = output.splitlines()
    assert str(foreign) in line
    assert str(OURS / "router") in line


def test_foreign_package_in_working_directory_is_detected(tmp_path: Path) -> None:
    foreign = package(tmp_path, "worker")
    done = subprocess.run(
        [sys.executable, "-m", "kvrouter", "simulate", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        env={name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONSAFEPATH")},
        cwd=tmp_path,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert str(foreign) in done.stderr


def test_folder_without_package_is_ignored(tmp_path: Path) -> None:
    for name in ("router", "indexer", "worker", "kvevents"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.txt").write_text("")
    status, output = run([*AS_MODULE, "serve", "--worker=nonsense"], tmp_path)
    assert (status, output.startswith("kvrouter: --worker: ")) == (1, True)


def test_linked_own_packages_are_accepted(tmp_path: Path) -> None:
    for name in ("router", "indexer", "worker", "kvevents"):
        (tmp_path / name).symlink_to(OURS / name)
    status, output = run([*AS_MODULE, "serve", "--worker=nonsense"], tmp_path)
    assert (status, output.startswith("kvrouter: --worker: ")) == (1, True)


def test_answers_do_not_wait_for_acknowledgements() -> None:
    with listen("127.0.0.1", 0) as listening:
        with socket.create_connection(listening.getsockname(), timeout=60):
            accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


# Allocates and frees sixteen bodies at a time, and prints the pages mapped in the second round.
_BODIES = """
import resource
from router.server.serving import keep_freed_memory
{prepare}
def bodies():
    for _ in range(200):
        held = [bytearray(100_000) for _ in range(16)]
bodies()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
bodies()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def pages_mapped(prepare: str) -> int:
    ran = subprocess.run(
        [sys.executable, "-c", _BODIES.format(prepare=prepare)], capture_output=True, text=True, check=True, timeout=60
    )
    return int(ran.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such setting")
def test_freed_memory_is_kept_for_next_bodies() -> None:
    assert pages_mapped("keep_freed_memory()") < pages_mapped("") / 10
