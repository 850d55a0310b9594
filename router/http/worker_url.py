"""A worker's URL, the origin to connect to, and the API key that the worker is sent.

Parsers of URLs differ over backslashes, dot segments, encoded letters and numbers as hosts. A check could then see
another host than the connection that follows it, so a URL with more than one meaning is refused.
"""

from __future__ import annotations

import os
import re
from base64 import b64encode
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from yarl import URL

from kvevents.endpoints import bracketed, parse_host

_LONGEST = 2048
_USER = r"[A-Za-z0-9._~!$&'()*+,;=%-]*"
_URL = re.compile(
    rf"(?P<scheme>https?)://(?P<userinfo>{_USER}(?::{_USER})?@)?(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)"
    r"(?::(?P<port>[0-9]{1,5}))?(?P<path>(?:/[A-Za-z0-9._~!$&'()*+,;=:-]+)*)/?",
    re.ASCII,
)
_USER_INFO = re.compile(r'(?<=://)[^/?#\s"]*@')
_PORTS = {"http": 80, "https": 443}
_EXPECTED = "expected a URL such as http://10.0.0.1:8000, with a path if need be and nothing behind it"
# A URL without its scheme, and the path of an API behind a worker's URL.
_WITHOUT_SCHEME = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::[0-9]{1,5})?(?:/[A-Za-z0-9._~/-]*)?", re.ASCII)
_API_PATH = re.compile(r"/v1(?:/.*)?$")


def canonical_url(text: str) -> str:
    """Return a worker's URL in its one accepted form. Raises ValueError, without the URL: it may have a password."""
    read = _URL.fullmatch(text) if len(text) <= _LONGEST else None
    if read is None or any(part in (".", "..") for part in read["path"].split("/")):
        raise ValueError(_problem(text))
    if (api := _API_PATH.search(read["path"])) is not None:
        raise ValueError(f"remove {api[0]} from the URL: the router adds the path of each request")
    scheme, host, port = (
        read["scheme"],
        bracketed(parse_host(read["host"])),
        int(read["port"] or _PORTS[read["scheme"]]),
    )
    if not 0 < port < 65536:
        raise ValueError(f"{_EXPECTED}; a port is from 1 to 65535")
    named = host if port == _PORTS[scheme] else f"{host}:{port}"
    return f"{scheme}://{read['userinfo'] or ''}{named}{read['path']}"


def _problem(text: str) -> str:
    """Return what is wrong with a URL, without any part of it that may be a password."""
    if _WITHOUT_SCHEME.fullmatch(text):
        return f"no scheme: write http://{text}"
    scheme, separator, _ = text.partition("://")
    if separator and scheme not in _PORTS and scheme.isalnum():
        return f"{scheme}:// is not the scheme of a URL here: expected http:// or https://"
    return _EXPECTED


def split_user_info(text: str) -> tuple[str, str | None]:
    """Return a worker's URL without its user info, and that as an API key: `KEY@` or, as Basic, `user:password@`."""
    read = _URL.fullmatch(text) if len(text) <= _LONGEST else None
    if read is None or not read["userinfo"]:
        return text, None
    scheme, _, rest = text.partition("://")
    given = read["userinfo"].removesuffix("@")
    user, colon, password = (unquote(part) for part in given.partition(":"))
    if user and colon:
        return f"{scheme}://{rest[len(given) + 1 :]}", "Basic " + b64encode(f"{user}:{password}".encode()).decode()
    return f"{scheme}://{rest[len(given) + 1 :]}", user or password


def without_user_info(text: str) -> str:
    """Return a text without the user info of the URLs in it."""
    return _USER_INFO.sub("", text) if "@" in text else text


def host_of(url: str) -> str:
    """Return the host of a worker's URL, without brackets."""
    read = _URL.fullmatch(url)
    if read is None:
        raise ValueError(_EXPECTED)
    return parse_host(read["host"])


@dataclass(frozen=True, slots=True)
class Origin:
    """A worker's address: what its URL says. `path` stands before every target."""

    tls: bool
    host: str
    port: int
    path: bytes
    host_header: bytes

    @classmethod
    def of(cls, url: str) -> Origin:
        """Return the origin of a worker's URL."""
        read = URL(url)
        host, port = read.host or "", read.port or _PORTS[read.scheme]
        named = f"[{host}]" if ":" in host else host
        return cls(
            read.scheme == "https",
            host,
            port,
            read.raw_path.rstrip("/").encode(),
            (named if port == _PORTS[read.scheme] else f"{named}:{port}").encode(),
        )

    def opening(self, method: str, target: bytes, lines: bytes) -> bytes:
        """Return the beginning of a request's head, with the header lines `lines`. More lines may follow."""
        return b"%b %b%b HTTP/1.1\r\nhost: %b\r\n%b" % (method.encode(), self.path, target, self.host_header, lines)


_LONGEST_KEY: Final = 8192
# The values that a header can have: a key alone, or a scheme and a key.
_KEY: Final = re.compile(r"(?:[A-Za-z]+ )?[!-~]+")


def checked_key(key: str, name: str) -> str:
    """Return a key that can be sent. Raises ValueError, whose message begins with `name`."""
    if len(key) > _LONGEST_KEY or not _KEY.fullmatch(key):
        raise ValueError(f"{name}: no API key: expected {_LONGEST_KEY} characters at most, visible ones of ASCII")
    return key


def key_in_file(path: Path) -> str:
    """Read a key from a file that holds only the key. Raises ValueError, whose message begins with `api_key_file`."""
    try:
        with path.open("rb") as file:
            key = file.read(_LONGEST_KEY + 2).decode().strip()
    except (OSError, UnicodeError) as error:
        raise ValueError(f"api_key_file: {path} cannot be read: {type(error).__name__}") from error
    return checked_key(key, f"api_key_file: {path}")


def key_in_environment(variable: str) -> str:
    """Return the key in an environment variable. Raises ValueError, whose message begins with `api_key_env`."""
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ValueError(f"api_key_env: the environment has no {variable}")
    return checked_key(key, f"api_key_env: {variable}")


def authorization_of(key: str) -> bytes | None:
    """Return the value of the header `Authorization` for a key; None if the key is empty."""
    if not key:
        return None
    return (key if " " in key else f"Bearer {key}").encode()
