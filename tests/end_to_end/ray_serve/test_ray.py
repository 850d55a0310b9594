"""A real Ray Serve with `kvrouter.adapters.ray.KVRouter`, beside Ray's own routers on the same traffic."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Iterator
from statistics import median, quantiles
from typing import Any

import aiohttp
import openai
import pytest

pytest.importorskip("ray", reason="make test-ray installs it")
import ray
from ray import serve

from ray_serve.agents_app import OURS, TimedRouter, application

pytestmark = pytest.mark.ray
URL = "http://127.0.0.1:8123"
AGENTS, TURNS = 18, 6
SECONDS = float(os.environ.get("KVROUTER_RAY_SECONDS", "30"))
SYSTEM = "You are an agent that mends software. " * 24
PREFIX_ROUTER = "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router.PrefixCacheAffinityRouter"


@pytest.fixture(scope="module", autouse=True)
def served(cluster: None) -> Iterator[None]:  # noqa: ARG001
    serve.start(http_options={"host": "127.0.0.1", "port": 8123})
    logging.disable(logging.INFO)  # one line a request
    yield
    logging.disable(logging.NOTSET)
    serve.shutdown()


class Traffic:
    """Counts what agents with a shared system prompt get."""

    def __init__(self) -> None:
        self.answers = self.errors = self.prompt = self.cached = 0
        self.replicas: Counter[str] = Counter()
        self.seconds: list[float] = []

    @property
    def hits(self) -> float:
        return self.cached / max(self.prompt, 1)

    async def agent(self, client: openai.AsyncOpenAI, number: int, turns: int = TURNS) -> None:
        """Send the turns of one agent, each after the answer to the one before."""
        messages: list[Any] = [{"role": "system", "content": SYSTEM}]
        for turn in range(turns):
            began = time.perf_counter()
            messages.append({"role": "user", "content": f"Agent {number}, step {turn}: " + f"file {number} " * 30})
            try:
                answer = await client.chat.completions.create(model="Engine", messages=messages, max_tokens=8)
            except (openai.APIConnectionError, openai.APIStatusError):
                self.errors += 1
                continue
            self.seconds.append(time.perf_counter() - began)
            assert answer.usage is not None
            self.answers += 1
            self.prompt += answer.usage.prompt_tokens
            details = answer.usage.prompt_tokens_details
            self.cached += (details and details.cached_tokens) or 0
            self.replicas[str((answer.model_extra or {})["replica"])] += 1
            messages.append({"role": "assistant", "content": answer.choices[0].message.content or ""})

    async def agents(self, count: int = AGENTS, first: int = 0) -> None:
        """Send the turns of some agents at once, with one retry, because Ray's proxy closes idle connections."""
        http = openai.DefaultAsyncHttpxClient(timeout=60)
        async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=1, http_client=http) as client:
            await asyncio.gather(*[self.agent(client, first + number) for number in range(count)])


async def start(router: Any, replicas: int = 3, **options: Any) -> None:
    """Start the application, and wait until the handle of the ingress asks the selector."""
    await asyncio.to_thread(serve.run, application(router, replicas, **options), name="agents", route_prefix="/")
    await Traffic().agents(count=1, first=-1)
    if router is TimedRouter and options.get("state") != "process":
        await until_chosen()


async def until_chosen() -> None:
    """Send requests until the selector chooses for them."""
    async with asyncio.timeout(120):
        before = (await status())["choices"]
        while (await status())["choices"] < before + TURNS:
            await Traffic().agents(count=1, first=-1)


def shown(seconds: list[float]) -> str:
    if not seconds:
        return "not measured"
    return f"p50 {median(seconds) * 1e3:.2f} ms, p99 {quantiles(seconds, n=100)[98] * 1e3:.2f} ms"


async def choice_times() -> list[float]:
    async with aiohttp.ClientSession() as session, session.get(f"{URL}/choices") as reply:
        times: list[float] = await reply.json()
        return sorted(times)


async def status() -> dict[str, Any]:
    """Return the load that the shared selector holds, as soon as its actor runs."""
    for _ in range(300):
        try:
            actor = ray.get_actor("selector:agents:Engine", namespace="kvrouter")
            found: dict[str, Any] = await actor.call.remote("status")
        except (ray.exceptions.RayActorError, ValueError):
            await asyncio.sleep(0.2)
        else:
            return found
    raise AssertionError("The selector's actor does not run.")


async def until_idle(replicas: int) -> dict[str, Any]:
    """Wait until no request is in flight on any of the replicas."""
    deadline = asyncio.get_running_loop().time() + 90  # replicas of a handle that ended are known for 30 s
    while True:
        found = await status()
        if len(found["in_flight"]) == replicas and not any(found["in_flight"].values()):
            return found
        assert asyncio.get_running_loop().time() < deadline, found
        await asyncio.sleep(0.2)


def replica_actors() -> dict[str, Any]:
    """Return the actors of the engines by the ids of their replicas."""
    names = [each["name"] for each in ray.util.list_named_actors(all_namespaces=True)]
    engines = [name for name in names if name.startswith("SERVE_REPLICA::agents#Engine#")]
    return {name.rsplit("#", 1)[1]: ray.get_actor(name, namespace="serve") for name in engines}


async def test_hits_beside_rays_own_routers() -> None:
    rows: dict[str, Traffic] = {}
    times: dict[str, list[list[float]]] = {}
    ways: dict[str, tuple[Any, dict[str, Any]]] = {
        "Ray's default": (None, {}),
        "PrefixCacheAffinityRouter": (PREFIX_ROUTER, {}),
        "kvrouter, actor": (TimedRouter, OURS),
        "kvrouter, process": (TimedRouter, OURS | {"state": "process"}),
    }
    for name, (router, options) in ways.items():
        await start(router, **options)
        await choice_times()
        rows[name] = Traffic()
        await rows[name].agents()
        times[name] = [await choice_times()]
        assert rows[name].answers == AGENTS * TURNS, name
        for number in range(5):
            await Traffic().agents(count=1, first=100 + number)
        times[name].append(await choice_times())
        await asyncio.to_thread(serve.delete, "agents")
    for name, row in rows.items():
        print(f"{name:26} hits {row.hits:.1%} of replicas {sorted(row.replicas.values())}, answer {shown(row.seconds)}")
        for agents, seconds in zip(("all agents at once", "one agent at a time"), times[name], strict=True):
            print(f"{'':26} choice, {agents}: {shown(seconds)}")
    ours = rows["kvrouter, actor"]
    assert ours.hits > rows["Ray's default"].hits
    assert ours.hits > rows["PrefixCacheAffinityRouter"].hits
    assert len(ours.replicas) == 3


async def test_replica_is_killed_and_one_is_added_under_load_and_no_load_is_left() -> None:
    await start(TimedRouter, **OURS)
    traffic, before = Traffic(), (await until_idle(3))["choices"]
    await traffic.agents()
    assert (traffic.errors, len(traffic.replicas)) == (0, 3)
    chosen = (await until_idle(3))["choices"] - before
    print(f"{chosen} of {traffic.answers} requests by choice")
    assert chosen > 0.9 * traffic.answers
    # A replica that is killed loses the requests that it has begun, as with any router of Ray.
    killed, actor = next(iter(replica_actors().items()))
    running = asyncio.create_task(traffic.agents(first=100))
    await asyncio.sleep(0.5)
    ray.kill(actor)
    await running
    assert traffic.errors <= AGENTS
    assert killed not in (await until_idle(3))["in_flight"]
    # More replicas.
    await start(TimedRouter, 4, **OURS)
    traffic = Traffic()
    await traffic.agents(first=200)
    assert (traffic.errors, len(traffic.replicas)) == (0, 4)
    await until_idle(4)
    # The selector is killed: each request is still answered, and a new selector knows all replicas.
    ray.kill(ray.get_actor("selector:agents:Engine", namespace="kvrouter"), no_restart=False)
    traffic = Traffic()
    await traffic.agents(first=300)
    assert traffic.errors == 0
    await until_chosen()
    await until_idle(4)
    # No leak.
    await choice_times()
    traffic, began, rounds = Traffic(), asyncio.get_running_loop().time(), 0
    while asyncio.get_running_loop().time() - began < SECONDS:
        await traffic.agents(first=1000 * (rounds := rounds + 1))
    found = await until_idle(4)
    times = await choice_times()
    print(
        f"{traffic.answers} answers in {SECONDS:.0f} s, {traffic.errors} errors, hits {traffic.hits:.1%}, "
        f"choice {shown(times)}, {found}"
    )
    assert traffic.errors == 0
