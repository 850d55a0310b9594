"""Real engines without events and without a way to ask for tokens: llama.cpp's server and `transformers serve`.

What they hold is known by what was sent to them: of llama.cpp by the text of prompts, of the other by its model's
files. Each engine is started twice.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.ports import free_port
from engine.installation import Installation
from engine.processes import ServerProcess
from engine.servers import RouterProcess, running
from engine.web import get_json, post_reply

pytestmark = pytest.mark.engine

LONG = "The worker that holds the longest prefix of a prompt answers it soonest, unless its queue is long. " * 12
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "DO_NOT_TRACK": "1"}


class OtherEngine:
    """One server of an engine. `model`: the name that requests use."""

    def __init__(self, kind: str, number: int, installation: Installation, logs: Path) -> None:
        here = Path(__file__).parent
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._process = ServerProcess(f"{kind}{number}", logs / f"{kind}{number}.log")
        self._environment = dict(ENVIRONMENT)
        python, tiny = str(installation.other_python), installation.model("tiny")
        if kind == "llama_cpp":
            self.model = "tiny"
            self._command = [python, str(here / "serve_llama_cpp.py"), str(installation.gguf), self.model, str(port)]
        else:
            self.model = str(tiny)
            hub = installation.directory / "hub"
            (hub / "hub").mkdir(parents=True, exist_ok=True)  # an empty one: it lists what is in there
            self._environment["HF_HOME"] = str(hub)
            self._command = [python, "-m", "transformers.cli.transformers", "serve", str(tiny), "--device", "cpu"]
            self._command += ["--host", "127.0.0.1", "--port", str(port)]

    def start(self) -> None:
        self._process.start(self._command, self._environment)

    def wait_until_ready(self) -> None:
        self._process.wait_until_healthy(self.url)

    def stop(self) -> None:
        self._process.stop()


@pytest.fixture(scope="module", params=["llama_cpp", "transformers"])
def engines(request: pytest.FixtureRequest, installation: Installation, logs: Path) -> Iterator[list[OtherEngine]]:
    found = [OtherEngine(request.param, number, installation, logs) for number in range(2)]
    with running(*found):
        yield found


def settings(engines: list[OtherEngine], tmp_path: Path, policy: str = "kv_aware") -> tuple[str, str]:
    file = tmp_path / f"{policy}.yaml"
    workers = [{"url": engine.url, "model": engine.model} for engine in engines]
    file.write_text(yaml.safe_dump({"workers": workers, "policy": {"name": policy}}))
    return "--config", str(file)


def chat(router: RouterProcess, model: str, *said: str, system: str = LONG) -> tuple[str, int, dict[str, Any]]:
    """Send a chat, and return its worker, the predicted overlap and the usage."""
    roles = ("user", "assistant")
    messages = [{"role": roles[place % 2], "content": text} for place, text in enumerate(said)]
    body = {
        "model": model,
        "messages": [{"role": "system", "content": system}, *messages],
        "max_tokens": 4,
        "temperature": 0,
    }
    headers, answer = post_reply(f"{router.url}/v1/chat/completions", body)
    return headers["x-kvrouter-worker"], int(headers["x-kvrouter-overlap-tokens"]), answer.get("usage") or {}


def test_requests_of_one_prompt_stay_together(engines: list[OtherEngine], logs: Path, tmp_path: Path) -> None:
    model = engines[0].model
    with RouterProcess([], logs, *settings(engines, tmp_path)) as router:
        for number in range(3):
            system = f"{number} {LONG}"
            answered = Counter(chat(router, model, f"What is it? {turn}", system=system)[0] for turn in range(8))
            assert list(answered.values()) == [8]
        # The name of the other's model is its folder.
        way, findings = ("local", []) if os.path.isabs(model) else ("text", ["prompts_by_text"])
        assert [each["finding"] for each in router.health()["findings"]] == findings
        assert get_json(f"{router.url}/workers")["tokenizers"][model]["source"] == way


def test_kv_aware_hits_more_than_round_robin(engines: list[OtherEngine], logs: Path, tmp_path: Path) -> None:
    model, cached, prompted, predicted, wrong = engines[0].model, Counter[str](), Counter[str](), 0, 0
    reports = False
    for policy in ("kv_aware", "round_robin"):
        with RouterProcess([], logs, *settings(engines, tmp_path, policy)) as router:
            for turns in (1, 2, 3):
                for number in range(3):
                    said = [word for turn in range(turns) for word in (f"Question {turn}?", "Yes.")][: 2 * turns - 1]
                    _, overlap, usage = chat(router, model, *said, system=f"{policy} {number} {LONG}")
                    details = usage.get("prompt_tokens_details") or {}
                    reports |= "cached_tokens" in details
                    found = details.get("cached_tokens") or 0
                    cached[policy] += found
                    prompted[policy] += usage["prompt_tokens"]
                    if policy == "kv_aware":
                        # The prediction is estimated from the text: four bytes a token.
                        share = overlap / max(len(LONG) / 4, 1)
                        predicted += bool(overlap)
                        wrong += abs(share - found / usage["prompt_tokens"]) > 0.25
    figures = {policy: round(cached[policy] / prompted[policy], 3) for policy in cached}
    print(
        json.dumps(
            {"engine": model, "reports_cached": reports, "cached": figures, "predicted": predicted, "wrong": wrong}
        )
    )
    assert predicted == 6  # all but the first turns
    if reports:
        assert cached["kv_aware"] > cached["round_robin"]
        assert wrong == 0


def test_worker_without_listed_models_is_a_finding(engines: list[OtherEngine], logs: Path, tmp_path: Path) -> None:
    if os.path.isabs(engines[0].model):
        file = tmp_path / "unnamed.yaml"
        file.write_text(yaml.safe_dump({"workers": [{"url": engine.url} for engine in engines]}))
        with RouterProcess([], logs, "--config", str(file)) as router:
            assert {each["finding"] for each in router.health()["findings"]} == {"no_models"}
