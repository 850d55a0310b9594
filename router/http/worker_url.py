"""The URL of a worker: the one form that all who read it understand alike.

Parsers of URLs differ over backslashes, dot segments, encoded letters and numbers as hosts. Whoever checks such a URL
may see another host than whoever connects to it, so what has more than one meaning is refused.
"""

from __future__ import annotations

import re
from base64 import b64encode
from urllib.parse import unquote

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


def canonical_url(text: str) -> str:
    """The one way to write a worker's URL. Raises ValueError, without the URL: it may have a password."""
    read = _URL.fullmatch(text) if len(text) <= _LONGEST else None
    if read is None or any(part in (".", "..") for part in read["path"].split("/")):
        raise ValueError(_EXPECTED)
    scheme, host, port = (
        read["scheme"],
        bracketed(parse_host(read["host"])),
        int(read["port"] or _PORTS[read["scheme"]]),
    )
    if not 0 < port < 65536:
        raise ValueError(f"{_EXPECTED}; a port is from 1 to 65535")
    named = host if port == _PORTS[scheme] else f"{host}:{port}"
    return f"{scheme}://{read['userinfo'] or ''}{named}{read['path']}"


def split_user_info(text: str) -> tuple[str, str | None]:
    """A worker's URL without its user info, and what that is as an API key; None where there is none.

    `http://KEY@host` has a key; `http://user:password@host` credentials of the kind Basic, as the value of a header. A
    text that is no such URL comes back as it is.
    """
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
    """A text, such as a URL or one that names some, without what its URLs have before an @."""
    return _USER_INFO.sub("", text) if "@" in text else text


def host_of(url: str) -> str:
    """The host of such a URL, without brackets."""
    read = _URL.fullmatch(url)
    if read is None:
        raise ValueError(_EXPECTED)
    return parse_host(read["host"])
