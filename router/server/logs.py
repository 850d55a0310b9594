"""Logs to standard error, and the announcements of a service that starts."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import MutableMapping
from datetime import UTC, datetime
from typing import Any

import structlog

from indexer.api.metrics import build_info
from router.app.readiness import CATCH_UP_SECONDS
from router.http.worker_url import without_user_info
from router.observability.fleet_report import About
from router.settings import Settings

NO_WORKERS_YET = "no workers yet: add them with POST /workers, or in the settings file"
# What the slower builds cost: `make bench-proxy` and `make bench-index`.
_SLOWER = {
    "interpreted": "interpreted: a compiled build serves about twice the requests (docs/how-it-works.md)",
    "python": "Python index: events take six times the processor time; install with a C++ compiler, or a wheel",
}


def log_to_stderr(level: str = "info") -> None:
    """Set up logging for this process: lines for people on a terminal, else one JSON object a line."""
    renderer = structlog.dev.ConsoleRenderer() if sys.stderr.isatty() else structlog.processors.JSONRenderer()
    logging.basicConfig(handlers=[_OfLibraries()], level=logging.WARNING, force=True)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            _hide_passwords,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


class _OfLibraries(logging.Handler):
    """Log the lines of libraries in the form of all others."""

    def emit(self, record: logging.LogRecord) -> None:
        structlog.get_logger().log(
            record.levelno, record.getMessage(), logger=record.name, exc_info=record.exc_info or None
        )


def _hide_passwords(_logger: object, _method: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Remove passwords from all URLs in a log line: errors name URLs of workers, peers and Redis."""
    return {name: _hidden(value) for name, value in line.items()}


def _hidden(value: Any) -> Any:
    if isinstance(value, str):
        return without_user_info(value)
    if isinstance(value, list | tuple | set):
        return [_hidden(each) for each in value]
    if isinstance(value, dict):
        return {_hidden(name): _hidden(each) for name, each in value.items()}
    return value


def announce_start(settings: Settings, name: str) -> None:
    """Print that a service starts, and what it waits for."""
    built = build_info()
    version, build, core = built["version"], built["build"], built["core"]
    say(f"{name} {version} starts, {build}, with the {core} index; it {_waits_for(settings)}")
    for each in (build, core):
        if each in _SLOWER:
            say(f"  build   {_SLOWER[each]}")


def announce_models(about: About) -> None:
    """Print the served models, and how their prompts become tokens."""
    for model, served in about.models().items():
        count = served["workers"]
        say(f"  model   {model} on {count} worker{'s' * (count != 1)}; tokens: {served['tokens']}")
    if not about.models():
        say("  model   none yet: no worker answers. /health says why")


def announce_page(policy: str, url: str) -> None:
    """Print the policy, and the address of the live page."""
    say(f"  policy  {policy}")
    say(f"  page    {url}/ui")


def say(line: str) -> None:
    """Print a line at once, whatever the level of the log; as JSON unless standard error is a terminal."""
    if not sys.stderr.isatty():
        now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        line = json.dumps({"event": " ".join(line.split()), "level": "info", "timestamp": now}, ensure_ascii=False)
    print(line, file=sys.stderr, flush=True)


def _waits_for(settings: Settings) -> str:
    asked = []
    if count := len(settings.workers):
        asked.append(f"asks {count} worker{'s' * (count != 1)} for models, files and event streams")
    if settings.kubernetes.used:
        asked.append("asks the cluster for workers")
    if not asked:
        return f"has {NO_WORKERS_YET}"
    return f"{' and '.join(asked)}, and waits up to {CATCH_UP_SECONDS:g} s for what they cache"
