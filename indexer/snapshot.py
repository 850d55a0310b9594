"""The index on disk, so that a restart comes back warm: written now and then, atomically, and read at the start."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from contextlib import closing
from http.client import HTTPException
from pathlib import Path
from threading import Event, Thread
from urllib.request import urlopen

import structlog

from indexer.dump import DumpError, TargetDump, read_dump
from indexer.indexer import Indexer

log = structlog.get_logger()

_PEER_TIMEOUT = 10.0  # seconds of silence


def save_snapshot(path: Path, lines: Iterable[bytes]) -> int:
    """Write a dump in place of the last one, or leave the last one as it is. Returns its bytes. Raises OSError."""
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


def load_snapshot(path: Path, secret: str) -> list[TargetDump]:
    """What the last snapshot holds; nothing, with a word in the log, when it cannot be used."""
    try:
        with path.open("rb") as file:
            return read_dump(file, secret)
    except FileNotFoundError:
        return []
    except (OSError, DumpError) as error:
        log.warning("snapshot not used, starting cold", path=str(path), reason=str(error))
        return []


def load_from_peer(url: str, secret: str) -> list[TargetDump]:
    """What another indexer holds; nothing, with a word in the log, when it cannot be had."""
    try:
        with closing(urlopen(f"{url.rstrip('/')}/dump", timeout=_PEER_TIMEOUT)) as answer:
            return read_dump(answer, secret)
    except (OSError, HTTPException, DumpError, ValueError) as error:
        log.warning("peer's index not used, starting cold", peer=url, reason=str(error))
        return []


class SnapshotWriter:
    """Writes a snapshot every `interval` seconds, and a last one at the end. `start` and `stop` own its thread."""

    def __init__(self, indexer: Indexer, path: Path, interval: float) -> None:
        self._indexer = indexer
        self._path = path
        self._interval = interval
        self._stopping = Event()
        self._thread = Thread(target=self._run, name="snapshot-writer", daemon=True)

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def stop(self) -> None:
        """Write once more and end."""
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
