"""The sockets that the services listen on."""

from __future__ import annotations

import resource
import socket
from pathlib import Path

from router.settings import ServerSettings

_BACKLOG = 2048


def listen(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A listening socket; port 0 takes a free one. Clients that connect early wait. Raises OSError."""
    listening = bind(host, port, shared=shared)
    listening.listen(_BACKLOG)
    return listening


def listen_at(settings: ServerSettings, port: int | None = None, *, shared: bool = False) -> list[socket.socket]:
    """Sockets that listen at a server's port, or at `port`, and at the operator's. Raises OSError."""
    sockets = [listen(settings.host, settings.port if port is None else port, shared=shared)]
    if settings.admin_port is not None:
        sockets.append(listen(settings.host, settings.admin_port, shared=shared))
    return sockets


def bind(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A socket that has an address and does not listen yet. `shared`: other processes may bind the same one so too.

    Raises OSError, which names the address.
    """
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        # Connections inherit it. asyncio would leave it off, and every answer's body would wait 40 ms for its headers'
        # ACK.
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise OSError(error.errno, f"{error.strerror}: {host}:{port}") from error
    return bound


def listen_at_path(path: Path) -> socket.socket:
    """A listening Unix socket, in the place of one that an earlier process left. Raises OSError."""
    path.unlink(missing_ok=True)
    listening = socket.socket(socket.AF_UNIX)
    try:
        listening.bind(str(path))
        listening.listen(_BACKLOG)
    except OSError:
        listening.close()
        raise
    return listening


def url_of(host: str, port: int, encrypted: bool) -> str:
    """Where a server can be reached."""
    return f"{'https' if encrypted else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def raise_file_limit() -> None:
    """Have as many open files as may be: each event stream takes several, and each connection one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
