"""Workers from the settings file, read again whenever the file changes. A bad file changes nothing."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from router.fleet.fleet import Fleet
from router.settings import ConfigError, Settings, load_settings

log = structlog.get_logger()

_LOOK_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class SettingsFile:
    """Where the settings came from, so that they can be read again."""

    path: Path
    overrides: dict[str, Any] = field(default_factory=dict)

    def load(self) -> Settings:
        """Read it. Raises ConfigError."""
        return load_settings(self.path, self.overrides)

    def stamp(self) -> tuple[int, int, int] | None:
        """What changes when the file does; None when it is not there. A link to another file is another file."""
        try:
            status = self.path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_ino, status.st_size


async def follow_workers(file: SettingsFile, settings: Settings, fleet: Fleet) -> None:
    """Give the fleet the workers of the file each time it changes, until cancelled. `settings` are those in use."""
    seen: object = "nothing yet"  # it may have changed since the settings were read
    while True:
        if (stamp := file.stamp()) != seen:
            seen = stamp
            try:
                await _follow(await asyncio.to_thread(file.load), settings, fleet)
            except ConfigError as error:
                log.error("settings file refused, the workers stay as they were", reason=str(error))
        await asyncio.sleep(_LOOK_SECONDS)


async def _follow(changed: Settings, settings: Settings, fleet: Fleet) -> None:
    if changed.workers != fleet.assigned("config"):
        await fleet.assign("config", changed.workers)
    others = [name for name in Settings.model_fields if getattr(changed, name) != getattr(settings, name)]
    if set(others) - {"workers"}:
        log.warning("settings changed that need a restart", sections=sorted(set(others) - {"workers"}))
