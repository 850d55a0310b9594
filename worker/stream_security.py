"""Access to a publisher's streams: open, by its public key, or by a list of client keys."""

from __future__ import annotations

import zmq
from zmq.auth.thread import ThreadAuthenticator

from kvevents.curve import be_server, load_key_pair, load_public_keys


class StreamSecurity:
    """The ZeroMQ context of a publisher's sockets, and the keys they use. Without keys, streams are not encrypted.

    A list of client keys needs an authenticator, which sees every connection of its context. That publisher therefore
    has its own context. Raises ValueError, which names the field, for unreadable keys.
    """

    def __init__(self, curve_secret_key_file: str | None, curve_client_keys: str | None) -> None:
        if curve_client_keys is not None and curve_secret_key_file is None:
            raise ValueError("curve_client_keys: also set curve_secret_key_file")
        field = "curve_secret_key_file"
        self._pair = load_key_pair(curve_secret_key_file, field) if curve_secret_key_file is not None else None
        self._authenticator: ThreadAuthenticator | None = None
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        if curve_client_keys is not None:
            load_public_keys(curve_client_keys, "curve_client_keys")
            self.context = zmq.Context()
            self._authenticator = ThreadAuthenticator(self.context)
            self._authenticator.configure_curve(domain="*", location=curve_client_keys)
            self._authenticator.start()

    def apply(self, socket: zmq.Socket[bytes]) -> None:
        """Set up a socket before it is bound or connected."""
        if self._pair is not None:
            be_server(socket, self._pair)

    def close(self) -> None:
        """Stop the authenticator. All sockets have to be closed before."""
        if self._authenticator is not None:
            self._authenticator.stop()
            self.context.term()
