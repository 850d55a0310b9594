"""The picker's port: Envoy's external processor, and health, by gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
from fastapi import FastAPI

from router.app.subscriptions import subscribe_picker
from router.fleet.kubernetes import ClusterAccess, ResourceWatch
from router.http.client import refuse_redirects
from router.picker.external_processor import SERVICE, ExternalProcessor
from router.picker.grpc_server import GrpcServer, Methods
from router.picker.health import Health
from router.picker.state import OBJECTIVES_PATH, Deadlines, Objectives, OwnAnswers, PickerState
from router.picker.tls import rotating
from router.settings import Settings

# Bytes of a message beside a whole body.
_MESSAGE_MARGIN = 2**20


@asynccontextmanager
async def running_picker(app: FastAPI, settings: Settings) -> AsyncIterator[int]:
    """Serve Envoy beside a router's application, and yield the port.

    At the end, requests have `server.shutdown_timeout` seconds to finish.

    Raises OSError when the address cannot be bound, or the certificate cannot be read.
    """
    router, picker = app.state, settings.picker
    async with AsyncExitStack() as stack:
        named = await stack.enter_async_context(_followed_objectives(settings))
        deadlines = Deadlines(settings.server.body_timeout)
        stack.callback(deadlines.close)
        state = PickerState(router.proxy_context, router.fleet, picker, OwnAnswers(router.fleet), named, deadlines)
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
            raise OSError(f"{server_settings.host}:{picker.port} cannot be bound: {error}") from error
        try:
            yield port
        finally:
            await server.stop(server_settings.shutdown_timeout)


@asynccontextmanager
async def _followed_objectives(settings: Settings) -> AsyncIterator[Objectives]:
    """Yield the objectives of the settings, and those of the cluster if they are followed."""
    found = Objectives(settings.picker.objectives)
    group = settings.picker.follow_objectives
    if group is None:
        yield found
        return
    access = ClusterAccess.in_cluster(settings.kubernetes.namespace)
    path = OBJECTIVES_PATH.format(group=group, namespace=access.namespace)
    async with aiohttp.ClientSession(middlewares=(refuse_redirects,)) as session:
        watch = ResourceWatch(session, access, path, "", settings.kubernetes.resync, found.follow)
        task = asyncio.create_task(watch.run())
        try:
            yield found
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
