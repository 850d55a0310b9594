"""Who is meant by a request's `Host`, and which site a browser sends it for.

A page of any site may have a browser send requests to a router on its user's machine or network. Where that is the
router's own loopback address, a name that anybody could have pointed there is refused (DNS rebinding); and what changes
something is refused wherever it comes from another site.
"""

from __future__ import annotations

from collections.abc import Collection
from ipaddress import ip_address
from typing import Final
from urllib.parse import urlsplit

from http_api.errors import RequestError
from router.http.headers import Headers

# RFC 6761 and 6762, and names inside a network or a cluster: nobody can have one of these on the internet.
_PRIVATE: Final = frozenset({"localhost", "local", "internal", "svc"})
# What a page may send to another site without asking it first (the Fetch standard); curl sends the last.
_SIMPLE: Final = frozenset({b"text/plain", b"multipart/form-data"})
_FORM: Final = b"application/x-www-form-urlencoded"


def is_loopback(host: str) -> bool:
    """Whether an address to listen at is reached from this machine alone."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_host(headers: Headers, loopback: bool, allowed: Collection[str]) -> None:
    """Raise RequestError for a request that is meant for another host, as far as that can be known.

    `allowed`: names beside those that nobody else can have; none and not on `loopback`: any.
    """
    given = [value for name, value in headers if name == b"host"]
    if len(given) > 1:
        raise RequestError("Host stands there twice. Send it once.", code="host")
    if not given or not (loopback or allowed):
        return
    name = _name_of(given[0])
    if name is None:
        raise RequestError("Host is no host. Send the name or address of this service.", code="host")
    if name in allowed or "." not in name or name.rstrip(".").rpartition(".")[2] in _PRIVATE or _is_address(name):
        return
    raise RequestError(
        f"Host is {name}, which is not this service. Add it to server.allowed_hosts if it is.",
        status=421,
        type="permission_error",
        code="host",
    )


def check_site(headers: Headers) -> None:
    """Raise RequestError (403, 415) for a request that changes something and that another site's page may have sent."""
    said: dict[bytes, set[bytes]] = {name: set() for name in (b"origin", b"sec-fetch-site", b"content-type", b"host")}
    for name, value in headers:
        if name in said:
            said[name].add(value.strip().lower())
    kinds = {value.partition(b";")[0].strip() for value in said[b"content-type"]}
    if not _SIMPLE.isdisjoint(kinds) or (_FORM in kinds and said[b"origin"]):
        raise RequestError("This takes JSON. Send content-type: application/json.", status=415, param="content-type")
    foreign = any({_netloc_of(origin)} != said[b"host"] for origin in said[b"origin"])
    if foreign or not said[b"sec-fetch-site"].isdisjoint((b"cross-site", b"same-site")):
        raise RequestError(
            "This changes the state of the service, and the page of another site asks for it.",
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
