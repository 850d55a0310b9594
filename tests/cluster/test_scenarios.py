"""Clients lose no request while a real cluster rolls out, scales and fails, unless a test names the loss.

Each test has a steady load from a pod through a service. The release has simulated workers of 50 ms a token.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.cluster

from kube import CHART, Load, Namespace, Report, eventually, new_namespace, steady_load  # noqa: E402

Rows = list[tuple[str, int, int]]
ROUTER, WORKERS = "demo-kvrouter-router", "deploy/demo-kvrouter-worker-demo"
LONG = 200  # tokens: answers of 10 s
SMALL = {"requests": {"cpu": "20m", "memory": "64Mi"}, "limits": {"memory": "1Gi"}}
# A busy machine starts a pod in a minute, and is no reason to restart one.
PATIENT = {"httpGet": {"path": "/health", "port": "http"}, "timeoutSeconds": 20, "failureThreshold": 600}
PROBES = {"startupProbe": PATIENT | {"periodSeconds": 1}, "livenessProbe": PATIENT | {"periodSeconds": 20}}
READINESS = {"httpGet": {"path": "/ready", "port": "http"}, "periodSeconds": 2, "timeoutSeconds": 20}
VALUES: dict[str, Any] = {
    "router": {"replicas": 1, "resources": SMALL, "preStopSeconds": 5, **PROBES, "readinessProbe": READINESS},
    "redis": {"enabled": False, "resources": SMALL},
    "config": {"server": {"shutdown_timeout": 30, "drain_seconds": 2}, "admission": {"cold_start_timeout": 300}},
    "workerDefaults": {
        "engine": "simulated",
        "resources": SMALL,
        "drainSeconds": 15,
        "extraArgs": ["--step-ms=50"],
        **PROBES,
    },
    "workers": {"demo": {"replicas": 3}},
}


class Release:
    """A release of the chart, whose values grow by `change`."""

    def __init__(self, namespace: Namespace, image: str, folder: Path) -> None:
        self.namespace, self.image = namespace, image
        self._folder = folder
        repository, _, tag = image.rpartition(":")
        self.values = VALUES | {"image": {"repository": repository, "tag": tag}}

    def install(self) -> None:
        """Install the release, and wait until its pods are ready."""
        self.namespace.helm("install", "demo", str(CHART), "--values", self._file())
        self.wait()

    def change(self, *path: str, value: Any) -> None:
        """Upgrade the release with another value, and wait for nothing."""
        self.values = json.loads(json.dumps(self.values))
        place = self.values
        for key in path[:-1]:
            place = place.setdefault(key, {})
        place[path[-1]] = value
        self.namespace.helm("upgrade", "demo", str(CHART), "--values", self._file())

    def wait(self) -> None:
        """Wait until all pods are of the latest version."""
        self.namespace.wait_for_rollout(*self.namespace.kubectl("get", "deploy,sts", "-o", "name").split())

    def _file(self) -> str:
        file = self._folder / "values.yaml"
        file.write_text(yaml.safe_dump(self.values))
        return str(file)


@pytest.fixture(scope="module")
def release(kubeconfig: str, image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Release]:
    with new_namespace(kubeconfig, "kvrouter-scenarios") as namespace:
        made = Release(namespace, image, tmp_path_factory.mktemp("values"))
        made.install()
        yield made


def load_on(release: Release, service: str = ROUTER, **options: Any) -> Any:
    return steady_load(release.namespace, release.image, service, **options)


def finish(load: Load, rows: Rows, what: str) -> Report:
    """End a load after some more answers, and add its row to the table."""
    load.wait_for_answers(20)
    report = load.stop()
    print(*report.failures, sep="\n")  # whole, which a failed assertion's message is not
    rows.append((what, report.sent, report.lost))
    return report


def restart(release: Release, *names: str) -> None:
    for name in names:
        release.namespace.kubectl("rollout", "restart", name)
    release.namespace.wait_for_rollout(*names)


# Processes and network of the node.


def container(namespace: Namespace, pod: str) -> str:
    """Return the ID of the container of a pod."""
    [status] = json.loads(namespace.kubectl("get", "pod", pod, "-o", "json"))["status"]["containerStatuses"]
    return status["containerID"].removeprefix("containerd://")


def kill(namespace: Namespace, pod: str) -> None:
    """SIGKILL the container of a pod on this node."""
    command = ["ctr", "--namespace", "k8s.io", "tasks", "kill", "--signal", "SIGKILL", container(namespace, pod)]
    subprocess.run(command, check=True, capture_output=True)


def process_of(program: str) -> int:
    """Return the process of a program of the cluster on this node."""
    for each in Path("/proc").glob("[0-9]*"):
        words = (each / "cmdline").read_bytes().split(b"\0")
        if program.encode() in words[1:2]:
            return int(each.name)
    raise AssertionError(f"{program} does not run here")


# Workers


def test_deleted_worker_loses_no_request(release: Release, rows: Rows) -> None:
    with load_on(release) as load:
        release.namespace.kubectl("delete", "pod", release.namespace.pods("worker")[0], "--wait=false")
        release.wait()
        assert finish(load, rows, "a worker's pod deleted").failures == []


def test_all_workers_deleted_at_once_lose_no_request(release: Release, rows: Rows) -> None:
    with load_on(release) as load:
        release.namespace.kubectl("delete", "pod", "-l", "app.kubernetes.io/component=worker", "--wait=false")
        release.wait()
        assert finish(load, rows, "all three workers deleted at once").failures == []


def test_rollout_of_workers_loses_no_request(release: Release, rows: Rows) -> None:
    with load_on(release) as load:
        restart(release, WORKERS)
        assert finish(load, rows, "a rollout of workers, answers of 0.3 s").failures == []


def test_scaling_to_zero_and_back_delays_requests_and_loses_none(release: Release, rows: Rows) -> None:
    with load_on(release, rate=4) as load:
        release.namespace.kubectl("scale", WORKERS, "--replicas=0")
        eventually(lambda: not release.namespace.pods("worker"), "no worker is left")
        eventually(lambda: not release.namespace.deleted_pods(), "no worker ends")
        answered = load.answered()
        time.sleep(3)
        assert load.answered() == answered
        release.namespace.kubectl("scale", WORKERS, "--replicas=3")
        release.wait()
        assert finish(load, rows, "workers scaled to zero and back").failures == []


def test_eviction_respects_the_budget_and_loses_no_request(release: Release, rows: Rows) -> None:
    """With the node cordoned, one worker's pod is evicted, and the budget refuses the next one until it is back."""
    first, second, *_ = release.namespace.pods("worker")
    node = json.loads(release.namespace.kubectl("get", "pod", first, "-o", "json"))["spec"]["nodeName"]

    def evict(pod: str) -> None:
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod}}
        path = f"/api/v1/namespaces/{release.namespace.name}/pods/{pod}/eviction"
        release.namespace.kubectl("create", "--raw", path, "-f", "-", data=json.dumps(eviction))

    with load_on(release) as load:
        release.namespace.kubectl("cordon", node)
        try:
            evict(first)
            with pytest.raises(AssertionError, match="disruption budget"):
                evict(second)
        finally:
            release.namespace.kubectl("uncordon", node)
        release.wait()
        assert finish(load, rows, "a node cordoned, a worker evicted").failures == []


# Routers


def test_upgrade_to_two_routers_with_redis_loses_no_request(release: Release, rows: Rows) -> None:
    with load_on(release) as load:
        release.change("redis", "enabled", value=True)
        release.change("router", "replicas", value=2)
        release.wait()
        assert len(release.namespace.pods("router")) == 2
        assert finish(load, rows, "an upgrade from one router to two with Redis").failures == []


def test_rollout_of_two_routers_loses_no_request(release: Release, rows: Rows) -> None:
    with load_on(release, rate=4, tokens=LONG) as load:
        restart(release, f"deploy/{ROUTER}")
        assert finish(load, rows, "a rollout of two routers, answers of 10 s").failures == []


def test_rollout_of_redis_loses_no_request(release: Release, rows: Rows) -> None:
    with load_on(release) as load:
        restart(release, "statefulset/demo-kvrouter-redis")
        assert finish(load, rows, "a rollout of Redis").failures == []


def test_rollback_in_the_middle_of_an_upgrade_loses_no_request(release: Release, rows: Rows) -> None:
    with load_on(release) as load:
        before = release.values
        release.change("config", "logs", value={"access": True})
        routers = release.namespace.pods("router")
        eventually(lambda: len(release.namespace.pods("router")) > len(routers) - 1, "the rollout has begun")
        release.namespace.helm("rollback", "demo")
        release.values = before
        release.wait()
        assert finish(load, rows, "a rollback in the middle of an upgrade").failures == []


@pytest.mark.usefixtures("folder")
def test_killed_router_loses_only_its_own_requests(release: Release, rows: Rows) -> None:
    with load_on(release, rate=4, tokens=LONG) as load:
        load.wait_for_answers(10)
        killed = time.time()
        kill(release.namespace, release.namespace.pods("router")[0])
        load.wait_for_answers(30)
        report = finish(load, rows, "one of two routers killed, answers of 10 s")
    for failure in report.failures:
        # In flight there, or sent before its restart was known to kube-proxy.
        assert failure["at"] < killed + 3, failure


# Workers that fail in the middle of answers


@pytest.fixture(scope="module", params=[0, 1], ids=["no stream failovers", "one stream failover"])
def failovers(request: pytest.FixtureRequest, release: Release) -> int:
    """Set `proxy.stream_failovers`: the number of workers on which a stream may continue."""
    release.change("config", "proxy", value={"stream_failovers": request.param})
    release.wait()
    return request.param


def assert_only_streams_end(report: Report, failovers: int) -> None:
    """Fail if a plain answer was lost, if a stream ended without an error event, or if one ended despite failovers."""
    assert [each for each in report.failures if not each["stream"] or '"error"' not in each["problem"]] == []
    assert not failovers or report.failures == []


def test_worker_deleted_by_force_loses_no_plain_answer(release: Release, rows: Rows, failovers: int) -> None:
    with load_on(release) as load:
        worker = release.namespace.pods("worker")[0]
        release.namespace.kubectl("delete", "pod", worker, "--wait=false", "--force", "--grace-period=0")
        release.wait()
        what = f"a worker's pod deleted by force, `stream_failovers` {failovers}"
        assert_only_streams_end(finish(load, rows, what), failovers)


@pytest.mark.usefixtures("folder")
def test_killed_worker_loses_no_plain_answer(release: Release, rows: Rows, failovers: int) -> None:
    with load_on(release) as load:
        kill(release.namespace, release.namespace.pods("worker")[0])
        load.wait_for_answers(40)
        release.wait()
        what = f"a worker's container killed, `stream_failovers` {failovers}"
        assert_only_streams_end(finish(load, rows, what), failovers)


@pytest.mark.usefixtures("folder")
def test_worker_whose_packets_are_dropped_loses_no_plain_answer(release: Release, rows: Rows, failovers: int) -> None:
    [pod, *_others] = release.namespace.get("pods", "-l", "app.kubernetes.io/component=worker")
    address = pod["status"]["podIP"]
    with load_on(release) as load:
        for option in ("-s", "-d"):
            subprocess.run(["iptables", "-I", "FORWARD", option, address, "-j", "DROP"], check=True)
        time.sleep(25)
        for option in ("-s", "-d"):
            subprocess.run(["iptables", "-D", "FORWARD", option, address, "-j", "DROP"], check=True)
        what = f"a worker's packets dropped for 25 s, `stream_failovers` {failovers}"
        assert_only_streams_end(finish(load, rows, what), failovers)


def test_worker_that_ends_before_its_answers_loses_no_plain_answer(
    release: Release, rows: Rows, failovers: int
) -> None:
    release.change("workerDefaults", "drainSeconds", value=5)
    release.wait()
    with load_on(release, rate=4, tokens=LONG) as load:
        restart(release, WORKERS)
        what = "a rollout of workers, answers of 10 s, `drainSeconds` 5"
        report = finish(load, rows, f"{what}, `stream_failovers` {failovers}")
    release.change("workerDefaults", "drainSeconds", value=15)
    release.wait()
    assert_only_streams_end(report, failovers)


# Envoy


def test_rollouts_of_envoy_and_its_workers_lose_no_request(release: Release, rows: Rows) -> None:
    release.change("envoy", value={"enabled": True, "replicas": 2, "resources": SMALL})
    release.change("picker", value={"resources": SMALL})
    release.wait()
    with load_on(release, "demo-kvrouter-envoy") as load:
        restart(release, "deploy/demo-kvrouter-envoy")
        restart(release, WORKERS)
        assert finish(load, rows, "rollouts of Envoys with pickers, then of workers").failures == []


# The control plane


def test_api_server_refused_no_request_of_the_chart(release: Release, folder: Path) -> None:
    """The audit log has each request of a service account. A restart of the API server refuses everything at first."""
    entries = [json.loads(line) for line in (folder / "logs" / "audit.log").read_text().splitlines()]
    account = f"system:serviceaccount:{release.namespace.name}:demo-kvrouter"
    codes = {entry["responseStatus"].get("code") for entry in entries if entry["user"]["username"] == account}
    assert codes
    assert 403 not in codes


def test_killed_api_server_loses_no_request(release: Release, rows: Rows, folder: Path) -> None:
    number = process_of("kube-apiserver")
    command = Path(f"/proc/{number}/cmdline").read_text().split("\0")[:-1]
    with load_on(release) as load:
        os.kill(number, signal.SIGKILL)
        time.sleep(45)
        with (folder / "logs" / "apiserver.log").open("ab") as log:
            subprocess.run(["setsid", "--fork", *command], check=True, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        eventually(lambda: is_answered(release.namespace), "the API server answers")
        assert finish(load, rows, "the API server killed for 45 s").failures == []


def is_answered(namespace: Namespace) -> bool:
    try:
        return bool(namespace.kubectl("get", "--raw", "/readyz"))
    except AssertionError:
        return False
