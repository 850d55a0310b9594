"""The router, started by the command line of vllm-router 0.1.17: `python -m kvrouter.vllm_router`.

Each option is one of these:

- Followed: it becomes a setting of kvrouter.
- Ignored: kvrouter does not need it, and a line on standard error says so.
- Refused: without it, requests would be treated in another way than the command line asks.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn

if TYPE_CHECKING:
    from router.settings import Settings

_POLICIES: Final = {
    "random": "random",
    "round_robin": "round_robin",
    "cache_aware": "kv_aware",
    "kv_aware": "kv_aware",
    "power_of_two": "least_loaded",
    "consistent_hash": "session_affinity",
    "sticky_least_loaded": "session_affinity",
}
_BACKENDS: Final = {"nixl": "nixl", "mooncake": "mooncake"}
# More failures than happen: the circuit of a worker never opens.
_NEVER: Final = 2**31

_RATES: Final = "speeds are learned, and the weights are those of policy in kvrouter's settings"
_RETRIES: Final = "the pauses between retries are kvrouter's own"
_CIRCUIT: Final = "the times of a circuit are kvrouter's own (fleet.backoff)"
# Options with a value that have no effect, and why.
_IGNORED: Final = {
    "--kv-penalty-host": _RATES,
    "--kv-penalty-external": _RATES,
    "--kv-penalty-disk": _RATES,
    "--cache-threshold": _RATES,
    "--balance-abs-threshold": _RATES,
    "--balance-rel-threshold": _RATES,
    "--eviction-interval-secs": "the workers' own evictions count",
    "--max-tree-size": "the index has the size of the workers' caches",
    "--kv-aware-session-affinity-ttl-secs": "a session returns to the worker that has its prefix, while it has it",
    "--worker-startup-timeout-secs": "workers are probed until they answer, without a limit",
    "--worker-startup-check-interval": "workers are probed until they answer (fleet.retry_interval)",
    "--intra-node-data-parallel-size": "the ranks of each worker are found by its answers",
    "--log-dir": "logs are written to standard error",
    "--prometheus-port": "metrics are at /metrics of the same port",
    "--prometheus-host": "metrics are at /metrics of the same port",
    "--request-id-headers": "x-request-id is followed, and the names of sessions are known",
    "--request-timeout-secs": "an answer has no limit in total (proxy.idle_timeout limits silence)",
    "--retry-initial-backoff-ms": _RETRIES,
    "--retry-max-backoff-ms": _RETRIES,
    "--retry-backoff-multiplier": _RETRIES,
    "--retry-jitter-factor": _RETRIES,
    "--cb-success-threshold": _CIRCUIT,
    "--cb-timeout-duration-secs": _CIRCUIT,
    "--cb-window-duration-secs": _CIRCUIT,
    "--health-failure-threshold": "one failed probe is enough",
    "--health-success-threshold": "one answered probe is enough",
    "--health-check-endpoint": "probes ask for the models of a worker",
}
_IGNORED_SWITCHES: Final = {
    "--enable-igw": "several models are always served",
    "--enable-program-scheduling": "sessions wait for room by themselves (admission.programs)",
}
# Options that would change what requests get, and what to do instead.
_REFUSED: Final = {
    "--program-scheduling-config-json": "kvrouter has none of these weights: leave it out",
    "--wasm-middleware": "no code runs in the router: put a proxy in front",
    "--wasm-middleware-sha256": "no code runs in the router: put a proxy in front",
    "--wasm-middleware-route": "no code runs in the router: put a proxy in front",
    "--max-concurrent-requests": "kvrouter limits each worker, not all together: set admission.requests",
    "--rate-limit-tokens-per-second": "rates are limits of tenants: set tenants.NAME.requests_per_second",
    "--prefill-selector": "pods say their role by the label kvrouter.io/role: set kubernetes.selector",
    "--decode-selector": "pods say their role by the label kvrouter.io/role: set kubernetes.selector",
    "--vllm-discovery-address": "workers are listed by --prefill and --decode",
    "--router-temperature": "the worker with the lowest cost is chosen, without a draw",
}


class _Parser(argparse.ArgumentParser):
    """Ends the program with status 2 and a message that begins with the program's name."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m kvrouter.vllm_router", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=30000)
    add("--worker-urls", nargs="*", default=[])
    for name in ("--policy", "--prefill-policy", "--decode-policy"):
        add(name, choices=_POLICIES, default="cache_aware" if name == "--policy" else None)
    add("--vllm-pd-disaggregation", action="store_true")
    add("--prefill", nargs="+", action="append", default=[], metavar="URL [PORT]")
    add("--decode", action="append", default=[], metavar="URL")
    add("--kv-connector", choices=["nixl", "mooncake", "moriio"], default="nixl")
    for name in ("--kv-event-source", "--kv-event-replay-source", "--pd-kv-events"):
        add(name, action="append", default=[], metavar="URL=ENDPOINT,…")
    add("--kv-event-block-size", type=int, default=16)
    add("--kv-event-model")
    add("--api-key")
    add("--max-payload-size", type=int, default=512 * 2**20)
    add("--queue-size", type=int)
    add("--queue-timeout-secs", type=float)
    add("--retry-max-retries", type=int, default=5)
    add("--disable-retries", action="store_true")
    add("--cb-failure-threshold", type=int, default=10)
    add("--disable-circuit-breaker", action="store_true")
    add("--health-check-timeout-secs", type=float)
    add("--health-check-interval-secs", type=float)
    add("--cors-allowed-origins", nargs="*", default=[])
    add("--service-discovery", action="store_true")
    add("--selector", nargs="+", default=[])
    add("--service-discovery-port", type=int, default=80)
    add("--service-discovery-namespace")
    add("--log-level", choices=["debug", "info", "warning", "error", "critical"], default="info")
    add("--mini-lb", action="store_true")
    for name in _IGNORED | _REFUSED:
        add(name, nargs="*" if name == "--request-id-headers" else None)
    for name in _IGNORED_SWITCHES:
        add(name, action="store_true")
    return parser


def settings_of(arguments: Sequence[str], say: Callable[[str], None]) -> tuple[Settings, str]:
    """Return the settings that a command line asks for, and its level of logs.

    `say`: receives a line for each option without effect. Ends the program if an option is refused.
    """
    from router.settings import ConfigError, load_settings

    parser = _parser()
    given = parser.parse_args(arguments)
    _check(parser, given)
    for name, reason in (_IGNORED | _IGNORED_SWITCHES).items():
        if _value(given, name) not in (None, False):
            say(f"{name} is ignored: {reason}.")
    try:
        settings = load_settings(None, _sections(parser, given))
    except ConfigError as error:
        parser.error(str(error).replace("--worker:", "--worker-urls:"))
    return settings, "error" if given.log_level == "critical" else given.log_level


def _value(given: argparse.Namespace, name: str) -> Any:
    return getattr(given, name.removeprefix("--").replace("-", "_"))


def _check(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    for name, instead in _REFUSED.items():
        if _value(given, name) is not None and not (name == "--router-temperature" and _is_zero(_value(given, name))):
            parser.error(f"{name}: {instead}")
    for name in ("--prefill-policy", "--decode-policy"):
        if _value(given, name) is not None and _POLICIES[_value(given, name)] != _POLICIES[given.policy]:
            parser.error(f"{name}: pairs are chosen by one policy: give --policy alone")
    if given.mini_lb:
        parser.error("--mini-lb: there is no other router inside: leave it out")
    if given.vllm_pd_disaggregation and not given.service_discovery and not (given.prefill and given.decode):
        parser.error("--vllm-pd-disaggregation: needs --prefill and --decode")
    if (given.prefill or given.decode) and not given.vllm_pd_disaggregation:
        parser.error("--prefill and --decode: need --vllm-pd-disaggregation")
    if given.kv_connector not in _BACKENDS:
        parser.error(f"--kv-connector: {given.kv_connector} is not supported: {' or '.join(_BACKENDS)} is")


def _is_zero(value: str) -> bool:
    try:
        return float(value) == 0
    except ValueError:
        return False


def _sections(parser: argparse.ArgumentParser, given: argparse.Namespace) -> dict[str, Any]:
    """Return the sections of kvrouter's settings."""
    attempts = 1 if given.disable_retries else max(given.retry_max_retries, 1)
    sections: dict[str, dict[str, Any]] = {
        "server": {
            "host": given.host,
            "port": given.port,
            "max_body_bytes": given.max_payload_size,
            "cors_origins": given.cors_allowed_origins,
        },
        "policy": {"name": _POLICIES[given.policy]},
        "proxy": {"attempts": attempts},
        "fleet": {
            "failures": _NEVER if given.disable_circuit_breaker else given.cb_failure_threshold,
            "probe_interval": given.health_check_interval_secs,
            "probe_timeout": given.health_check_timeout_secs,
        },
        "admission": {"queue": given.queue_size, "timeout": given.queue_timeout_secs},
        "limits": {"arriving_bytes": max(256 * 2**20, given.max_payload_size)},
    }
    if given.vllm_pd_disaggregation:
        sections["disaggregation"] = {"backend": _BACKENDS[given.kv_connector]}
    if given.service_discovery:
        sections["kubernetes"] = {
            "selector": ",".join(given.selector),
            "namespace": given.service_discovery_namespace,
            "port": given.service_discovery_port,
        }
    named = {
        section: {name: value for name, value in fields.items() if value is not None}
        for section, fields in sections.items()
    }
    return {**named, "workers": _workers(parser, given)}


def _workers(parser: argparse.ArgumentParser, given: argparse.Namespace) -> list[dict[str, Any]]:
    workers: list[dict[str, Any]] = [{"url": url} for url in given.worker_urls]
    for url, *port in given.prefill:
        worker = {"url": url, "role": "prefill"}
        if port and port[0].lower() != "none":
            worker["bootstrap_port"] = port[0]
        workers.append(worker)
    workers += [{"url": url, "role": "decode"} for url in given.decode]
    replays = _by_url(parser, "--kv-event-replay-source", given.kv_event_replay_source)
    sources = _by_url(parser, "--kv-event-source", given.kv_event_source)
    sources |= _by_url(parser, "--pd-kv-events", given.pd_kv_events)
    for worker in workers:
        if given.api_key is not None:
            worker["api_key"] = given.api_key
        endpoints = sources.pop(worker["url"].rstrip("/"), None)
        if endpoints is not None:
            replay = replays.get(worker["url"].rstrip("/"), [None] * len(endpoints))
            if len(replay) != len(endpoints):
                parser.error(f"--kv-event-replay-source: {worker['url']} needs as many endpoints as it has sources")
            worker["streams"] = [
                {"dp_rank": rank, "endpoint": each, "replay_endpoint": behind}
                for rank, (each, behind) in enumerate(zip(endpoints, replay, strict=True))
            ]
            worker["block_size"] = given.kv_event_block_size
            worker["model"] = given.kv_event_model
    if sources:
        parser.error(f"--kv-event-source: {next(iter(sources))} is not a worker of this command line")
    return workers


def _by_url(parser: argparse.ArgumentParser, name: str, given: list[str]) -> dict[str, list[str]]:
    """Return the endpoints of each worker, in the order of its ranks."""
    found = {}
    for each in given:
        url, separator, endpoints = each.partition("=tcp://")
        if not separator:
            parser.error(f"{name}: {each!r} is not URL=tcp://HOST:PORT")
        found[url.rstrip("/")] = f"tcp://{endpoints}".split(",")
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the router."""
    import typer

    from kvrouter.commands.services import run_service
    from router.server.serving import serve_router

    settings, level = settings_of(
        sys.argv[1:] if arguments is None else arguments, lambda line: print(f"kvrouter: {line}", file=sys.stderr)
    )
    try:
        run_service(serve_router(settings), level)
    except typer.Exit as ended:
        sys.exit(ended.exit_code)


if __name__ == "__main__":
    main()
