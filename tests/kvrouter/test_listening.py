"""The socket that the services listen on."""

from __future__ import annotations

import socket

from router.server.sockets import listen


def test_answers_do_not_wait_for_acknowledgements() -> None:
    with listen("127.0.0.1", 0) as listening:
        with socket.create_connection(listening.getsockname(), timeout=60):
            accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
