"""Checks of a request's `Host`, and of the site for which a browser sends it.

A web page can make a browser send requests to a router on the user's machine or network. If the router listens on
loopback, a public name in `Host` is refused, because it can be DNS rebinding. Requests that change the state are
refused if another site's page sent them.
"""

from __future__ import annotations

from collections.abc import Collection
from ipaddress import ip_address
from typing import Final
from urllib.parse import urlsplit

from http_api.errors import RequestError
from router.http.headers import Headers

# Names inside a machine, network or cluster (RFC 6761, 6762), which cannot be registered on the internet.
_PRIVATE: Final = frozenset({"localhost", "local", "internal", "svc"})
# Content types that a page may send to another site without a preflight (Fetch); curl sends the last one.
_SIMPLE: Final = frozenset({b"text/plain", b"multipart/form-data"})
_FORM: Final = b"application/x-www-form-urlencoded"


def is_loopback(host: str) -> bool:
    """Return whether an address to listen on is reachable only from this machine."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_host(headers: Headers, loopback: bool, allowed: Collection[str]) -> None:
    """Raise RequestError for a request whose `Host` names another service.

    - `loopback`: the router listens on loopback. Otherwise, without `allowed`, every host is accepted.
    - `allowed`: host names that are accepted beside private ones.
    """
    given = [value for name, value in headers if name == b"host"]
    if len(given) > 1:
        raise RequestError("Duplicate Host header. Send it once.", code="host")
    if not given or not (loopback or allowed):
        return
    name = _name_of(given[0])
    if name is None:
        raise RequestError("Host is invalid. Send the name or address of this service.", code="host")
    if name in allowed or "." not in name or name.rstrip(".").rpartition(".")[2] in _PRIVATE or _is_address(name):
        return
    raise RequestError(
        f"Host is {name}, which is not this service. Add it to server.allowed_hosts if it is.",
        status=421,
        type="permission_error",
        code="host",
    )


def check_site(headers: Headers) -> None:
    """Raise RequestError (403, 415) for a state change that another site's page may have sent."""
    said: dict[bytes, set[bytes]] = {name: set() for name in (b"origin", b"sec-fetch-site", b"content-type", b"host")}
    for name, value in headers:
        if name in said:
            said[name].add(value.strip().lower())
    kinds = {value.partition(b";")[0].strip() for value in said[b"content-type"]}
    if not _SIMPLE.isdisjoint(kinds) or (_FORM in kinds and said[b"origin"]):
        raise RequestError(
            "This route accepts JSON only. Send content-type: application/json.", status=415, param="content-type"
        )
    foreign = any({_netloc_of(origin)} != said[b"host"] for origin in said[b"origin"])
    if foreign or not said[b"sec-fetch-site"].isdisjoint((b"cross-site", b"same-site")):
        raise RequestError(
            "The page of another site asks to change the state of the service, which is not allowed.",
            status=403,
            type="permission_error",
            code="cross_site",
        )


def _name_of(host: bytes) -> str | None:
    try:
        return urlsplit(f"//{host.decode('ascii').strip()}").hostname
    except ValueError:
        return None


def _netloc_of(origin: bytes) -> bytes | None:
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
