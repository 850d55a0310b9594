"""Loads settings from a YAML file, environment variables and options, and prints them without secrets.

The text of an error has the place of each mistake, the value that was found, and the probable intention.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_settings import EnvSettingsSource, SettingsError

from router.http.worker_url import without_user_info
from router.settings.settings import PREFIX, Settings

_UNKNOWN = "extra_forbidden"


def mistakes(
    error: ValidationError, settings: type[BaseModel], hidden: Collection[str], between_sections: bool = True
) -> list[str]:
    """Return one line for each mistake; without the values of `hidden` places, or checks `between_sections`."""
    return [_line(each, settings, hidden) for each in error.errors() if each["loc"] or between_sections]


def _line(mistake: Any, settings: type[BaseModel], hidden: Collection[str]) -> str:
    place = ".".join(map(str, mistake["loc"]))
    if not place:
        return str(mistake["msg"])
    if mistake["type"] == _UNKNOWN:
        return f"{place}: unknown setting{_meant(mistake['loc'], settings)}"
    return f"{place}: {mistake['msg']}{_found(place, mistake['input'], hidden)}"


def _found(place: str, given: Any, hidden: Collection[str]) -> str:
    """Return the value at a place in words, unless it is or may contain a secret."""
    if isinstance(given, dict | list):
        return ""
    is_hidden = place in hidden or place.endswith("api_key") or "@" in str(given)
    return " (the value is hidden)" if is_hidden else f" (found {given!r})"


def _meant(loc: tuple[int | str, ...], settings: type[BaseModel]) -> str:
    """Return a hint in words: the setting with the most similar name, else the names that exist at this place."""
    *above, name = loc
    known = _fields_at(settings, above)
    if near := get_close_matches(str(name), known, 1):
        return f"; did you mean {'.'.join([*map(str, above), near[0]])}?"
    elsewhere = [path for path in setting_names(settings) if path.rpartition(".")[2] == name]
    if elsewhere:
        return f"; did you mean {elsewhere[0]}?"
    return f"; there are {', '.join(known)}" if known else ""


def setting_names(settings: type[BaseModel], above: str = "") -> Iterator[str]:
    """Yield the path of every setting, such as `server.port`, without the items of lists and maps."""
    for name, about in settings.model_fields.items():
        yield above + name
        if isinstance(about.annotation, type) and issubclass(about.annotation, BaseModel):
            yield from setting_names(about.annotation, f"{above}{name}.")


def _fields_at(settings: type[BaseModel], above: list[int | str]) -> list[str]:
    """Return the names of the settings that exist at a place."""
    section: Any = settings
    for step in above:
        if isinstance(section, type) and issubclass(section, BaseModel):
            field = section.model_fields.get(str(step))
            section = field.annotation if field else None
        else:  # A list or a mapping: continue with the type of its items.
            section = next((each for each in get_args(section) if _section_in(each) is not None), None)
        section = _without_none(section)
    section = _section_in(section) if not isinstance(section, type) else section
    return list(section.model_fields) if isinstance(section, type) and issubclass(section, BaseModel) else []


def _without_none(annotation: Any) -> Any:
    kinds = [each for each in get_args(annotation) if each is not type(None)]
    return kinds[0] if kinds and type(None) in get_args(annotation) else annotation


def _section_in(annotation: Any) -> type[BaseModel] | None:
    """Return the section that an annotation names, directly or as an item type."""
    if isinstance(annotation, type) and not get_args(annotation):
        return annotation if issubclass(annotation, BaseModel) else None
    return next((found for each in get_args(annotation) if (found := _section_in(each)) is not None), None)


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
            found = mistakes(error, Settings, _HIDDEN, between_sections=source == "options")
            if not found:
                continue
            raise ConfigError("\n".join(f"{source}: {mistake}" for mistake in found)) from error
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
    except (yaml.YAMLError, UnicodeError) as error:
        raise ConfigError(f"{path}: not YAML: {error}") from error
    if not isinstance(fields, dict) or not all(isinstance(name, str) for name in fields):
        raise ConfigError(f"{path}: expected sections such as server: and workers:")
    return fields


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
        raise ConfigError(f"environment: {error}") from error


def _merged(base: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for name, value in overrides.items():
        known = merged.get(name)
        merged[name] = _merged(known, value) if isinstance(known, dict) and isinstance(value, dict) else value
    return merged
