"""`make test-cluster` says what a machine lacks. This needs no cluster, and runs with the other tests."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import node
import pytest
import run


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which no program is found, for an unprivileged user."""
    monkeypatch.setattr(shutil, "which", lambda program: None)  # noqa: ARG005
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(node, "BINARY", Path("/nowhere"))
    monkeypatch.setattr(node, "PLUGINS", [])
    for name in ("KUBECONFIG", "IMAGE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("bare")
def test_missing_parts_are_named_with_what_brings_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main([]) == 1
    said = capsys.readouterr().err
    for part in ("root", "containerd: install", "runc", "iptables", "iproute2", "mmdebstrap", "Go 1."):
        assert part in said
    assert "containernetworking-plugins" in said


@pytest.mark.usefixtures("bare")
def test_cluster_of_the_user_needs_nothing_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    monkeypatch.setattr(run, "tests", lambda arguments: ran.append(arguments) or 0)
    monkeypatch.setenv("KUBECONFIG", "/home/me/.kube/config")
    monkeypatch.setenv("IMAGE", "registry.example.com/kvrouter:1")
    assert run.main(["-k", "worker"]) == 0
    assert ran == [["-k", "worker"]]


def test_sysctls_that_changed_are_written_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "SYSCTL_FILES", [tmp_path / "panic", tmp_path / "absent"])
    (tmp_path / "panic").write_text("0\n")
    with run.restored_sysctls():
        (tmp_path / "panic").write_text("10\n")
    assert (tmp_path / "panic").read_text() == "0\n"
