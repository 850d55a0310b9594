"""A real Ray Serve with `kvrouter.adapters.ray.KVRouter`, beside Ray's own routers on the same traffic."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
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
ROOT = Path(__file__).parents[3]
URL = "http://127.0.0.1:8123"
AGENTS, TURNS = 18, 6
SECONDS = float(os.environ.get("KVROUTER_RAY_SECONDS", "60"))
SYSTEM = "You are an agent that mends software. " * 24
PREFIX_ROUTER = "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router.PrefixCacheAffinityRouter"


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    environment = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests/end_to_end")])}
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": environment})
    serve.start(http_options={"host": "127.0.0.1", "port": 8123})
    yield
    serve.shutdown()
    ray.shutdown()


class Traffic:
    """Counts what agents with a shared system prompt get."""

    def __init__(self) -> None:
        self.answers = self.errors = self.prompt = self.cached = 0
        self.replicas: Counter[str] = Counter()

    @property
    def hits(self) -> float:
        return self.cached / max(self.prompt, 1)

    async def agent(self, client: openai.AsyncOpenAI, number: int, turns: int = TURNS) -> None:
        """Send the turns of one agent, each after the answer to the one before."""
        messages: list[Any] = [{"role": "system", "content": SYSTEM}]
        for turn in range(turns):
            messages.append({"role": "user", "content": f"Agent {number}, step {turn}: " + f"file {number} " * 30})
            try:
                answer = await client.chat.completions.create(model="Engine", messages=messages, max_tokens=8)
            except openai.APIStatusError:
                self.errors += 1
                continue
            assert answer.usage is not None
            self.answers += 1
            self.prompt += answer.usage.prompt_tokens
            details = answer.usage.prompt_tokens_details
            self.cached += (details and details.cached_tokens) or 0
            self.replicas[str((answer.model_extra or {})["replica"])] += 1
            messages.append({"role": "assistant", "content": answer.choices[0].message.content or ""})

    async def agents(self, count: int = AGENTS, together: int = 6, first: int = 0) -> None:
        """Send the turns of some agents, with `together` of them at once."""
        limit = asyncio.Semaphore(together)
        http = openai.DefaultAsyncHttpxClient(timeout=60)
        async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, http_client=http) as client:

            async def limited(number: int) -> None:
                async with limit:
                    await self.agent(client, number)

            await asyncio.gather(*[limited(first + number) for number in range(count)])


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


async def choice_times() -> list[float]:
    async with aiohttp.ClientSession() as session, session.get(f"{URL}/choices") as reply:
        times: list[float] = await reply.json()
        return sorted(times)


async def status() -> dict[str, Any]:
    """Return the load that the shared selector holds."""
    actor = ray.get_actor("selector:agents:Engine", namespace="kvrouter")
    found: dict[str, Any] = await actor.call.remote("status")
    return found


async def until_idle(replicas: int) -> dict[str, Any]:
    """Wait until no request is in flight on any of the replicas."""
    async with asyncio.timeout(60):
        while True:
            found = await status()
            if len(found["in_flight"]) == replicas and not any(found["in_flight"].values()):
                return found
            await asyncio.sleep(0.2)


def replica_actors() -> dict[str, Any]:
    """Return the actors of the engines by the ids of their replicas."""
    names = [each["name"] for each in ray.util.list_named_actors(all_namespaces=True)]
    engines = [name for name in names if name.startswith("SERVE_REPLICA::agents#Engine#")]
    return {name.rsplit("#", 1)[1]: ray.get_actor(name, namespace="serve") for name in engines}


async def test_hits_beside_rays_own_routers() -> None:
    rows: dict[str, Traffic] = {}
    times: dict[str, list[float]] = {}
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
        times[name] = await choice_times()
        assert rows[name].answers == AGENTS * TURNS, name
        await asyncio.to_thread(serve.delete, "agents")
    for name, row in rows.items():
        each = times[name]
        choice = f"p50 {median(each) * 1e3:.2f} ms, p99 {quantiles(each, n=100)[98] * 1e3:.2f} ms" if each else "-"
        print(f"{name:26} hits {row.hits:.1%} replicas {sorted(row.replicas.values())} choice {choice}")
    ours = rows["kvrouter, actor"]
    assert ours.hits > rows["Ray's default"].hits
    # Ray's affinity may send everything to one replica, whose cache then has all prefixes.
    assert ours.hits > rows["PrefixCacheAffinityRouter"].hits or len(rows["PrefixCacheAffinityRouter"].replicas) < 3
    assert len(ours.replicas) == 3


async def test_application_of_the_page_answers() -> None:
    page = (ROOT / "docs/ray.md").read_text()
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(page.partition("```python\n")[2].partition("```")[0], names)
    await asyncio.to_thread(serve.run, names["app"], name="page", route_prefix="/page")
    chat = {"model": "simulated", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    async with aiohttp.ClientSession() as session, session.post(f"{URL}/page/v1/chat/completions", json=chat) as reply:
        assert (await reply.json())["usage"]["completion_tokens"] == 4
    await asyncio.to_thread(serve.delete, "page")


async def test_replica_is_killed_and_one_is_added_under_load_and_no_load_is_left() -> None:
    await start(TimedRouter, **OURS)
    traffic, before = Traffic(), (await until_idle(3))["choices"]
    await traffic.agents()
    assert (traffic.errors, len(traffic.replicas)) == (0, 3)
    print(f"{(await until_idle(3))['choices'] - before} of {traffic.answers} requests by choice")
    # A replica that is killed loses the requests that it has begun, as with any router of Ray.
    killed, actor = next(iter(replica_actors().items()))
    running = asyncio.create_task(traffic.agents(first=100))
    await asyncio.sleep(0.5)
    ray.kill(actor)
    await running
    assert traffic.errors <= 6
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
    traffic, began, rounds = Traffic(), asyncio.get_running_loop().time(), 0
    while asyncio.get_running_loop().time() - began < SECONDS:
        await traffic.agents(first=1000 * (rounds := rounds + 1))
    found = await until_idle(4)
    times = await choice_times()
    print(
        f"{traffic.answers} answers in {SECONDS:.0f} s, {traffic.errors} errors, hits {traffic.hits:.1%}, "
        f"choice p50 {median(times) * 1e3:.2f} ms, p99 {quantiles(times, n=100)[98] * 1e3:.2f} ms, {found}"
    )
    assert traffic.errors == 0
