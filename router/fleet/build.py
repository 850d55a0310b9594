"""The fleet of the settings, and the tasks that add and remove workers while the router runs."""

from __future__ import annotations

import asyncio

import aiohttp

from indexer import Indexer
from router.fleet.fleet import Fleet
from router.fleet.kubernetes import ClusterAccess
from router.fleet.source_watch import follow_kubernetes, follow_settings_file
from router.settings import Settings, SettingsFile


def build_fleet(settings: Settings, indexer: Indexer) -> Fleet:
    """Return the fleet of the settings' workers. Nothing probes them yet."""
    return Fleet(
        settings.workers,
        settings.fleet,
        indexer,
        keys_for_added=bool(settings.server.token),
        aliases=settings.aliases,
        expected=settings.models if settings.admission.cold_start_timeout else None,
    )


def follow_sources(
    settings: Settings, file: SettingsFile | None, session: aiohttp.ClientSession, fleet: Fleet
) -> list[asyncio.Task[None]]:
    """Start the tasks that add and remove workers as Kubernetes and the settings file name them.

    - `file`: the settings file; None: no file is followed.
    """
    tasks: list[asyncio.Task[None]] = []
    if settings.kubernetes.used:
        cluster = ClusterAccess.in_cluster(settings.kubernetes.namespace)
        tasks.append(asyncio.create_task(follow_kubernetes(settings.kubernetes, cluster, session, fleet)))
    if file is not None:
        tasks.append(asyncio.create_task(follow_settings_file(file, settings, fleet)))
    return tasks
