"""An application of Ray Serve: an ingress for the clients of OpenAI, and replicas of an engine with event streams."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
from pydantic import BaseModel
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request

from kvrouter.adapters import ray as adapter
from kvrouter.adapters.ray import KVRouter, replica_stats
from simulator.worker import SimulatedWorkerSettings
from simulator.worker.serve import running
from simulator.worker.settings import BUNDLED_MODEL

BLOCK, BLOCKS = 16, 400


class Chat(BaseModel):
    """The fields of a chat that the engine reads."""

    model: str
    messages: list[dict[str, Any]]
    max_tokens: int = 8


class TimedRouter(KVRouter):
    """Measures the time of each choice. Ray copies this class, so the times are kept in a module that it imports."""

    async def choose_replicas(self, *arguments: Any, **options: Any) -> Any:
        began = time.perf_counter()
        try:
            return await super().choose_replicas(*arguments, **options)
        finally:
            adapter.__dict__.setdefault("measured_choices", []).append(time.perf_counter() - began)


@serve.deployment(ray_actor_options={"num_cpus": 0}, max_ongoing_requests=32, health_check_period_s=1)
class Engine:
    """A simulated worker in a replica."""

    def __init__(self) -> None:
        self._stack = AsyncExitStack()
        self._url: str | None = None

    async def _start(self) -> str:
        if self._url is None:
            settings = SimulatedWorkerSettings(
                model="Engine", num_blocks=BLOCKS, max_model_len=BLOCKS * BLOCK, base_step_s=0.002
            )
            self._session = await self._stack.enter_async_context(aiohttp.ClientSession())
            self._url = await self._stack.enter_async_context(running(settings))
        return self._url

    async def record_replica_metadata(self) -> dict[str, Any]:
        async with self._session_at(await self._start(), "/kv_event_sources") as reply:
            endpoint = (await reply.json())["0"]["endpoint"]
        return replica_stats(block_size=BLOCK, capacity=BLOCKS, streams=[{"endpoint": endpoint}])

    def _session_at(self, url: str, path: str, **body: Any) -> Any:
        return self._session.post(url + path, **body) if body else self._session.get(url + path)

    async def chat(self, chat: Chat) -> dict[str, Any]:
        url = await self._start()
        async with self._session_at(url, "/v1/chat/completions", json=chat.model_dump()) as reply:
            answer: dict[str, Any] = await reply.json()
        answer["replica"] = serve.get_replica_context().replica_id.unique_id
        return answer


@serve.deployment(ray_actor_options={"num_cpus": 0}, max_ongoing_requests=256)
class Ingress:
    """Sends chats to the engines, and reports the times of the choices."""

    def __init__(self, engines: DeploymentHandle) -> None:
        self._engines = engines

    async def __call__(self, request: Request) -> Any:
        if request.url.path.endswith("/choices"):
            return adapter.__dict__.pop("measured_choices", [])
        chat = Chat.model_validate(await request.json())
        return await self._engines.chat.remote(chat)


def application(router: str | type | None, replicas: int = 3, **options: Any) -> Any:
    """Return the application. `router`: the request router of the engines, with its options; None: Ray's default."""
    config: dict[str, Any] = {"num_replicas": replicas}
    if router is not None:
        config["request_router_config"] = RequestRouterConfig(
            request_router_class=router, request_router_kwargs=options, request_routing_stats_period_s=1
        )
    return Ingress.bind(Engine.options(**config).bind())  # type: ignore[attr-defined]


OURS: dict[str, Any] = {"tokenizer": str(BUNDLED_MODEL)}
