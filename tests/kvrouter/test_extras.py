"""The error of a command whose extra is not installed: one line with the command that installs it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import venv
from collections.abc import Iterator
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest

import kvrouter
from kvrouter.installation import MODULES, missing_extra

ROOT = Path(kvrouter.__file__).resolve().parents[1]
OURS = ("http_api", "kvevents", "indexer", "router", "worker", "simulator", "kvrouter")
ENGINES = {"msgspec", "zmq"}  # the dependencies without any extra
HOSTS = {"ray"}  # the programs that load an adapter
COMPILING = {"hatchling", "nanobind", "setuptools"}


def _python(folder: Path) -> Path:
    return folder / "bin" / "python"


def _error_line(folder: Path, *arguments: str) -> str:
    """Return the one line of a failed command."""
    command = [str(_python(folder)), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=folder)
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    return line


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with our packages and what engines have, and nothing else."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder)
    [site] = folder.glob("lib/python*/site-packages")
    for name in ("msgspec", "zmq"):
        origin = Path(__import__(name).__file__ or "").parent
        (site / name).symlink_to(origin)
        for beside in origin.parent.glob(f"{'pyzmq' if name == 'zmq' else name}.libs"):
            (site / beside.name).symlink_to(beside)
    for origin in [*(ROOT / name for name in OURS), *ROOT.glob("*__mypyc*.so")]:
        (site / origin.name).symlink_to(origin)
    return folder


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        (["--help"], "router"),
        ([], "router"),
        (["serve", "--help"], "router"),
        (["demo"], "demo"),
        (["picker"], "router,envoy"),
    ],
)
def test_bare_installation_names_missing_extra(bare: Path, arguments: list[str], extra: str) -> None:
    line = _error_line(bare, "-m", "kvrouter", *arguments)
    assert line == f"kvrouter: the package 'typer' is missing: pip install 'kvrouter[{extra}]'"


def test_simulated_worker_names_missing_extra(bare: Path) -> None:
    line = _error_line(bare, "-m", "simulator.worker")
    assert line == "simulated worker: the package 'uvicorn' is missing: pip install 'kvrouter[router]'"


def test_unknown_module_has_no_extra() -> None:
    assert missing_extra("kvrouter.nothing", []) is None
    assert missing_extra(None, []) is None


def _imported(package: str) -> Iterator[str]:
    for file in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                yield from (alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield node.module.partition(".")[0]


def test_every_imported_package_has_an_extra() -> None:
    known = {name for names in MODULES.values() for name in names}
    imported = {name for package in OURS for name in _imported(package)}
    others = imported - set(sys.stdlib_module_names) - set(OURS) - ENGINES - HOSTS - COMPILING - {"build", "build_hook"}
    assert "fastapi" in others
    assert others <= known
    assert known <= others


def _normal(distribution: str) -> str:
    return distribution.lower().replace("_", "-")


def test_extras_install_their_modules() -> None:
    wanted = requires("kvrouter") or []
    distributions = packages_distributions()
    for extra in MODULES.keys() - {"mooncake", "nixl"}:  # not among the tests' needs
        lines = [line for line in wanted if re.search(rf"extra == ['\"]{extra}['\"]", line)]
        named = {_normal(re.split(r"[^\w.-]", line)[0]) for line in lines}
        for module in MODULES[extra]:
            installed = set(map(_normal, distributions.get(module, ())))
            assert installed & named or module in _INSTALLED_BY_OTHERS, (extra, module)


# By fastapi, aiohttp, jinja2 and pydantic-settings; the platform decides about fastokens.
_INSTALLED_BY_OTHERS = {"starlette", "pydantic", "pydantic_core", "yarl", "markupsafe", "fastokens"}


# With pip, from the network: `make test-install`.


@pytest.mark.install
@pytest.mark.parametrize(
    ("extras", "arguments", "wanted"),
    [
        ("", ["--help"], "router"),
        ("", ["demo"], "demo"),
        ("[router]", ["demo"], "demo"),
        ("[router]", ["picker", "--worker=http://127.0.0.1:1"], "envoy"),
    ],
)
def test_pip_installation_names_missing_extra(tmp_path: Path, extras: str, arguments: list[str], wanted: str) -> None:
    venv.create(tmp_path, with_pip=True)
    install = [str(_python(tmp_path)), "-m", "pip", "install", "--quiet", f"{ROOT}{extras}"]
    subprocess.run(install, check=True, timeout=600)
    line = _error_line(tmp_path, str(tmp_path / "bin" / "kvrouter"), *arguments)
    assert f"{wanted}]'" in line


@pytest.mark.install
def test_demo_extra_is_sufficient_for_demo(tmp_path: Path) -> None:
    venv.create(tmp_path, with_pip=True)
    install = [str(_python(tmp_path)), "-m", "pip", "install", "--quiet", f"{ROOT}[demo]"]
    subprocess.run(install, check=True, timeout=600)
    for more in ([], ["--disaggregated"]):
        command = [str(tmp_path / "bin" / "kvrouter"), "demo", "--conversations=4", *more]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
