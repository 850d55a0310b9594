"""The picker's port: Envoy's external processor and health, by gRPC, with an optional certificate.

The certificate is loaded again when its files change, so that rotation needs no restart.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final, TypeAlias

import aiohttp
import structlog
from fastapi import FastAPI

from http_api.errors import ListenError
from router.app.subscriptions import subscribe_picker
from router.fleet.kubernetes import ClusterAccess, ResourceWatch
from router.http.client import refuse_redirects
from router.picker.external_processor import SERVICE, ExternalProcessor
from router.picker.grpc_server import GrpcServer, Methods
from router.picker.health import Health
from router.picker.model_rewrites import REWRITES_PATH, ModelRewrites
from router.picker.state import OBJECTIVES_PATH, Deadlines, Objectives, OwnAnswers, PickerState
from router.settings import Settings

log = structlog.get_logger()

LOOK_SECONDS: Final = 2.0
_Stamp: TypeAlias = list[tuple[int, int, int]]
# Bytes of a message beside a whole body.
_MESSAGE_MARGIN = 2**20


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


@asynccontextmanager
async def running_picker(app: FastAPI, settings: Settings) -> AsyncIterator[int]:
    """Serve Envoy beside a router's application, and yield the port. Raises OSError for address or certificate."""
    router, picker = app.state, settings.picker
    async with AsyncExitStack() as stack:
        objectives, rewrites = Objectives(picker.objectives), ModelRewrites(picker.pool)
        for path, group, follow in (
            (OBJECTIVES_PATH, picker.follow_objectives, objectives.follow),
            (REWRITES_PATH, picker.follow_rewrites, rewrites.follow),
        ):
            if group is not None:
                await stack.enter_async_context(_followed(path, group, settings, follow))
        deadlines = Deadlines(settings.server.body_timeout)
        stack.callback(deadlines.close)
        own_answers = OwnAnswers(router.fleet)
        state = PickerState(router.proxy_context, router.fleet, picker, own_answers, objectives, rewrites, deadlines)
        stack.push_async_callback(state.addresses.close)
        subscribe_picker(state.addresses.forget, state.fleet)
        methods = {**ExternalProcessor(state).methods, **Health(router.readiness, SERVICE).methods}
        yield await stack.enter_async_context(_serving(methods, settings))


@asynccontextmanager
async def _serving(methods: Methods, settings: Settings) -> AsyncIterator[int]:
    picker, server_settings = settings.picker, settings.server
    server = GrpcServer(methods, server_settings.max_body_bytes + _MESSAGE_MARGIN)
    async with rotating(picker.certificate, picker.key) as certificate:
        try:
            tls = certificate.context if certificate is not None else None
            port = await server.start(server_settings.host, picker.port, tls)
        except OSError as error:
            raise ListenError.of(error, server_settings.host, picker.port, "--grpc-port") from error
        try:
            yield port
        finally:
            await server.stop(server_settings.shutdown_timeout)


@asynccontextmanager
async def _followed(
    path: str, group: str, settings: Settings, follow: Callable[[Iterable[dict[str, Any]]], Awaitable[None]]
) -> AsyncIterator[None]:
    """Call `follow` with the cluster's objects of an API group, after each change."""
    access = ClusterAccess.in_cluster(settings.kubernetes.namespace)
    async with aiohttp.ClientSession(middlewares=(refuse_redirects,)) as session:
        watch = ResourceWatch(session, access, path.format(group=group, namespace=access.namespace), "", follow)
        task = asyncio.create_task(watch.run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
