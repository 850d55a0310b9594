"""The load balancer for verl, loaded by verl's own `workers/rollout/router.py` under a plain Ray."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="make test-ray installs it")
import ray

from kvrouter.adapters.verl import LoadBalancer

pytestmark = pytest.mark.ray
TRAJECTORIES, TURNS = 24, 4


@pytest.fixture(scope="module")
def verl(cluster: None) -> Any:  # noqa: ARG001
    """verl's module of load balancers."""
    from verl.workers.rollout import router

    return router


class _Server:
    def generate(self, prompt_ids: list[int]) -> int:
        return len(prompt_ids)


@pytest.fixture
def balancer(verl: Any, tmp_path: Path) -> Iterator[tuple[Any, dict[str, Any]]]:
    """The actor that verl makes of the class in its file, and the servers."""
    server = ray.remote(_Server).options(num_cpus=0)
    servers = {f"127.0.0.1:{9000 + number}": server.remote() for number in range(3)}
    config = tmp_path / "router.yaml"
    config.write_text(
        "router_class: kvrouter.adapters.verl.LoadBalancer\nblock_size: 16\ndiscover: false\n"
        "settings:\n  admission: {requests: 64}\n"
    )
    handle = verl.get_router_handle(servers, router_config_path=str(config))
    yield handle, servers
    ray.kill(handle)


def test_class_has_all_methods_of_verls_protocol(verl: Any) -> None:
    wanted = {name for name in vars(verl.RequestLoadBalancer) if not name.startswith("_")}
    wanted |= {name for name in vars(verl.GlobalRequestLoadBalancer) if not name.startswith("_")}
    assert wanted <= set(dir(LoadBalancer))


async def test_trajectories_keep_their_server_and_nothing_stays_in_flight(balancer: tuple[Any, Any]) -> None:
    handle, _ = balancer
    fields = await handle.require_acquire_fields.remote(), await handle.require_release_fields.remote()
    assert fields == (["prompt_ids"], ["request_id"])
    spread: Counter[str] = Counter()

    async def trajectory(number: int) -> None:
        used = set()
        for turn in range(TURNS):
            prompt = [number * 1000 + token for token in range(64 + 32 * turn)]
            id, server = await handle.acquire_server.remote(request_id=f"t{number}", prompt_ids=prompt)
            assert await server.generate.remote(prompt) == len(prompt)
            used.add(id)
            await handle.release_server.remote(server_id=id, request_id=f"t{number}")
        assert len(used) == 1
        spread.update(used)

    await asyncio.gather(*[trajectory(number) for number in range(TRAJECTORIES)])
    status = await handle.get_status.remote()
    assert (status["total_inflight"], status["active_servers"], status["fallbacks"]) == (0, 3, 0)
    assert len(spread) == 3


async def test_servers_leave_and_return_at_an_update_of_weights(balancer: tuple[Any, Any]) -> None:
    handle, servers = balancer
    id, _ = await handle.acquire_server.remote(request_id="x", prompt_ids=[1] * 64)
    await handle.remove_servers.remote(server_ids=[id])
    await handle.release_server.remote(server_id=id, request_id="x")
    assert await handle.get_total_inflight.remote() == 0
    assert id not in await handle.get_all_servers.remote()
    await handle.add_servers.remote(servers={id: servers[id]})
    assert (await handle.clear_sticky_cache.remote())["cleared_entries"] == 1
    await handle.remove_servers.remote(server_ids=list(servers))
    with pytest.raises(RuntimeError, match="No server is registered"):
        await handle.acquire_server.remote(request_id="x", prompt_ids=[1])
