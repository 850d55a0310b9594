"""Answers of a real engine, asked directly and through a router that sends token ids, and their differences."""

from __future__ import annotations

import json
import re
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from engine.processes import wait_for
from engine.servers import RouterProcess, VllmWorker

Answer = tuple[int, Any]

# Names that differ between two equal requests.
_NAMES = {
    *("id", "created", "created_at", "completed_at", "item_id", "call_id", "request_id", "sequence_number"),
    "signature",
}
# Counted by event: a token that ends within a character counts if it has an event of its own.
_BY_EVENT = "reasoning_tokens"
_SENT = "kvrouter_forwarded_token_requests_total"
_TEXTS = ("content", "reasoning", "text", "thinking", "partial_json", "arguments")


class ComparedAnswers:
    """A worker, asked directly and through a router.

    - `reason`: why the router sends no ids to it; "" if it does.
    - `asked`, `sent`: the number of comparisons, and of those whose request had ids.
    - `plain`, `refused`: the names of requests without ids, and of those that the worker answers with an error.
    """

    def __init__(self, worker: VllmWorker, router: RouterProcess) -> None:
        self._worker = worker
        self._router = router
        self.asked = 0
        self.sent = 0
        self.plain: list[str] = []
        self.refused: list[str] = []
        self.differences: list[str] = []
        (self.reason,) = wait_until_tried(router)

    def compare(self, name: str, path: str, body: bytes, hostile: bool = False) -> None:
        """Record how the two answers differ, and whether ids were sent. The router may refuse a hostile request."""
        expected = self.direct(path, body)
        before = self._router.metric(_SENT)
        self._reset_cache()
        found = answer(self._router.url, path, body)
        self.asked += 1
        if self._router.metric(_SENT) > before:
            self.sent += 1
        else:
            self.plain.append(name)
        if expected[0] != 200:
            self.refused.append(f"{name} ({expected[0]})")
        if found != expected and not (hostile and found[0] == 400):
            self.differences.append(f"{name}: {found} instead of {expected}")

    def direct(self, path: str, body: bytes) -> Answer:
        """Return the worker's own answer, from an empty cache."""
        self._reset_cache()
        return answer(self._worker.url, path, body)

    def _reset_cache(self) -> None:
        wait_for(self._is_cache_reset, 10, "its cache is reset")

    def _is_cache_reset(self) -> bool:
        with urlopen(Request(f"{self._worker.url}/reset_prefix_cache", method="POST"), timeout=30) as response:
            return bool(response.status == 200)


def reasons(router: RouterProcess) -> list[str]:
    """Return for each worker why the router sends it no ids; "" if it does."""
    return list(router.tokenizer().get("ids_not_sent", {}).values())


def wait_until_tried(router: RouterProcess) -> list[str]:
    """Wait until the trials of all workers have ended, and return the reasons."""

    def tried() -> list[str]:
        found = reasons(router)
        return [] if any("trial" in reason for reason in found) else found

    return wait_for(tried, 60, "trials end")


def answer(url: str, path: str, body: bytes) -> Answer:
    """Return the status, and what two equal requests have in common."""
    request = Request(url + path, body, {"Content-Type": "application/json"})
    try:
        with urlopen(request, timeout=60) as response:
            data = response.read()
            is_stream = response.headers["Content-Type"].startswith("text/event-stream")
            return response.status, _joined(data) if is_stream else _common(json.loads(data))
    except HTTPError as error:
        with error:
            return error.code, None


def without_usage(found: Answer) -> Any:
    """Return an answer's fields without its usage."""
    return {name: value for name, value in found[1].items() if name != "usage"}


def _common(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _common(inner) for name, inner in value.items() if name not in _NAMES}
    if isinstance(value, list):
        return [_common(each) for each in value]
    return re.sub(r"(call_|chatcmpl-tool-)\w+", "call", value) if isinstance(value, str) else value


def _without_counts_by_event(usage: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _without_counts_by_event(value) if isinstance(value, dict) else value
        for name, value in usage.items()
        if name != _BY_EVENT
    }


def _joined(stream: bytes) -> dict[str, Any]:
    """Return what the events of a stream say together, however the answer was cut into events."""
    joined: dict[str, Any] = {}

    def read(value: Any, name: str) -> None:
        if isinstance(value, dict):
            for inner, each in value.items():
                if inner == "usage" and each is not None:
                    joined["usage"] = _without_counts_by_event(each)
                else:
                    read(each, inner)
        elif isinstance(value, list) and name in ("token_ids", "prompt_token_ids"):
            joined.setdefault(name, []).extend(value)
        elif isinstance(value, list):
            for each in value:
                read(each, name)
        elif name in _TEXTS and isinstance(value, str):
            joined[name] = joined.get(name, "") + value
        elif name == "logprob":
            joined.setdefault(name, []).append(value)
        elif name in ("finish_reason", "stop_reason", "status") and value is not None:
            joined[name] = value

    for line in stream.split(b"\n"):
        if line.startswith(b"data: {"):
            read(json.loads(line[6:]), "")
    return joined
