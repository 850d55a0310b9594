"""Logs to standard error: lines for people on a terminal, JSON for everything else."""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import Any

import structlog

from router.http.worker_url import without_user_info


def log_to_stderr(level: str = "info") -> None:
    """Set up logging for this process."""
    renderer = structlog.dev.ConsoleRenderer() if sys.stderr.isatty() else structlog.processors.JSONRenderer()
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


def _hide_passwords(_logger: object, _method: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """URLs of workers, peers and Redis may have some, and errors name URLs: whatever is logged goes through here."""
    return {name: _hidden(value) for name, value in line.items()}


def _hidden(value: Any) -> Any:
    if isinstance(value, str):
        return without_user_info(value)
    if isinstance(value, list | tuple | set):
        return [_hidden(each) for each in value]
    if isinstance(value, dict):
        return {_hidden(name): _hidden(each) for name, each in value.items()}
    return value
