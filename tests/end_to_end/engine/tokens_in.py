"""Time to first token and requests per second of a real vLLM: direct, and through a router without and with ids.

    python -m engine.tokens_in ENGINE_DIR

Every request is a stream of one token. Its conversation is cached, and its last message is new. The three sides take
turns, so that other work on the machine affects all of them.
"""

from __future__ import annotations

import http.client
import json
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

from benchmarks.machine import description
from engine.installation import Installation
from engine.processes import wait_for
from engine.servers import MODEL, RouterProcess, VllmWorker, running
from engine.table import write_table
from engine.web import post_json

TOKENS = (4_000, 30_000, 100_000)
CLIENTS = (1, 4)
ROUNDS = 9
MESSAGES = 21
SIDES = ("direct", "router", "router with ids")
FIGURES = ("TTFT in ms", "requests/s")
COLUMNS = ("prompt tokens", "clients", *(f"{figure}, {side}" for figure in FIGURES for side in SIDES))
_LENGTHS = ("--max-model-len", "131072", "--num-gpu-blocks-override", "12000", "--max-num-batched-tokens", "8192")
_numbers = count()


def conversation(url: str, tokens: int) -> list[dict[str, str]]:
    """Return messages of about this number of tokens together, from the texts that the tokenizer was trained on."""
    text = "".join(path.read_text(errors="ignore") for path in sorted(Path(os.__file__).parent.glob("*.py"))[:60])
    size = int(tokens * len(text) / len(post_json(f"{url}/tokenize", {"prompt": text})["tokens"]) / MESSAGES)
    return [
        {"role": ("user", "assistant")[number % 2], "content": text[number * size : (number + 1) * size]}
        for number in range(MESSAGES - 1)
    ]


def first_token(url: str, messages: list[dict[str, str]]) -> float:
    """Return the seconds until the first event of a stream, whose last message is new."""
    last = {"role": "user", "content": f"{next(_numbers)}: which of them?"}
    body = {"model": MODEL, "messages": [*messages, last], "max_tokens": 1, "temperature": 0, "stream": True}
    data = json.dumps(body).encode()
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=600)
    try:
        begun = time.perf_counter()
        connection.request("POST", "/v1/chat/completions", data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        line = response.readline()
        seconds = time.perf_counter() - begun
        assert response.status == 200, line
        response.read()
    finally:
        connection.close()
    return seconds


def measured(urls: dict[str, str], messages: list[dict[str, str]], clients: int) -> Iterator[str]:
    """Yield each side's median time to the first token in milliseconds, then its requests per second."""
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    rates: dict[str, list[float]] = {side: [] for side in SIDES}
    with ThreadPoolExecutor(clients) as threads:
        for _ in range(ROUNDS):
            for side in SIDES:
                begun = time.perf_counter()
                asked = [threads.submit(first_token, urls[side], messages) for _ in range(2 * clients)]
                seconds[side] += [each.result() for each in asked]
                rates[side].append(len(asked) / (time.perf_counter() - begun))
    yield from (f"{1000 * median(seconds[side]):.1f}" for side in SIDES)
    yield from (f"{median(rates[side]):.1f}" for side in SIDES)


def main(directory: str) -> None:
    installation = Installation(Path(directory).absolute())
    logs = installation.directory / "logs"
    worker = VllmWorker(
        "tokens-in",
        installation,
        logs,
        installation.family("qwen3"),
        _LENGTHS,
        environment={"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"},
    )
    rows = []
    with running(worker), RouterProcess([worker], logs, patience=300.0) as router:
        other = RouterProcess([worker], logs / "ids", patience=300.0, forward_tokens=True)
        with other as with_ids:
            for each in (router, with_ids):
                each.wait_until_compared()
            wait_for(lambda: not any(with_ids.tokenizer()["ids_not_sent"].values()), 60, "ids are sent")
            urls = dict(zip(SIDES, (worker.url, router.url, with_ids.url), strict=True))
            for tokens in TOKENS:
                messages = conversation(worker.url, tokens)
                for side in SIDES:
                    first_token(urls[side], messages)
                for clients in CLIENTS:
                    rows.append([f"{tokens:,}", str(clients), *measured(urls, messages, clients)])
                    print(rows[-1], flush=True)
    print(f"Machine: {description()}.")
    write_table(COLUMNS, rows, None)


if __name__ == "__main__":
    main(sys.argv[1])
