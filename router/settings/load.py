"""Loads settings from a YAML file, environment variables and options, and prints them without secrets."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_settings import EnvSettingsSource, SettingsError

from router.http.worker_url import without_user_info
from router.settings.mistakes import mistakes
from router.settings.settings import PREFIX, Settings

# Settings with secrets whose names do not show it. `api_key` is masked everywhere.
_HIDDEN = frozenset({"replicas.redis", "server.token", "index.secret"})
# Names of settings that are always secret.
_SECRETS = frozenset({"api_key", "keys", "password", "secret", "token"})


class ConfigError(Exception):
    """A configuration that cannot be used. The message names the file, the field and the mistake."""


@dataclass(frozen=True, slots=True)
class SettingsFile:
    """A settings file that can be loaded again, below settings from the command line."""

    path: Path
    overrides: dict[str, Any] = field(default_factory=dict)

    def load(self) -> Settings:
        """Load the settings. Raises ConfigError."""
        return load_settings(self.path, self.overrides)

    def stamp(self) -> tuple[int, int, int] | None:
        """Return a value that differs after each change of the file, or of a link's file; None if it does not exist."""
        try:
            status = self.path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_ino, status.st_size


def load_settings(path: Path | None, overrides: dict[str, Any] | None = None) -> Settings:
    """Load a YAML file, which the environment and then `overrides` override. Raises ConfigError: a line a mistake."""
    fields: dict[str, Any] = {}
    settings = Settings()
    for source, given in (
        (path, _read_file(path) if path else {}),
        ("environment", _read_environment()),
        ("options", overrides or {}),
    ):
        fields = _merged(fields, given)
        try:
            settings = Settings(**fields)
        except ValidationError as error:
            # A later source may set what one section requires of another.
            found = mistakes(error, Settings, _HIDDEN, between_sections=source == "options", source=source)
            if not found:
                continue
            raise ConfigError("\n".join(found)) from error
    return settings


def shown(settings: Settings) -> dict[str, Any]:
    """Return all settings in the shape of the file, with secrets masked."""
    masked: dict[str, Any] = _masked(settings.model_dump(mode="json"), "")
    return masked


def _masked(value: Any, place: str) -> Any:
    if isinstance(value, dict):
        return {name: _masked(each, f"{place}.{name}" if place else str(name)) for name, each in value.items()}
    if isinstance(value, list):
        return [_masked(each, place) for each in value]
    if not isinstance(value, str):
        return value
    secret = place in _HIDDEN or place.rpartition(".")[2] in _SECRETS
    return "***" if secret and value else without_user_info(value)


def _read_file(path: Path) -> dict[str, Any]:
    try:
        fields = yaml.safe_load(path.read_text()) or {}
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: {_not_yaml(error)}") from error
    except UnicodeError as error:
        raise ConfigError(f"{path}: not YAML: the file is not text in UTF-8") from error
    if not isinstance(fields, dict) or not all(isinstance(name, str) for name in fields):
        raise ConfigError(f"{path}: expected sections such as server: and workers:")
    return fields


def _not_yaml(error: yaml.YAMLError) -> str:
    """Return the place of a syntax error, with its line. PyYAML's words are not for users."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    if mark is None:
        return "not YAML"
    line = (mark.buffer or "").rstrip("\0").split("\n")[mark.line : mark.line + 1]
    text = line[0].rstrip() if line else ""
    hint = "; indent by spaces, not by tabs" if text[: mark.column + 1].strip(" ").startswith("\t") else ""
    shown = f" of {text.strip()!r}" if text.strip() and not _secret(text) else ""
    return f"line {mark.line + 1}: not YAML at column {mark.column + 1}{shown}{hint}"


def _secret(line: str) -> bool:
    """Return whether a line of a settings file may contain a secret."""
    return "@" in line or any(f"{name}" in line for name in _SECRETS)


def _read_environment() -> dict[str, Any]:
    # A variable without a nested name may belong to a Kubernetes service that is called kvrouter.
    for variable in os.environ:
        section, nested, _ = variable.removeprefix(PREFIX).lower().partition("__")
        if variable.startswith(PREFIX) and nested and section not in Settings.model_fields:
            near = get_close_matches(section, Settings.model_fields, 1)
            meant = f"; did you mean {PREFIX}{near[0].upper()}__…?" if near else ""
            raise ConfigError(f"environment: {variable}: unknown setting{meant}")
    try:
        return EnvSettingsSource(Settings)()
    except SettingsError as error:
        bad = next((name for name in Settings.model_fields if f'"{name}"' in str(error)), "a variable")
        raise ConfigError(f"environment: {PREFIX}{bad.upper()}: {bad}: expected JSON") from error


def _merged(base: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for name, value in overrides.items():
        known = merged.get(name)
        merged[name] = _merged(known, value) if isinstance(known, dict) and isinstance(value, dict) else value
    return merged
