"""The router's own API is what its OpenAPI document says, whatever is sent to it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from router_under_test import router
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from simulator.worker import SimulatedWorkerSettings
from simulator.worker.serve import running

CHECKS: list[Any] = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
INDEX = ["/match", "/register", "/unregister", "/query", "/query_by_hash"]
WITH_BODIES = [*INDEX, "/explain", "/workers/drain", "/workers/undrain"]


class Document:
    """A running router and its document."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.schema = schemathesis.openapi.from_url(f"{url}/openapi.json")


@pytest.fixture(scope="module")
def document() -> Iterator[Document]:
    """The router runs in a thread of its own, since this client blocks."""
    loop = asyncio.new_event_loop()
    stack = AsyncExitStack()

    async def start() -> str:
        worker = await stack.enter_async_context(running(SimulatedWorkerSettings()))
        return (await stack.enter_async_context(router(worker))).url

    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        url = asyncio.run_coroutine_threadsafe(start(), loop).result(60)
        yield Document(url)
        asyncio.run_coroutine_threadsafe(stack.aclose(), loop).result(60)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


# A reset does what it says, and a worker that is added is looked for in the network; all else is asked.
OPERATIONS = [
    *(("POST", path, mode) for path in WITH_BODIES for mode in GenerationMode),
    *(
        ("GET", path, GenerationMode.POSITIVE)
        for path in ("/dump", "/health", "/metrics", "/v1/models", "/v1/models/{name}", "/workers")
    ),
]


@pytest.mark.parametrize(("method", "path", "mode"), OPERATIONS)
def test_generated_requests_are_answered_as_documented(
    document: Document, method: str, path: str, mode: GenerationMode
) -> None:
    @given(document.schema[path][method].as_strategy(generation_mode=mode))
    @settings(
        max_examples=10, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )
    def answer(case: Any) -> None:
        case.call_and_validate(checks=CHECKS, timeout=20)

    answer()


def test_bodies_are_documented(document: Document) -> None:
    paths = document.schema.raw_schema["paths"]
    for path in [*WITH_BODIES, "/workers"]:
        body = paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert body["properties"]
        assert body["required"] or path.endswith(("drain", "_by_hash"))  # which take one of several fields
