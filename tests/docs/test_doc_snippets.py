"""Every command and every snippet in README and docs: it runs, or a check replaces what cannot run here.

Commands for a router use a real one with simulated workers. The kind of a block follows from its fence, or from its
first words. A block of commands may name only programs of RUN and CHECKED. `make test-docs` also starts the servers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import jsonschema
import pytest
import typer
import yaml
from doc_pages import ROOT, Block, blocks, inline_code
from pydantic import ValidationError
from typer.testing import CliRunner

from kvrouter.cli import app
from kvrouter.processes import KvrouterProcess
from router.fleet.engine_commands import COMMANDS
from router.settings import Settings
from simulator.worker import SimulatedWorkerSettings
from simulator.worker.serve import running
from worker.publisher import PublisherConfig

SERVERS = {"serve", "indexer", "simulate", "picker", "replay"}
# Commands that fail on purpose: a part of the command, and its exit status.
EXIT_STATUS = {"d_reset_prefix_cache": 1}

# The content of a recorded trace.
TRACE = '{"timestamp": 0, "input_length": 600, "output_length": 2, "hash_ids": [0, 1]}\n' * 2

_PROGRAMS = ("kvrouter", "curl", "make", "pip", "vllm", "python", "docker", "helm", "kubectl", "envoy", "git", "export")
_SHELLS = ("sh", "bash", "console")
_LANGUAGES = (*_SHELLS, "python", "yaml", "json", "text", "")
_FOR_OPERATORS = tuple(name for command in COMMANDS for name in command.names if not command.open_on_loopback)
_ELLIPSIS = re.compile(r",?\s*…")


@dataclass(frozen=True)
class Fleet:
    """A router with two workers, and a working folder."""

    router: str
    workers: tuple[str, str]
    another: str  # a worker that the router does not know
    folder: Path
    done: list[list[str]] = field(default_factory=list)  # many pages name the same command: once is enough

    def substituted(self, text: str) -> str:
        """Return the text with the addresses and names of this fleet in place of the example's."""
        text = text.replace("http://10.0.0.7:8000", self.another)
        text = re.sub(r"https?://(gpu-2|10\.0\.0\.2|127\.0\.0\.1:8002)(:\d+)?(?=\W|$)", self.workers[1], text)
        text = re.sub(
            r"https?://(gpu-1|10\.0\.0\.[13-9]|127\.0\.0\.1(?=:8000|:8001))(:\d+)?(?=\W|$)", self.workers[0], text
        )
        address = r"(https?://)?(127\.0\.0\.1|localhost|router(-\d)?|kvrouter[\w.-]*):(8080|8090)"
        text = re.sub(address, self.router, text)
        return re.sub(r"\bMODEL\b|\bmy-model\b", "simulated", text)


@contextlib.contextmanager
def simulated_workers(count: int) -> Iterator[list[str]]:
    """Run workers in a thread, which costs less than processes, and yield their URLs."""
    loop = asyncio.new_event_loop()
    stack = contextlib.AsyncExitStack()

    async def start() -> list[str]:
        return [await stack.enter_async_context(running(SimulatedWorkerSettings())) for _ in range(count)]

    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield asyncio.run_coroutine_threadsafe(start(), loop).result(60)
        asyncio.run_coroutine_threadsafe(stack.aclose(), loop).result(60)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with contextlib.ExitStack() as stack:
        first, second, another = stack.enter_context(simulated_workers(3))
        serve = KvrouterProcess(["serve", "--port", "0", "--worker", first, "--worker", second])
        router = stack.enter_context(serve).wait_until_listening()
        folder = tmp_path_factory.mktemp("snippets")
        for name in ("deploy", "tests"):
            (folder / name).symlink_to(ROOT / name)
        (folder / "config.yaml").write_text(yaml.safe_dump({"workers": [{"url": first}, {"url": second}]}))
        (folder / "keys").mkdir()
        for name in ("worker-1", "router"):
            assert CliRunner().invoke(app, ["keygen", str(folder / "keys"), "--name", name]).exit_code == 0
        yield Fleet(router, (first, second), another, folder)


# Kinds of blocks


def commands_of(block: Block) -> list[str]:
    """Return the commands in a block, each with all of its lines."""
    lines = block.text.splitlines()
    told = any(line.startswith("$ ") for line in lines)
    found: list[str] = []
    complete = True
    for line in lines:
        if not complete:
            found[-1] += "\n" + line
        elif told and line.startswith("$ "):
            found.append(line[2:])
        elif not told and line.strip() and (block.language in _SHELLS or line.split()[0] in _PROGRAMS):
            found.append(line)
        else:
            continue
        complete = _complete(found[-1])
    return [command for command in found if words_of(command)]


def words_of(command: str) -> list[str]:
    return shlex.split(command.replace("\\\n", " "), comments=True)


def _complete(command: str) -> bool:
    try:
        words_of(command)
    except ValueError:
        return False
    return not command.endswith("\\")


def is_shell(block: Block) -> bool:
    first = block.text.split()[0]
    return block.language in _SHELLS or (not block.language and (first == "$" or first in _PROGRAMS))


def is_json(block: Block) -> bool:
    return block.language == "json" or (not block.language and block.text.startswith('{"'))


ALL = list(blocks())
_INLINE = ("make ", "kvrouter replay --check tests", "kvrouter serve -", "kvrouter doctor -")
COMMANDS = [pytest.param(commands_of(block), id=block.place) for block in ALL if is_shell(block)]
# Commands in the text that can run unchanged.
INLINE = sorted({code for code in inline_code() if code.startswith(_INLINE) and "…" not in code})


def named(chosen: Callable[[Block], bool]) -> list[Any]:
    return [pytest.param(block, id=block.place) for block in ALL if chosen(block)]


@pytest.mark.parametrize("block", named(lambda _: True))
def test_code_blocks_name_their_language(block: Block) -> None:
    assert block.language in _LANGUAGES, f"say one of {_LANGUAGES}"
    if is_shell(block):
        assert commands_of(block), "a shell block without a command"


# Commands


@pytest.mark.parametrize("commands", COMMANDS)
def test_commands_run(commands: list[str], fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    for command in commands:
        run_command(command, fleet, monkeypatch)


def run_command(command: str, fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(fleet.folder)
    words = words_of(fleet.substituted(command))
    program, arguments = words[0], words[1:]
    if program == "kvrouter":
        if words in fleet.done:
            return
        fleet.done.append(words)
    assert program in RUN or program in CHECKED, f"{program}: run it, or say in CHECKED why not and how it is checked"
    (RUN[program] if program in RUN else CHECKED[program][0])(arguments, fleet)


@pytest.mark.parametrize("command", INLINE)
def test_commands_in_the_text_run(command: str, fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    run_command(command, fleet, monkeypatch)


def run_kvrouter(arguments: list[str], fleet: Fleet) -> None:
    """Run a subcommand if it ends by itself or by an option. Parse the options of the others."""
    name, rest = arguments[0], arguments[1:]
    command: Any = typer.main.get_command(app)
    assert name in command.commands, name
    files = [each for word in rest for each in (sorted(map(str, Path().glob(word))) if "*" in word else [word])]
    if name in SERVERS | {"demo"} and "--check" not in rest:  # these run until they are stopped, or for a long time
        with contextlib.suppress(FileNotFoundError):
            command.commands[name].make_context(name, files)
        return
    if name in ("match", "explain", "top") and "--url" not in files:
        files += ["--url", fleet.router]
    if name == "keygen":
        files[0] = "new-keys"
    if name == "top":
        files.append("--once")
    if name == "record":
        files += ["--seconds", "0.2"]
    if name in ("replay-trace", "size"):
        Path("traffic.jsonl").write_text(TRACE)
    if name == "replay" and len(files) > 6:
        files = [each for each in files if not each.endswith(".kvrec")] + [f"{ROOT}/tests/data/e_dp2.kvrec"]
        files[files.index("--expect") + 1] = "53"
    result = CliRunner().invoke(app, [name, *files], input="Hello!")
    expected = next((status for part, status in EXIT_STATUS.items() if part in " ".join(files)), 0)
    assert result.exit_code == expected, result.output


def run_curl(arguments: list[str], fleet: Fleet) -> str:
    """Send the request to the router, expect a status 2xx, undrain all workers, and return the body."""
    if shutil.which("curl") is None:
        pytest.skip("there is no curl")
    try:
        done = subprocess.run(
            ["curl", "-sS", "--max-time", "10", "-o", "answer", "-w", "%{http_code}", *arguments],
            capture_output=True,
            text=True,
            env=os.environ | {"TOKEN": "none"},
            check=False,
        )
        answer = Path("answer").read_text() if Path("answer").exists() else ""
        if any(each.partition("?")[0].endswith(_FOR_OPERATORS) for each in arguments):
            assert (done.stdout, "server.token" in answer) == ("403", True), answer  # this fleet has no token
        else:
            assert done.stdout.startswith("2"), (done.stdout, done.stderr, answer)
        return answer
    finally:
        for worker in fleet.workers:
            body = json.dumps({"url": worker}).encode()
            urlopen(Request(f"{fleet.router}/workers/undrain", body), timeout=60).read()


def check_make(arguments: list[str], fleet: Fleet) -> None:
    """Check that the target is in the Makefile, and that its variables are known."""
    targets = re.findall(r"^([\w-]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    target, *variables = arguments
    assert target in targets
    for name, _, value in (variable.partition("=") for variable in variables):
        assert f"$({name})" in (ROOT / "Makefile").read_text(), name
        if name == "ARGS" and target == "demo":
            run_kvrouter(["demo", *shlex.split(value)], fleet)
        if name == "ARGS" and target == "test":
            assert all((ROOT / path).exists() for path in shlex.split(value) if path.startswith("tests/")), value


def check_pip(arguments: list[str], _: Fleet) -> None:
    """Check that the extras of this project exist."""
    extras = re.findall(r"^([\w-]+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    for wanted in re.findall(r"(?:kvrouter|\.)\[([\w,-]+)\]", " ".join(arguments)):
        assert set(wanted.split(",")) <= set(extras)


VLLM_EVENTS = {"enable_kv_cache_events", *PublisherConfig.__struct_fields__} - {"wire_form"}


def check_events(arguments: list[str]) -> None:
    """Check that our publisher accepts the configuration of events."""
    for name, value in pairwise(arguments):
        if name == "--kv-events-config":
            config = json.loads(value)
            assert set(config) <= VLLM_EVENTS, value
            config.pop("enable_kv_cache_events", None)
            PublisherConfig.from_json(json.dumps(config))
        elif name in ("--kv-transfer-config", "--hf-overrides"):
            json.loads(value)


def check_vllm(arguments: list[str], _: Fleet) -> None:
    assert arguments[0] == "serve"
    check_events(arguments)


def check_python(arguments: list[str], fleet: Fleet) -> None:
    """Check that our modules exist. For SGLang, check the configuration of events."""
    assert arguments[0] == "-m" or Path(arguments[0]).exists(), arguments
    if arguments[0] != "-m":
        return
    if arguments[1].split(".")[0] in ("sglang", "dynamo"):
        check_events(arguments)
    elif arguments[1] == "kvrouter":
        run_kvrouter(arguments[2:], fleet)
    else:
        assert find_spec(arguments[1]) is not None


def check_helm(arguments: list[str], _: Fleet) -> None:
    """Check that files exist, and that `--set` names values of the chart."""
    schema = json.loads((ROOT / "deploy/helm/kvrouter/values.schema.json").read_text())
    for name, value in pairwise(arguments):
        if name == "--set":
            place: Any = schema
            for key in value.partition("=")[0].split("."):
                place = place.get("properties", {}).get(key) or place.get("additionalProperties")
                assert place, value
    check_files(arguments, _)


def check_files(arguments: list[str], _: Fleet) -> None:
    """Check that the files of this project exist."""
    for word in arguments:
        if word.startswith("deploy/"):
            assert (ROOT / word).exists(), word


def check_export(arguments: list[str], _: Fleet) -> None:
    """Check that each of our variables names a setting."""
    for name, _, value in (word.partition("=") for word in arguments):
        if name.startswith("KVROUTER_"):
            section, _, key = name.removeprefix("KVROUTER_").lower().partition("__")
            Settings(**{section: {key: value}})


RUN: dict[str, Callable[[list[str], Fleet], Any]] = {"kvrouter": run_kvrouter, "curl": run_curl}
# Programs that cannot run here: their check, and the reason.
CHECKED: dict[str, tuple[Callable[[list[str], Fleet], None], str]] = {
    "make": (check_make, "takes up to many minutes"),
    "pip": (check_pip, "would change this environment"),
    "vllm": (check_vllm, "needs a GPU"),
    "python": (check_python, "SGLang and Dynamo need a GPU; a service of ours would not end"),
    "helm": (check_helm, "needs a cluster; make test-helm renders and checks the chart"),
    "kubectl": (check_files, "needs a cluster"),
    "envoy": (check_files, "needs Envoy; make test-envoy runs it with this file"),
    "docker": (check_files, "needs a container engine"),
    "git": (check_files, "needs the network"),
    "export": (check_export, "would change this process"),
}


# Answers


def answers() -> Iterator[Any]:
    """Yield calls of curl with the JSON that is shown after them, in their block or in the next one."""
    for block, after in pairwise(ALL):
        commands = commands_of(block) if is_shell(block) else []
        if not commands or not commands[-1].startswith("curl"):
            continue
        _, _, shown = block.text.partition(commands[-1])
        near = after.page == block.page and 0 < after.line - block.line - block.text.count("\n") < 5
        if shown.strip().startswith("{"):
            yield pytest.param(commands[-1], shown, id=block.place)
        elif near and is_json(after):
            yield pytest.param(commands[-1], after.text, id=after.place)


@pytest.mark.parametrize(("command", "shown"), list(answers()))
def test_answers_have_the_shown_fields(command: str, shown: str, fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(fleet.folder)
    answer = json.loads(run_curl(words_of(fleet.substituted(command))[1:], fleet))
    alike(json.loads(_ELLIPSIS.sub("", fleet.substituted(shown))), answer, "")


def alike(shown: Any, answer: Any, place: str) -> None:
    """Check that the answer has all that is shown, with values of its types."""
    if isinstance(shown, dict):
        assert isinstance(answer, dict), place
        for key, value in shown.items():
            assert key in answer, f"{place}.{key} is not in {answer}"
            alike(value, answer[key], f"{place}.{key}")
    elif isinstance(shown, list):
        assert isinstance(answer, list), place
        if shown and answer:
            alike(shown[0], answer[0], f"{place}[0]")
    elif shown is not None and answer is not None:
        number = isinstance(shown, int | float) and isinstance(answer, int | float)
        assert number or type(shown) is type(answer), f"{place}: {answer!r}, not {shown!r}"


# make test-docs


_SERVES = re.compile(r"kvrouter (serve|indexer|simulate|picker)\b")
SERVING = sorted({command for each in COMMANDS for command in each.values[0] if _SERVES.match(command)})


@pytest.mark.docs
@pytest.mark.parametrize("command", SERVING)
def test_server_commands_serve(command: str, fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(fleet.folder)
    arguments = words_of(fleet.substituted(command))[1:]
    if "--port" in arguments:
        arguments[arguments.index("--port") + 1] = "0"
    else:
        arguments += ["--port", "0"]
    if arguments[0] == "picker":
        arguments += ["--grpc-port", "0"]
    with KvrouterProcess(arguments) as process:
        url = process.wait_until_listening()
        assert urlopen(f"{url}/health", timeout=60).status == 200


@pytest.mark.docs
def test_recordings_give_the_documented_count(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(fleet.folder)
    (expected,) = {found for block in ALL for found in re.findall(r"--expect (\d+)", block.text)}
    files = map(str, sorted((ROOT / "tests" / "data").glob("*.kvrec")))
    result = CliRunner().invoke(app, ["replay", "--check", *files, "--expect", expected])
    assert result.exit_code == 0, result.output


# Python


@pytest.mark.parametrize("block", named(lambda block: block.language == "python"))
def test_python_examples_run(block: Block, fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(fleet.folder)
    if "from ray import" in block.text:
        pytest.importorskip("ray", reason="make test-ray runs it")
    code = "\n" * (block.line - 1) + fleet.substituted(block.text)
    exec(compile(code, str(block.page), "exec"), {"__name__": "example"})


# Settings and documents


@pytest.mark.parametrize("block", named(is_json))
def test_json_examples_are_valid(block: Block) -> None:
    decoder = json.JSONDecoder()
    text = _ELLIPSIS.sub("", block.text)
    # Several documents may follow each other, with words between them.
    read = 0
    while (start := text.find('{"')) >= 0:
        _, end = decoder.raw_decode(text, start)
        text = text[end:]
        read += 1
    assert read


# Parts of Envoy's configuration: make test-envoy has Envoy read them.
ENVOY_FIELDS = {"load_balancing_policy"}
# The file that verl reads: tests/kvrouter/adapters/test_verl.py makes a balancer from these fields.
VERL_FIELDS = {"router_class", "block_size", "discover", "settings"}


@pytest.mark.parametrize("block", named(lambda block: block.language == "yaml" or "apiVersion:" in block.text))
def test_yaml_examples_are_valid(block: Block, fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accept settings, values of the chart, Kubernetes objects, and parts of Envoy's configuration."""
    monkeypatch.chdir(fleet.folder)
    # tests/end_to_end imports the modules of the pages about policies and hooks of one's own.
    monkeypatch.setattr("router.settings.own_code.function_named", lambda name, _: name)
    text = re.sub(r"\b[0-9a-f]+…", "a" * 64, block.text).replace("…", "x")
    for document in yaml.safe_load_all(text):
        if "apiVersion" in document:
            assert {"kind", "metadata"} <= document.keys()
            continue
        if document.keys() <= ENVOY_FIELDS or document.keys() <= VERL_FIELDS:
            continue
        try:
            Settings(**document)
        except ValidationError as refused:
            schema = json.loads((ROOT / "deploy/helm/kvrouter/values.schema.json").read_text())
            try:
                jsonschema.validate(document, schema)
            except jsonschema.ValidationError as error:
                raise AssertionError(f"neither settings ({refused}) nor values ({error.message})") from None
