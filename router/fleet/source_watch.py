"""Workers from the settings file, read again whenever the file changes. A bad file changes nothing."""

from __future__ import annotations

import asyncio

import structlog

from router.fleet.fleet import Fleet
from router.settings import ConfigError, Settings, SettingsFile

log = structlog.get_logger()

_LOOK_SECONDS = 1.0


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
        fleet.assign("config", changed.workers)
    others = [name for name in Settings.model_fields if getattr(changed, name) != getattr(settings, name)]
    if set(others) - {"workers"}:
        log.warning("settings changed that need a restart", sections=sorted(set(others) - {"workers"}))
