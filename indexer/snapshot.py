"""Snapshots of the index, for warm restarts: written periodically and atomically, and read at the start."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from http.client import HTTPException
from pathlib import Path
from threading import Event, Thread
from urllib.request import HTTPRedirectHandler, Request, build_opener

import structlog

from indexer.dump import DumpError, SavedTarget, read_dump
from indexer.indexer import Indexer

log = structlog.get_logger()

# Timeouts of a peer's answer, in seconds: between two packets, and in total.
_PEER_SILENCE = 10.0
_PEER_SECONDS = 60.0


class _NoRedirects(HTTPRedirectHandler):
    """Handler that turns a redirect into an error, because following it would send the token to another server."""

    def redirect_request(self, *_: object) -> None:
        """Return no request, so that the redirect becomes an error."""


_opener = build_opener(_NoRedirects)


def save_snapshot(path: Path, lines: Iterable[bytes]) -> int:
    """Replace the last snapshot atomically. Returns the size in bytes. Raises OSError; the last snapshot then stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    number, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(number, "wb") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    return size


def load_snapshot(path: Path, secret: str) -> list[SavedTarget]:
    """Return the targets of the last snapshot. If it is unusable, the list is empty and the log has the reason."""
    try:
        with path.open("rb") as file:
            return read_dump(file, secret)
    except FileNotFoundError:
        return []
    except (OSError, DumpError) as error:
        log.warning("snapshot not used, starting cold", path=str(path), reason=str(error))
        return []


def load_from_peer(url: str, secret: str, token: str = "") -> list[SavedTarget]:
    """Return the targets of another indexer's dump; if it is unusable, an empty list and a log line with the reason."""
    request = Request(f"{url.rstrip('/')}/dump", headers={"Authorization": f"Bearer {token}"} if token else {})
    try:
        with closing(_opener.open(request, timeout=_PEER_SILENCE)) as answer:
            loaded = read_dump(_until(answer, time.monotonic() + _PEER_SECONDS), secret)
    except (OSError, HTTPException, DumpError, ValueError) as error:
        log.warning("peer's index not used, starting cold", peer=url, reason=str(error))
        return []
    log.info("peer's index loaded", peer=url, targets=len(loaded))
    return loaded


def _until(lines: Iterable[bytes], deadline: float) -> Iterator[bytes]:
    for line in lines:
        if time.monotonic() > deadline:
            raise TimeoutError(f"the answer takes longer than {_PEER_SECONDS:g} s")
        yield line


class SnapshotWriter:
    """Thread that writes a snapshot every `interval` seconds, and a last one when it is stopped."""

    def __init__(self, indexer: Indexer, path: Path, interval: float = 60.0) -> None:
        self._indexer = indexer
        self._path = path
        self._interval = interval
        self._stopping = Event()
        self._thread = Thread(target=self._run, name="snapshot-writer", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Write a last snapshot, and stop the thread."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        stopping = False
        while not stopping:
            stopping = self._stopping.wait(self._interval)
            try:
                size = save_snapshot(self._path, self._indexer.dump())
            except (OSError, TimeoutError) as error:
                log.error("snapshot not written", path=str(self._path), reason=str(error))
            else:
                log.debug("snapshot written", path=str(self._path), bytes=size)
