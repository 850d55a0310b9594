"""Predicted overlaps and cache hits in every mode of vLLM that its CPU engine runs.

MODES      those to try, by parts of their names, with commas; all by default
MODE_TABLE a file to write the table to, as Markdown; its rows of other modes stay
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from benchmarks.ports import free_port
from engine.client import Answer, Client
from engine.conversations import Conversation, conversations
from engine.installation import ADAPTERS, Installation
from engine.mode_report import COLUMNS, ModeResult
from engine.modes import DRAFT, MODES, PORT, TOKEN, Mode
from engine.servers import MODEL, RouterProcess, VllmWorker, running
from engine.table import write_table

pytestmark = pytest.mark.engine

CONVERSATIONS = 18
THINK_SECONDS = 0.3  # time for the events of an answer's last blocks
LEAST_EXACT = 0.98
MOST_OVER = 0.005  # of the prompts' tokens

_wanted = [part for part in os.environ.get("MODES", "").split(",") if part]
_chosen = [mode for mode in MODES if not _wanted or any(part in mode.name for part in _wanted)]


@pytest.fixture(scope="module")
def results() -> Iterator[list[ModeResult]]:
    """The results of all modes, printed at the end."""
    found: list[ModeResult] = []
    yield found
    write_table(COLUMNS, [result.row() for result in found], os.environ.get("MODE_TABLE"))
    for result in found:
        print(result.explain_misses())


@pytest.mark.parametrize("mode", _chosen, ids=lambda mode: mode.name)
def test_predicted_overlap_equals_engine_report(
    installation: Installation, logs: Path, results: list[ModeResult], mode: Mode
) -> None:
    with started(mode, installation, logs) as workers:
        with RouterProcess(workers, logs, patience=30.0, token=TOKEN) as router:
            answers = sent(mode, workers, router)
        with RouterProcess(workers, logs, "--policy", "round_robin", patience=30.0) as router:
            beside = sent(mode, workers, router, salt="round robin")
    result = ModeResult(mode.name, answers, beside)
    results.append(result)
    assert all(answer.complete for answer in answers)
    learned_by = mode.learned_by * len(workers)
    assert len(result.misses) <= (1 - LEAST_EXACT) * len(answers) + learned_by, result.explain_misses()
    assert result.over_share(learned_by) <= MOST_OVER, result.explain_misses()
    if mode.hits:
        assert result.cached_share > result.beside_share
    else:
        assert result.cached_share == 0


@contextmanager
def started(mode: Mode, installation: Installation, logs: Path) -> Iterator[list[VllmWorker]]:
    """The servers of a mode, ready."""
    port = free_port()
    adapters = [f"{name}={installation.adapter(name)}" for name in ADAPTERS]
    model = installation.family(mode.family) if mode.family else None
    name = "".join(letter if letter.isalnum() else "-" for letter in mode.name)
    workers = []
    for number, own in enumerate(mode.servers):
        flags = [str(port) if flag == PORT else flag for flag in (*mode.flags, *own)]
        flags = [flag.replace(DRAFT, str(installation.family("llama3_eagle"))) for flag in flags]
        flags = [word for flag in flags for word in (adapters if flag == "ADAPTERS" else [flag])]
        worker = VllmWorker(f"mode-{name}-{number}", installation, logs, model, flags, environment=mode.environment)
        workers.append(worker)
    with running(*workers):
        yield workers


def sent(mode: Mode, workers: list[VllmWorker], router: RouterProcess, salt: str = "") -> list[Answer]:
    """The answers to the traffic. `salt`: its caches are its own, and nothing happens in between."""
    router.wait_until_compared()
    some = conversations()[:CONVERSATIONS]
    acts = () if salt else mode.acts
    part = CONVERSATIONS // (len(acts) + 1)
    with ExitStack() as stack:
        models = mode.models or (MODEL,)
        # Made once: questions for tokens, which making one asks, go to no other worker when theirs is killed.
        clients = [Client(router, model, salt, words_are_tokens=not mode.family) for model in models]
        for client in clients:
            stack.enter_context(client)
        answers = conversed(clients, some[:part], salt)
        for number, act in enumerate(acts, 1):
            act(workers, router)
            answers += conversed(clients, some[number * part : (number + 1) * part], salt)
    return answers


def conversed(clients: list[Client], some: list[Conversation], salt: str) -> list[Answer]:
    """Each client goes through its share of the conversations."""
    answers: list[Answer] = []
    for place, client in enumerate(clients):
        think_seconds = 0.0 if salt else THINK_SECONDS
        answers += client.converse_all(some[place :: len(clients)], think_seconds=think_seconds)
    return answers
