"""Options of several commands; reading of settings; failure with a message."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from router.settings import Settings

ConfigFile = Annotated[Path | None, typer.Option("--config", "-c", help="Settings file, such as config.yaml.")]
WorkerUrls = Annotated[list[str] | None, typer.Option("--worker", "-w", help="URL of a worker; repeatable.")]


def _checked_url(url: str) -> str:
    """Return the URL of a router in its one form. If the text is no URL, end the command."""
    from router.http.worker_url import canonical_url

    try:
        return canonical_url(url)
    except ValueError as error:
        fail(f"--url: {error} (found {url!r})", status=2)


# Options of every command that asks a router.
ROUTER_URL = "http://127.0.0.1:8080"
RouterUrl = Annotated[
    str, typer.Option("--url", envvar="KVROUTER_URL", callback=_checked_url, help="URL of the router.")
]
RouterToken = Annotated[
    str,
    typer.Option("--token", envvar=["KVROUTER_TOKEN", "KVROUTER_SERVER__TOKEN"], help="The router's server.token."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
# The policies of `policy.name`, for help.
POLICIES = "kv_aware, round_robin, random, least_loaded, session_affinity, cache_aware"


class Level(StrEnum):
    """A level of log messages."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


LogLevel = Annotated[Level, typer.Option(help="Lowest level of log messages.")]

NO_WORKERS = "no workers: list them under workers: in the settings file, or give --worker URL"
_NONE_DECODES = (
    "workers: all of them are prefill or encode workers, so no worker decodes an answer: "
    "list a worker with role: decode, or one without a role"
)


def unusable(settings: Settings, file: Path | None) -> str | None:
    """Return why a router with these settings could never answer; `None` if it can.

    Workers come later by discovery, by POST /workers with the operator's token, or into a settings file.
    """
    from router.settings import Role

    come_later = settings.kubernetes.used or bool(settings.server.token)
    if not settings.workers:
        return None if come_later or file is not None else NO_WORKERS
    roles = {worker.role for worker in settings.workers}
    return _NONE_DECODES if roles <= {Role.PREFILL, Role.ENCODE} and not come_later else None


def given(**options: Any) -> dict[str, Any]:
    """Return the given options: neither None nor an empty section."""
    return {name: value for name, value in options.items() if value is not None and value != {}}


def of_workers(urls: list[str] | None) -> dict[str, Any]:
    """Return the settings that `--worker` overrides."""
    return {"workers": [{"url": url} for url in urls]} if urls else {}


def settings_from(config: Path | None, overrides: dict[str, Any], status: int = 1) -> Settings:
    """Load the settings of a file and the command line. If they are invalid, end the command."""
    from router.settings import ConfigError, load_settings

    try:
        return load_settings(config, overrides)
    except ConfigError as error:
        fail(str(error), status)


def fail(reason: str | Exception, status: int = 1) -> NoReturn:
    """End the command with a message on standard error: a text, or what an error says."""
    typer.echo(f"kvrouter: {_in_words(reason)}", err=True)
    raise typer.Exit(status)


def _in_words(reason: str | Exception) -> str:
    """Return the message of an error: of the system's errors without their numbers."""
    if isinstance(reason, OSError) and reason.strerror:
        return f"{reason.filename}: {reason.strerror}" if reason.filename else reason.strerror
    return str(reason)
