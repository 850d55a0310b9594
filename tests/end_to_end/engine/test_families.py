"""Predicted overlaps of every family of tokenizers and chat templates, compared with the engine's report.

FAMILIES     those to try, by name, with commas; all by default
FAMILY_TABLE a file to write the table to, as Markdown; its rows of other families stay
"""

from __future__ import annotations

import copy
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from engine.installation import Installation
from engine.pictures import image_part
from engine.processes import wait_for
from engine.servers import MODEL, RouterProcess, VllmWorker
from engine.table import write_table
from engine.web import get_json
from router.tokens.probes import PROBES

pytestmark = pytest.mark.engine

_TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser")
FLAGS: dict[str, tuple[str, ...]] = {
    "qwen3": (*_TOOLS, "hermes"),
    "llama3": (*_TOOLS, "llama3_json"),
    "mistral": ("--tokenizer-mode", "mistral", *_TOOLS, "mistral"),
    "gpt_oss": (*_TOOLS, "openai"),
    "deepseek_v31": (),
    "deepseek_v32": ("--tokenizer-mode", "deepseek_v32"),
    "gemma3": (),
    "qwen3_next": (*_TOOLS, "hermes"),
    "idefics3": ("--trust-request-mm-kwargs",),
}
_SEES = {"idefics3"}  # images
_ALTERNATES = {"gemma3"}  # roles, so that it refuses a conversation with an answer that has no text
# Cut into pieces of 112 x 112 pixels, each of which is as many tokens as a small image.
_IN_PIECES = {"do_image_splitting": True, "max_image_size": {"longest_edge": 112}, "size": {"longest_edge": 672}}
_THINK_SECONDS = 0.3  # time for the events of an answer's last blocks
_LONG = "The worker that holds the longest prefix of a prompt answers it soonest, unless its queue is long. " * 6


@dataclass
class Result:
    """The requests of one family, each as (probe kind, predicted tokens, cached tokens, prompt tokens)."""

    family: str
    report: dict[str, Any]
    requests: list[tuple[str, int, int, int]] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)

    @property
    def misses(self) -> list[tuple[str, int, int, int]]:
        return [each for each in self.requests if each[1] != each[2]]

    @property
    def exact(self) -> float:
        return 1 - len(self.misses) / max(len(self.requests), 1)

    def row(self) -> list[str]:
        over = sum(predicted > cached for _, predicted, cached, _ in self.requests)
        under = sum(predicted < cached for _, predicted, cached, _ in self.requests)
        way = f"{self.report['source']}, {self.report['reading']}"
        counts = [str(len(self.requests)), f"{self.exact:.1%}", str(over), str(under)]
        return [self.family, way, *counts, ", ".join(sorted(self.refused)) or "-"]


COLUMNS = ("family", "prompts become tokens", "requests", "exact", "over", "under", "refused by the engine")


@pytest.fixture(scope="module")
def results() -> Iterator[list[Result]]:
    """The results of all families, printed at the end."""
    found: list[Result] = []
    yield found
    write_table(COLUMNS, [result.row() for result in found], os.environ.get("FAMILY_TABLE"))
    for result in found:
        for kind, predicted, cached, tokens in result.misses:
            print(f"{result.family}, {kind}: predicted {predicted}, cached {cached} of {tokens}")


@pytest.mark.parametrize("family", os.environ.get("FAMILIES", ",".join(FLAGS)).split(","))
def test_predicted_overlap_equals_engine_report(
    installation: Installation, logs: Path, results: list[Result], family: str
) -> None:
    stores = {"VLLM_ENABLE_RESPONSES_API_STORE": "1"}
    worker = VllmWorker(
        f"family-{family}", installation, logs, installation.family(family), FLAGS[family], environment=stores
    )
    worker.start()
    try:
        worker.wait_until_ready()
        with RouterProcess([worker], logs, patience=30.0) as router:
            wait_for(lambda: _report(router)["probes"], 60, "its probes are read")
            result = Result(family, _report(router))
            results.append(result)
            for kind, path, body in _requests():
                _send(router.url + path, result, kind, body)
            previous = None
            for turn in range(4):
                body = {"input": f"{turn}. {_LONG}", "instructions": "Be brief.", "previous_response_id": previous}
                if family in _ALTERNATES:
                    body["logit_bias"] = {"3000": 100}
                previous = _send(f"{router.url}/v1/responses", result, "continued response", body)["id"]
            if family in _SEES:
                seen = Result(f"{family}, images", _report(router))
                results.append(seen)
                for kind, body in _with_images():
                    _send(router.url + "/v1/chat/completions", seen, kind, body)
                _check_images(seen)
        if family in _SEES:
            _named_images(worker, logs, results, family)
    finally:
        worker.stop()
    assert len(result.requests) > 20
    assert result.exact >= 0.99, result.misses


def _named_images(worker: VllmWorker, logs: Path, results: list[Result], family: str) -> None:
    """Repeat the requests with images at an engine that names images, and again with a new router."""
    worker.stop()
    worker.add_flags("--enable-scale-out")
    worker.start()
    worker.wait_until_ready()
    for name in ("named images", "late router"):
        with RouterProcess([worker], logs, patience=30.0) as router:
            wait_for(lambda router=router: _report(router)["probes"], 60, "its probes are read")
            seen = Result(f"{family}, {name}", _report(router))
            results.append(seen)
            for kind, body in _with_images():
                _send(router.url + "/v1/chat/completions", seen, kind, body)
            _check_images(seen)
    assert all(predicted for _, predicted, _, _ in seen.requests), "what the engine has from before is known"


def _requests() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Each shape as a prompt of many blocks, once more, and with another turn; and what is no chat."""
    for probe in PROBES:
        if probe.kind in ("truncated", "text"):
            continue
        body = copy.deepcopy(probe.body)
        key = "input" if "input" in body else "messages"
        first = next(message for message in body[key] if message.get("role") in ("user", "developer"))
        opening = f"On {probe.kind}. {_LONG}"
        if isinstance(first["content"], str):
            first["content"] = opening + first["content"]
        else:
            first["content"][0]["text"] = opening + first["content"][0]["text"]
        yield probe.kind, probe.path, body
        yield probe.kind, probe.path, body
        if probe.kind not in ("continued", "no_generation_prompt"):
            last = body[key][-1]
            answer = (
                [] if last.get("role") == "assistant" else [{"role": "assistant", "content": "It is the second one."}]
            )
            more = [*body[key], *answer, {"role": "user", "content": f"Why? {_LONG[:120]}"}]
            yield probe.kind, probe.path, body | {key: more}
    for path, name in (("/v1/chat/completions", "salt"), ("/v1/completions", "salted text")):
        prompt = {"messages": [{"role": "user", "content": _LONG}]} if name == "salt" else {"prompt": _LONG}
        for salt in ("a", "a", "b"):
            yield name, path, prompt | {"cache_salt": salt}
    for prompt in (_LONG, [_LONG], list(range(5, 200)), [list(range(7, 200))]):
        for _ in range(2):
            yield "completions", "/v1/completions", {"prompt": prompt}


def _with_images() -> Iterator[tuple[str, dict[str, Any]]]:
    """Conversations about an image, each twice, with another turn, with a second image, and under a salt; the same of
    another image; small ones, and large ones in pieces."""
    for size, width, height, others in (
        ("small", 64, 64, {}),
        ("large", 1000, 700, {"mm_processor_kwargs": _IN_PIECES}),
    ):
        for color in ((200, 30, 30), (30, 200, 30), (30, 30, 200)):
            image = image_part(color, width, height)
            parts = [{"type": "text", "text": _LONG}, image, {"type": "text", "text": f"What is it? {_LONG}"}]
            asked = [{"role": "user", "content": parts}]
            answered = [{"role": "assistant", "content": "A square."}, {"role": "user", "content": f"Sure? {_LONG}"}]
            beside = [{"type": "text", "text": "And this?"}, image_part((9, 9, 9), height, width), parts[0]]
            compared = [*asked, answered[0], {"role": "user", "content": beside}]
            for kind, messages in (("new", asked), ("again", asked), ("another turn", asked + answered)):
                yield f"{size}, {kind}", {"messages": messages} | others
            for kind in ("two", "two again"):
                yield f"{size}, {kind}", {"messages": compared} | others
            for _ in range(2):
                yield f"{size}, salted", {"messages": asked, "cache_salt": "a"} | others


def _check_images(result: Result) -> None:
    """Nothing is refused, images count for as many tokens as they are, and large ones are large."""
    assert not result.refused
    assert max(tokens for _, _, _, tokens in result.requests) > 1000
    assert result.exact >= 0.99, result.misses


def _report(router: RouterProcess) -> dict[str, Any]:
    """Return the router's report of its tokenizer."""
    report: dict[str, Any] = get_json(f"{router.url}/workers")["tokenizers"][MODEL]
    return report


def _send(url: str, result: Result, kind: str, body: dict[str, Any]) -> Any:
    """Send a request, add it to the result, and return the answer."""
    limit = "max_output_tokens" if url.endswith("/v1/responses") else "max_tokens"
    data = json.dumps({"model": MODEL, "temperature": 0} | body | {limit: 16}).encode()
    asked = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(asked, timeout=60) as response:
            answer, headers = json.load(response), response.headers
    except urllib.error.HTTPError as error:
        if error.code != 400:
            raise
        result.refused.add(kind)
        return None
    usage = answer["usage"]
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or usage
    cached = details.get("cached_tokens", details.get("cache_read_input_tokens")) or 0
    tokens = usage.get("prompt_tokens", usage.get("input_tokens", 0))
    result.requests.append((kind, int(headers["x-kvrouter-overlap-tokens"]), cached, tokens))
    time.sleep(_THINK_SECONDS)
    return answer
