"""Commands that serve until a signal ends them (router, picker, indexer), and that prepare a settings file."""

from __future__ import annotations

import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvrouter.commands.options import (
    POLICIES,
    ConfigFile,
    Level,
    LogLevel,
    WorkerUrls,
    fail,
    given,
    of_workers,
    settings_from,
    unusable,
)

if TYPE_CHECKING:
    from router.settings import Settings


def _policies() -> list[str]:
    from router.settings import PolicyName

    return list(PolicyName)


Policy = Annotated[
    str | None,
    typer.Option(help=f"The policy: {POLICIES}, or one's own.", show_default="kv_aware", autocompletion=_policies),
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
    from router.server.logs import log_to_stderr
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
        run_service(serve_router(settings, file), log_level)
        return
    log_to_stderr(log_level)
    try:
        Supervisor(settings, file, settings.server.processes, log_level).run()
    except (OSError, ProcessFailedError) as error:
        fail(error)


def picker(
    config: ConfigFile = None,
    worker: WorkerUrls = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.", show_default="127.0.0.1")] = None,
    port: Annotated[int | None, typer.Option(help="HTTP port: health, metrics, workers.", show_default="8080")] = None,
    grpc_port: Annotated[int | None, typer.Option(help="gRPC port for Envoy.", show_default="9002")] = None,
    endpoint_picker_config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="An EndpointPickerConfig of llm-d, whose settings are used.")
    ] = None,
    policy: Policy = None,
    peer: Annotated[str | None, typer.Option(help="URL of another router, whose index is copied at the start.")] = None,
    log_level: LogLevel = Level.INFO,
) -> None:
    """Run the router as an endpoint picker: it chooses workers for Envoy, which forwards the requests."""
    from importlib.util import find_spec

    from router.server.serving import serve_picker
    from router.settings import SettingsFile

    if not all(find_spec(name) for name in ("google", "hpack")):
        fail("the picker needs more packages: pip install 'kvrouter[envoy]'")
    overrides = of_workers(worker) | given(
        server=given(host=host, port=port),
        picker=given(port=grpc_port),
        policy=given(name=policy),
        index=given(peer=peer),
    )
    if endpoint_picker_config is not None:
        overrides = _of_picker_config(endpoint_picker_config, overrides)
    settings = _router_settings(config, overrides)
    if settings.server.processes != 1:
        fail(
            "server.processes: a picker has one process. Run several pickers, which share their load by replicas.redis"
        )
    run_service(serve_picker(settings, SettingsFile(config, overrides) if config else None), log_level)


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
    run_service(serve_indexer(settings), log_level)


def _of_picker_config(file: Path, overrides: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of an EndpointPickerConfig, which options override. End the command if they are refused."""
    from router.settings.endpoint_picker import read_picker_config

    try:
        found = read_picker_config(file)
    except (OSError, ValueError) as error:
        fail(error)
    if found.refused:
        fail("\n".join([f"{file} cannot be served:", *found.refused]))
    for each in found.ignored:
        typer.echo(f"ignored: {each}", err=True)
    return overrides | {name: section | overrides.get(name, {}) for name, section in found.sections.items()}


def _router_settings(config: Path | None, overrides: dict[str, Any]) -> Settings:
    """Load a router's settings. If it could never answer with them, end the command."""
    settings = settings_from(config, overrides)
    if (problem := unusable(settings, config)) is not None:
        fail(problem)
    return settings


def run_service(service: Coroutine[Any, Any, None], log_level: str) -> None:
    """Run a service until a signal ends it. If it cannot start, end the command."""
    import uvloop

    from router.fleet.kubernetes import KubernetesError
    from router.server.logs import log_to_stderr
    from router.server.sockets import raise_file_limit
    from router.tokens import TokenizerUnavailableError

    log_to_stderr(log_level)
    raise_file_limit()
    try:
        uvloop.run(service)
    except (OSError, TokenizerUnavailableError, KubernetesError) as error:
        fail(error)


_PACKAGE = Path(__file__).parents[1]


def _default_config() -> str:
    """Return config.yaml, which a wheel has in this package and a checkout beside it. Raises OSError."""
    packaged = _PACKAGE / "config.yaml"
    return (packaged if packaged.exists() else _PACKAGE.parent / "config.yaml").read_text()


File = Annotated[
    Path | None,
    typer.Argument(metavar="[FILE]", help="Settings file, such as config.yaml.", show_default="environment alone"),
]


def check(file: File = None) -> None:
    """Check the settings, and print all mistakes at once.

    The environment counts as it does for `kvrouter serve`. The exit status is 0 if the settings are valid, else 1.
    """
    from router.server.logs import NO_WORKERS_YET

    settings = settings_from(file, {})
    if (problem := unusable(settings, file)) is not None:
        fail(f"{file or 'environment'}: {problem}")
    workers = len(settings.workers)
    where = f"{workers} worker{'s' * (workers != 1)}"
    if settings.kubernetes.used:
        where += " and the workers of the cluster"
    if not workers and not settings.kubernetes.used:
        typer.echo(f"{file or 'environment'}: warning: {NO_WORKERS_YET}")
    if settings.tenants.named and settings.server.admin_port is None:
        typer.echo(
            f"{file or 'environment'}: warning: /metrics shows the tenants' names to all clients; "
            "set server.admin_port to serve it at that port only"
        )
    typer.echo(f"{file or 'environment'}: no mistakes; {where}, policy {settings.policy.name}")


def show(file: File = None) -> None:
    """Print every setting with its value from defaults, file and environment. Secrets are masked."""
    import yaml

    from router.settings import shown

    typer.echo(yaml.safe_dump(shown(settings_from(file, {})), sort_keys=False, allow_unicode=True), nl=False)


def default() -> None:
    """Print a settings file with every setting, its default and its description."""
    try:
        typer.echo(_default_config(), nl=False)
    except OSError as error:
        fail(error)


def hash_key(
    key: Annotated[str, typer.Argument(help="The API key; - reads standard input.")] = "",
) -> None:
    """Print the hash of an API key, for tenants in the settings file. Without a key, create one."""
    from secrets import token_urlsafe

    from router.auth import hashed_key

    if not key:
        key = f"kv-{token_urlsafe(32)}"
        typer.echo(f"key   {key}", err=True)
    typer.echo(hashed_key(sys.stdin.read().strip() if key == "-" else key))


def keygen(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder for the keys.")],
    name: Annotated[str, typer.Option(help="Name of the files.")] = "kvrouter",
) -> None:
    """Write a CURVE key pair: NAME.key to distribute, NAME.key_secret to keep."""
    from kvevents.curve import create_key_pair

    try:
        public, secret = create_key_pair(folder, name)
    except OSError as error:
        fail(error)
    typer.echo(f"public key: {public}\nsecret key: {secret}")
