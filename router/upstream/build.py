"""Everything that connects to workers: the pools of requests' connections, and the session for all other calls."""

from __future__ import annotations

import ssl
from functools import cache

import aiohttp

from router.fleet.allowed_networks import AllowedNetworks, GuardedResolver
from router.fleet.fleet import Fleet
from router.http.client import refuse_redirects
from router.settings import Settings, UpstreamSettings
from router.upstream.pool import KEEPALIVE_SECONDS, Upstreams


def build_upstreams(settings: Settings, networks: AllowedNetworks, fleet: Fleet) -> Upstreams:
    """Return the connection pools of all workers."""
    proxy = settings.proxy
    tls = _client_tls(settings.upstream)
    return Upstreams(tls, proxy.connect_timeout, proxy.idle_timeout, networks.to_connect, fleet.key_of)


def client_session(settings: UpstreamSettings, networks: AllowedNetworks) -> aiohttp.ClientSession:
    """Return the HTTP session for probes, metrics and commands to workers."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(
            limit=0,
            keepalive_timeout=KEEPALIVE_SECONDS,
            ssl=_client_tls(settings),
            resolver=GuardedResolver(networks, aiohttp.ThreadedResolver()),
        ),
        middlewares=(refuse_redirects,),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers={"Accept-Encoding": "identity"},
        auto_decompress=False,
        skip_auto_headers=("User-Agent", "Accept", "Content-Type"),
    )


@cache
def _system_tls() -> ssl.SSLContext:
    """Return a context that trusts the system's certificates. It is shared, because reading them takes 20 ms."""
    return ssl.create_default_context()


def _client_tls(settings: UpstreamSettings) -> ssl.SSLContext:
    if settings.ca is None and settings.verify and settings.certificate is None:
        return _system_tls()
    tls = ssl.create_default_context(cafile=settings.ca)
    if not settings.verify:
        tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    if settings.certificate is not None:
        tls.load_cert_chain(settings.certificate, settings.key)
    return tls
