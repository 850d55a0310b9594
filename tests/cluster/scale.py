"""Two routers that discover thousands of pods, which are written to a real API server: `make bench-discovery`.

It prints how long discovery takes, and what it costs in processor time, memory and bytes from the API server. The pods
run nowhere: the router's probes of them are refused on loopback.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Thread

import yaml

sys.path += [str(Path(__file__).parents[2]), str(Path(__file__).parents[1] / "deploy")]

from api import WATCHED, Api, delete_pod, run_pod
from chart import named, of_kind, profile, render
from control_plane import ControlPlane, Programs
from kube import ROOT, new_namespace

from benchmarks.ports import free_ports

# `kvrouter serve` in a pod reads its account from a fixed folder.
_SERVE = "import sys; from pathlib import Path; from router.fleet import kubernetes; "
_SERVE += "kubernetes._ACCOUNT = Path(sys.argv.pop(1)); from kvrouter.__main__ import main; main()"
_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")


def address(number: int) -> str:
    """Return the loopback address of a pod."""
    return f"127.1.{number // 250 % 250}.{number % 250 + 1}"


class Counter:
    """A TCP forwarder on a thread of its own that counts the bytes of the API server's answers."""

    def __init__(self, port: int, target: int) -> None:
        self.received = 0
        self._port, self._target = port, target
        Thread(target=lambda: asyncio.run(self._serve()), daemon=True).start()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._forward, "127.0.0.1", self._port)
        await server.serve_forever()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        other_reader, other_writer = await asyncio.open_connection("127.0.0.1", self._target)
        await asyncio.gather(self._copy(reader, other_writer, False), self._copy(other_reader, writer, True))

    async def _copy(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, counted: bool) -> None:
        try:
            while data := await source.read(2**16):
                self.received += len(data) if counted else 0
                target.write(data)
                await target.drain()
        except OSError:
            pass
        target.close()


class Router:
    """A `kvrouter serve` process with the chart's settings."""

    def __init__(self, folder: Path, settings: dict[str, object], port: int, api_port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        file = folder / f"{port}.yaml"
        file.write_text(yaml.safe_dump(settings | {"server": {"port": port, "host": "127.0.0.1"}}))
        self.counter = Counter(counted := free_ports(1)[0], api_port)
        variables = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(counted)}
        command = [sys.executable, "-c", _SERVE, str(folder), "serve", "--config", str(file), "--log-level", "error"]
        with (folder / f"{port}.log").open("wb") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, env=os.environ | variables, stdout=log, stderr=log)

    def workers(self) -> set[str]:
        """Return the names of the workers that the router knows."""
        try:
            with urllib.request.urlopen(f"{self.url}/workers", timeout=60) as answer:
                return {each["worker"] for each in json.load(answer)["workers"]}
        except OSError:
            return set()

    def cost(self) -> tuple[float, float]:
        """Return the seconds of processor time and the MiB of memory so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS, int(fields[21]) * _PAGE / 2**20


@contextmanager
def cluster(folder: Path) -> Iterator[tuple[ControlPlane, Api, dict[str, object]]]:
    """An API server with the chart's account in `folder`, and the settings of the chart's router."""
    with Programs(folder) as programs:
        control_plane = ControlPlane(programs, free_ports(3), "127.0.0.1", [])
        control_plane.start()
        with new_namespace(str(control_plane.kubeconfig), WATCHED) as namespace:
            objects = render(profile("demo"), namespace=WATCHED)
            namespace.apply({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}})
            for kind in ("ServiceAccount", "Role", "RoleBinding"):
                namespace.apply(*of_kind(objects, kind))
            (folder / "token").write_text(namespace.kubectl("create", "token", "rel-kvrouter", "--duration=3h"))
            (folder / "ca.crt").write_bytes((control_plane.certificates / "ca.crt").read_bytes())
            (folder / "namespace").write_text(WATCHED)
            text = named(objects, "ConfigMap", "rel-kvrouter-config")["data"]["config.yaml"]
            yield control_plane, Api(control_plane), {"kubernetes": yaml.safe_load(text)["kubernetes"]}


def wait_until_known(routers: list[Router], names: set[str], seconds: float = 300) -> float:
    """Return the seconds until all routers know exactly these workers."""
    began = time.monotonic()
    while not all(router.workers() == names for router in routers):
        if time.monotonic() > began + seconds:
            sys.exit(f"not all workers are known after {seconds:.0f} s: {[len(each.workers()) for each in routers]}")
        time.sleep(0.5)
    return time.monotonic() - began


def roll(api: Api, names: list[str], rate: int, seconds: int, pool: ThreadPoolExecutor) -> list[str]:
    """Replace `rate` pods a second, the oldest first, and return the names of all pods at the end."""
    began, number = time.monotonic(), len(names)
    for second in range(seconds):
        old, names = names[:rate], names[rate:]
        new = [f"worker-{number + each}" for each in range(rate)]
        done = [pool.submit(delete_pod, api, name) for name in old]
        done += [pool.submit(run_pod, api, name, address(number + each)) for each, name in enumerate(new)]
        names, number = names + new, number + rate
        for each in done:
            each.result()
        time.sleep(max(0.0, began + second + 1 - time.monotonic()))
    return names


def main() -> None:
    """Run it, and print the table."""
    parser = argparse.ArgumentParser(description="Discovery of thousands of pods at a real API server.")
    parser.add_argument("--pods", type=int, default=2000)
    parser.add_argument("--rate", type=int, default=10, help="pods replaced a second")
    parser.add_argument("--seconds", type=int, default=300, help="seconds of replacement")
    given = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvrouter-scale-")))
        control_plane, api, settings = stack.enter_context(cluster(folder))
        pool = stack.enter_context(ThreadPoolExecutor(8))
        names = [f"worker-{number}" for number in range(given.pods)]
        list(pool.map(lambda number: run_pod(api, names[number], address(number)), range(given.pods)))
        routers = []
        for port in free_ports(2):
            routers.append(Router(folder, settings, port, control_plane.port))
            stack.callback(routers[-1].process.wait)
            stack.callback(routers[-1].process.kill)
        seconds = wait_until_known(routers, set(names))
        print(f"{given.pods} pods; all known to both routers {seconds:.1f} s after their start", flush=True)
        _print("start", routers, None)
        before = [(router.cost()[0], router.counter.received) for router in routers]
        began = time.monotonic()
        names = roll(api, names, given.rate, given.seconds, pool)
        took = time.monotonic() - began
        seconds = wait_until_known(routers, set(names))
        print(f"{given.rate * given.seconds} pods replaced in {took:.0f} s; all known {seconds:.1f} s later")
        _print("replacement", routers, [(*each, took) for each in before])


def _print(what: str, routers: list[Router], before: list[tuple[float, int, float]] | None) -> None:
    for number, router in enumerate(routers):
        cpu, memory = router.cost()
        spent, received, seconds = before[number] if before else (0.0, 0, 0.0)
        share = f" ({(cpu - spent) / seconds:.0%} of a core)" if seconds else ""
        millions = (router.counter.received - received) / 1e6
        counts = f"{cpu - spent:.1f} s of CPU{share}, {memory:.0f} MiB, {millions:.1f} MB received"
        print(f"  router {number + 1}, {what}: {counts}", flush=True)


if __name__ == "__main__":
    main()
