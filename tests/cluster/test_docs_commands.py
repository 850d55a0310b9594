"""The commands of docs/kubernetes.md run as they are written there, unless NOT_RUN says what they need."""

from __future__ import annotations

import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

pytestmark = pytest.mark.cluster

from kube import ROOT, Namespace, eventually  # noqa: E402

PAGE = ROOT / "docs" / "kubernetes.md"
# A part of a command, and what it needs. The page lists these too.
NOT_RUN = {
    "docker ": "Docker",
    "helm upgrade … --set monitoring": "the Prometheus operator",
    "hugging-face": "a GPU",
    "kubectl create namespace inference": "a GPU",
    "--set image.registry=": "a GPU",
    "llm-kvrouter-": "a GPU",
    "helm test llm": "a GPU",
    "curl http://127.0.0.1:8080/v1/chat/completions": "a GPU",
}


def commands() -> list[str]:
    """Return the commands of the page's indented blocks, with continued lines joined."""
    text = PAGE.read_text().replace("\\\n", " ")
    found = re.findall(r"^ {4,7}((?:docker|helm|kubectl|kvrouter|curl) .*)$", text, re.MULTILINE)
    return [" ".join(each.split()) for each in found]


def test_page_names_what_its_commands_need() -> None:
    [listed] = re.findall(r"^Not run there: (.*?)\n\n", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    for part, need in NOT_RUN.items():
        assert any(part in command for command in commands()), part
        assert need.removeprefix("a ").removeprefix("the ") in " ".join(listed.split())


@pytest.fixture
def values(kubeconfig: str) -> Iterator[Path]:
    """The page's values for workers that run already, in `values.yaml` of the clone, and their namespace."""
    text = PAGE.read_text()
    [image] = re.findall(r"^ +(image: \{repository: .*\})$", text, re.MULTILINE)
    [discovery] = re.findall(r"^ +(discovery: \{selector: .*\})$", text, re.MULTILINE)
    file = ROOT / "values.yaml"
    assert not file.exists()
    file.write_text(f"{image}\n{discovery}\n")
    cluster = Namespace("default", kubeconfig)
    cluster.kubectl("create", "namespace", "models")
    yield file
    file.unlink()
    cluster.kubectl("delete", "namespace", "models", "demo", "inference", "--ignore-not-found", "--wait=false")


@pytest.mark.usefixtures("folder", "values")
def test_commands_of_the_page_run_as_written(kubeconfig: str) -> None:
    """Only on the cluster that this command makes, because the page's namespaces may be in use on another."""
    shell = Namespace("default", kubeconfig)
    programs = f'export PATH="{Path(sys.executable).parent}:$PATH"; '
    with ExitStack() as stack:
        for command in commands():
            if any(part in command for part in NOT_RUN):
                continue
            if "port-forward" not in command:
                shell.shell(programs + command)
                continue
            forward = subprocess.Popen(
                [*shell.program("kubectl"), *shlex.split(command)[1:]], stdout=subprocess.DEVNULL
            )
            stack.callback(forward.wait)
            stack.callback(forward.kill)
            eventually(lambda: is_open(8080), f"{command}: port 8080 is open")


def is_open(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0
