"""Commands that serve until a signal ends them: router, picker, indexer."""

from __future__ import annotations

from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvrouter.commands.options import (
    NO_WORKERS,
    ConfigFile,
    Level,
    LogLevel,
    WorkerUrls,
    fail,
    given,
    of_workers,
    settings_from,
)

if TYPE_CHECKING:
    from router.settings import Settings


def _policies() -> list[str]:
    from router.settings import PolicyName

    return list(PolicyName)


Policy = Annotated[
    str | None,
    typer.Option(help="Name of a policy in config.yaml.", show_default="kv_aware", autocompletion=_policies),
]


def serve(
    config: ConfigFile = None,
    worker: WorkerUrls = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.", show_default="127.0.0.1")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on.", show_default="8080")] = None,
    policy: Policy = None,
    processes: Annotated[
        int | None, typer.Option(help="Number of processes that share the port.", show_default="1")
    ] = None,
    peer: Annotated[str | None, typer.Option(help="URL of another router, whose index is copied at the start.")] = None,
    root_path: Annotated[str | None, typer.Option(help="Prefix of every path, for example /llm.")] = None,
    log_level: LogLevel = Level.INFO,
) -> None:
    """Run the router with its index."""
    from router.server.serving import serve_router
    from router.server.supervisor import ProcessFailedError, Supervisor
    from router.settings import SettingsFile

    overrides = of_workers(worker) | given(
        server=given(host=host, port=port, processes=processes, root_path=root_path),
        policy=given(name=policy),
        index=given(peer=peer),
    )
    settings = _router_settings(config, overrides)
    file = SettingsFile(config, overrides) if config else None
    if settings.server.processes == 1:
        _run(serve_router(settings, file), settings, log_level)
        return
    _begin_log(settings, log_level)
    try:
        Supervisor(settings, file, settings.server.processes, log_level).run()
    except (OSError, ProcessFailedError) as error:
        fail(str(error))


def picker(
    config: ConfigFile = None,
    worker: WorkerUrls = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.", show_default="127.0.0.1")] = None,
    port: Annotated[int | None, typer.Option(help="HTTP port: health, metrics, workers.", show_default="8080")] = None,
    grpc_port: Annotated[int | None, typer.Option(help="gRPC port for Envoy.", show_default="9002")] = None,
    policy: Policy = None,
    peer: Annotated[str | None, typer.Option(help="URL of another router, whose index is copied at the start.")] = None,
    log_level: LogLevel = Level.INFO,
) -> None:
    """Run the router as an endpoint picker: it chooses workers for Envoy, which forwards the requests."""
    from importlib.util import find_spec

    from router.server.serving import serve_picker
    from router.settings import SettingsFile

    if not all(find_spec(name) for name in ("grpc_health", "hpack")):
        fail("the picker needs more packages: pip install 'kvrouter[envoy]'")
    overrides = of_workers(worker) | given(
        server=given(host=host, port=port),
        picker=given(port=grpc_port),
        policy=given(name=policy),
        index=given(peer=peer),
    )
    settings = _router_settings(config, overrides)
    if settings.server.processes != 1:
        fail(
            "server.processes: a picker has one process. Run several pickers, which share their load by replicas.redis"
        )
    _run(serve_picker(settings, SettingsFile(config, overrides) if config else None), settings, log_level)


def indexer(
    config: ConfigFile = None,
    host: Annotated[str, typer.Option(help="Address to listen on; server.host has no effect.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; server.port has no effect.")] = 8090,
    log_level: LogLevel = Level.INFO,
) -> None:
    """Run the index alone; workers are registered over HTTP."""
    from router.server.serving import serve_indexer

    server = {"host": host, "port": port, "admin_port": None}  # the index has no requests of clients
    settings = settings_from(config, {"server": server})
    _run(serve_indexer(settings), settings, log_level)


def _router_settings(config: Path | None, overrides: dict[str, Any]) -> Settings:
    """Load a router's settings. They need workers or a way to discover some."""
    settings = settings_from(config, overrides)
    if not settings.workers and config is None and not settings.kubernetes.used:
        fail(NO_WORKERS)
    return settings


def _begin_log(settings: Settings, level: str) -> None:
    """Log to standard error, beginning with the settings that have no effect."""
    import structlog

    from router.server.logs import log_to_stderr

    log_to_stderr(level)
    for setting in settings.without_effect:
        structlog.get_logger().warning("setting has no effect and can be removed", setting=setting)


def _run(service: Coroutine[Any, Any, None], settings: Settings, log_level: str) -> None:
    import uvloop

    from router.fleet.kubernetes import KubernetesError
    from router.server.sockets import raise_file_limit
    from router.tokens.errors import TokenizerUnavailableError

    _begin_log(settings, log_level)
    raise_file_limit()
    try:
        uvloop.run(service)
    except (OSError, TokenizerUnavailableError, KubernetesError) as error:
        fail(str(error))
