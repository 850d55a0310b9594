"""The sockets that the services listen on, and those of clients that have closed their side."""

from __future__ import annotations

import asyncio
import resource
import socket
from pathlib import Path
from typing import Final

from http_api.errors import ListenError
from router.settings import ServerSettings

_BACKLOG = 2048


def listen(host: str, port: int, *, shared: bool = False, option: str = "--port") -> socket.socket:
    """Create a listening socket; port 0 chooses a free port. Early clients wait. Raises ListenError."""
    listening = bind(host, port, shared=shared, option=option)
    listening.listen(_BACKLOG)
    return listening


def listen_at(settings: ServerSettings, port: int | None = None, *, shared: bool = False) -> list[socket.socket]:
    """Create listening sockets at a server's port, or at `port`, and at its admin port. Raises OSError."""
    sockets = [listen(settings.host, settings.port if port is None else port, shared=shared)]
    if settings.admin_port is not None:
        sockets.append(listen(settings.host, settings.admin_port, shared=shared, option="server.admin_port"))
    return sockets


def bind(host: str, port: int, *, shared: bool = False, option: str = "--port") -> socket.socket:
    """Create a bound socket; others may bind its address if `shared`. Raises ListenError.

    - `option`: what sets the port, for the error's message.
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
        raise ListenError.of(error, host, port, option) from error
    return bound


def listen_at_path(path: Path) -> socket.socket:
    """Create a listening Unix socket, in place of an earlier process's. Raises OSError."""
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
    """Return a server's URL."""
    return f"{'https' if encrypted else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def raise_file_limit() -> None:
    """Raise the limit of open files as far as allowed: each event stream needs several, each connection one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_TCP_INFO: Final[int] = getattr(socket, "TCP_INFO", -1)  # Linux alone has it
_TCP_CLOSE: Final = 7  # a reset was received
# Seconds between two checks.
_LOOKS: Final[tuple[float, ...]] = (0.01, 0.05, 0.2, 1.0, 5.0)


def probe(loop: asyncio.AbstractEventLoop, transport: asyncio.Transport, answering: bool) -> bool:
    """Return whether to keep the connection of a client that closed its sending side, before its answer has begun.

    The client may still read, or may have disconnected. Only a write shows which: a reset answers it then. The write is
    an interim response, which every client skips.
    """
    connected = transport.get_extra_info("socket")
    if answering or _TCP_INFO < 0 or transport.get_extra_info("ssl_object") is not None:
        return False
    transport.write(_CONTINUE)
    _look(loop, transport, connected, 0)
    return True


def _look(loop: asyncio.AbstractEventLoop, transport: asyncio.Transport, connected: socket.socket, number: int) -> None:
    if transport.is_closing():
        return
    try:
        gone = connected.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 1)[0] == _TCP_CLOSE
    except OSError:
        gone = True
    if gone:
        transport.abort()
    elif number < len(_LOOKS):
        loop.call_later(_LOOKS[number], _look, loop, transport, connected, number + 1)
