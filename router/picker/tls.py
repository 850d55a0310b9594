"""The picker's certificate, which is read again when its files change: rotation needs no restart."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, TypeAlias

import structlog

log = structlog.get_logger()

LOOK_SECONDS: Final = 2.0
_Stamp: TypeAlias = list[tuple[int, int, int]]


class Certificate:
    """A certificate with its chain, and its private key. Raises OSError for files that cannot be used."""

    def __init__(self, certificate: Path, key: Path) -> None:
        self._files = (certificate, key)
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.context.set_alpn_protocols(["h2"])
        self._stamp = self._look()
        self.context.load_cert_chain(certificate, key)

    def refresh(self) -> None:
        """Read the files if they changed. New connections use the new certificate; an invalid one is ignored."""
        try:
            stamp = self._look()
            if stamp == self._stamp:
                return
            certificate, key = self._files
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)  # fails unless they match
            self.context.load_cert_chain(certificate, key)
        except OSError as error:
            log.warning("the picker's new certificate cannot be used; the old one stays", reason=str(error))
            return
        self._stamp = stamp
        log.info("the picker's certificate has changed")

    def _look(self) -> _Stamp:
        """Return what identifies the files' content, also behind links, as in Kubernetes."""
        found = [file.stat() for file in self._files]
        return [(each.st_ino, each.st_mtime_ns, each.st_size) for each in found]


@asynccontextmanager
async def rotating(certificate: Path | None, key: Path | None) -> AsyncIterator[Certificate | None]:
    """Yield a certificate that follows its files; None without files."""
    if certificate is None or key is None:
        yield None
        return
    found = Certificate(certificate, key)
    task = asyncio.create_task(_follow(found))
    try:
        yield found
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _follow(certificate: Certificate) -> None:
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        certificate.refresh()
