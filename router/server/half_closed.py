"""Clients that send nothing more. Some still read: they half-closed their connection. Others are gone.

Both look the same until something is written to them: who is gone answers with a reset. So before an answer begins an
interim response, which every client skips, is written, and its effect is looked for.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Final

_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_TCP_INFO: Final[int] = getattr(socket, "TCP_INFO", -1)  # Linux alone has it
_TCP_CLOSE: Final = 7  # a reset came
# When to look, in seconds after the last look.
_LOOKS: Final[tuple[float, ...]] = (0.01, 0.05, 0.2, 1.0, 5.0)


def probe(loop: asyncio.AbstractEventLoop, transport: asyncio.Transport, answering: bool) -> bool:
    """Find out whether a client that sends nothing more is gone: then its connection is aborted.

    `answering`: its answer has begun; who leaves then is taken to be gone. Whether the connection is to be kept.
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
