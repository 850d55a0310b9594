"""The command line of vllm-router 0.1.17 as settings."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest
from aiohttp.test_utils import unused_port
from waiting import eventually

from kvrouter.vllm_router import settings_of
from router.settings import Backend, PolicyName, Role, Settings

# As prime-rl starts it.
PRIME_RL = """--policy consistent_hash --host 0.0.0.0 --port 8000 --worker-urls http://10.0.0.1:8100 http://10.0.0.2:8100
    --request-id-headers x-session-id --prometheus-port 29100 --worker-startup-timeout-secs 4200
    --intra-node-data-parallel-size 8"""
PAIRS = "--vllm-pd-disaggregation --prefill http://p:1 9000 --prefill http://q:1 none --decode http://d:1"


def read(line: str) -> tuple[Settings, list[str]]:
    said: list[str] = []
    settings, _ = settings_of(line.split(), said.append)
    return settings, said


def test_command_of_prime_rl_is_followed_and_says_what_it_ignores() -> None:
    settings, said = read(PRIME_RL)
    assert [str(worker.url) for worker in settings.workers] == ["http://10.0.0.1:8100/", "http://10.0.0.2:8100/"]
    assert (settings.server.host, settings.server.port) == ("0.0.0.0", 8000)
    assert settings.policy.name is PolicyName.SESSION_AFFINITY
    assert sorted(line.partition(" ")[0] for line in said) == [
        "--intra-node-data-parallel-size",
        "--prometheus-port",
        "--request-id-headers",
        "--worker-startup-timeout-secs",
    ]


def test_defaults_are_those_of_the_other_router() -> None:
    settings, said = read("--worker-urls http://a:1")
    assert (settings.server.host, settings.server.port) == ("127.0.0.1", 30000)
    assert settings.policy.name is PolicyName.KV_AWARE
    assert (settings.proxy.attempts, settings.fleet.failures) == (5, 10)
    assert settings.server.max_body_bytes == 512 * 2**20
    assert said == []


def test_pairs_have_their_roles_and_ports() -> None:
    settings, _ = read(PAIRS + " --kv-connector mooncake --pd-kv-events http://p:1=tcp://p:5557 --api-key secret")
    assert [(worker.role, worker.bootstrap_port) for worker in settings.workers] == [
        (Role.PREFILL, 9000),
        (Role.PREFILL, None),
        (Role.DECODE, None),
    ]
    assert settings.disaggregation.backend is Backend.MOONCAKE
    assert all(worker.has_key for worker in settings.workers)
    streams = settings.workers[0].streams
    assert streams is not None
    assert streams[0].endpoint == "tcp://p:5557"


def test_sources_of_events_are_the_streams_of_ranks() -> None:
    settings, _ = read(
        "--worker-urls http://a:1/ --kv-event-source http://a:1=tcp://a:5557,tcp://a:5558 --kv-event-block-size 32 "
        "--kv-event-replay-source http://a:1=tcp://a:6557,tcp://a:6558 --kv-event-model m"
    )
    (worker,) = settings.workers
    assert worker.streams is not None
    assert [(each.dp_rank, each.endpoint, each.replay_endpoint) for each in worker.streams] == [
        (0, "tcp://a:5557", "tcp://a:6557"),
        (1, "tcp://a:5558", "tcp://a:6558"),
    ]
    assert (worker.block_size, worker.model) == (32, "m")


def test_switches_and_limits_become_settings() -> None:
    settings, _ = read(
        "--worker-urls http://a:1 --disable-retries --disable-circuit-breaker --queue-size 7 --queue-timeout-secs 9 "
        "--health-check-interval-secs 3 --health-check-timeout-secs 2 --cors-allowed-origins http://localhost:3000 "
        "--router-temperature 0.0"
    )
    assert settings.proxy.attempts == 1
    assert settings.fleet.failures > 10**9
    assert (settings.admission.queue, settings.admission.timeout) == (7, 9)
    assert (settings.fleet.probe_interval, settings.fleet.probe_timeout) == (3, 2)
    assert settings.server.cors_origins == ["http://localhost:3000"]


def test_pods_of_a_selector_are_the_workers() -> None:
    settings, _ = read("--service-discovery --selector app=vllm tier=gpu --service-discovery-port 8000")
    assert (settings.kubernetes.selector, settings.kubernetes.port) == ("app=vllm,tier=gpu", 8000)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("--max-concurrent-requests 5", "--max-concurrent-requests: "),
        ("--rate-limit-tokens-per-second 5", "tenants"),
        ("--router-temperature 0.5", "--router-temperature"),
        ("--wasm-middleware a.wasm", "proxy in front"),
        ("--mini-lb", "--mini-lb"),
        ("--policy random --prefill-policy round_robin", "--prefill-policy"),
        ("--vllm-pd-disaggregation --prefill http://p:1", "--decode"),
        ("--prefill http://p:1 --decode http://d:1", "--vllm-pd-disaggregation"),
        (PAIRS + " --kv-connector moriio", "moriio"),
        ("--kv-event-source http://b:1=tcp://b:1", "http://b:1 is not a worker"),
        ("--kv-event-source nonsense", "--kv-event-source"),
        ("--policy best", "--policy"),
        ("--worker-urls nowhere", "--worker-urls: no scheme"),
        ("--no-such-option", "--no-such-option"),
    ],
)
def test_what_would_change_a_meaning_is_refused(line: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        read(line)
    assert ended.value.code == 2
    assert named in capsys.readouterr().err


def test_router_serves_at_the_given_port() -> None:
    port = unused_port()
    command = [sys.executable, "-m", "kvrouter.vllm_router", "--port", str(port), "--prometheus-port", "29000"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    try:
        assert process.stderr is not None
        assert "--prometheus-port is ignored" in process.stderr.readline()
        eventually(lambda: answers(f"http://127.0.0.1:{port}/liveness"))
    finally:
        process.terminate()
        process.communicate(timeout=60)


def answers(url: str) -> bool:
    try:
        with urlopen(url, timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False
