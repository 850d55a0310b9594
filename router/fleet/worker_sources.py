"""The workers that each source names, and the name under which each of them is shown."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import structlog

from router.fleet.worker import url_of
from router.http.worker_url import host_of
from router.settings import WorkerSettings

log = structlog.get_logger()

# The sources of workers. If two of them name the same URL, the first in this order counts.
SOURCES = ("config", "api", "kubernetes", "selection")
# The source whose workers any client with the operator's token can add.
ADDED_SOURCE = "api"
# The source of workers that are chosen for other programs only: nothing probes them, and the proxy sends them nothing.
DECLARED_SOURCE = "selection"


@dataclass(frozen=True, slots=True)
class SourcedWorker:
    """The settings of a worker, the source that named it, and the unique name under which it is shown."""

    name: str
    source: str
    settings: WorkerSettings


class WorkerSources:
    """The settings of workers by source, merged in the order of `SOURCES`."""

    def __init__(self, configured: Iterable[WorkerSettings]) -> None:
        self._by_source: dict[str, dict[str, WorkerSettings]] = {source: {} for source in SOURCES}
        self._untrusted_hosts: frozenset[str] = frozenset()
        self.assign("config", configured)

    def assign(self, source: str, workers: Iterable[WorkerSettings]) -> None:
        """Replace the workers of a source."""
        self._by_source[source] = {url_of(settings): settings for settings in workers}
        hosts = {name: {host_of(url) for url in given} for name, given in self._by_source.items()}
        trusted = {host for name in SOURCES if name != ADDED_SOURCE for host in hosts[name]}
        self._untrusted_hosts = frozenset(hosts[ADDED_SOURCE] - trusted)

    def assigned(self, source: str) -> list[WorkerSettings]:
        return list(self._by_source[source].values())

    def is_untrusted_host(self, host: str) -> bool:
        """Return whether a host is known only from workers that were added over HTTP."""
        return host in self._untrusted_hosts

    def merged(self) -> dict[str, SourcedWorker]:
        """Return the workers of all sources by URL. The URL replaces a name that another worker has."""
        merged: dict[str, SourcedWorker] = {}
        names: set[str] = set()
        for source in SOURCES:
            for url, settings in self._by_source[source].items():
                if url in merged:
                    continue
                name = settings.name or url
                if name in names:
                    log.warning("duplicate worker name, showing the URL instead", name=name, worker=url, source=source)
                    name = url
                names.add(name)
                merged[url] = SourcedWorker(name, source, settings)
        return merged
