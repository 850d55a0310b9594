"""Who may read a publisher's streams: anyone, holders of its public key, or a list of clients."""

from __future__ import annotations

import zmq
from zmq.auth.thread import ThreadAuthenticator

from kvevents.curve import be_server, load_key_pair, load_public_keys


class StreamSecurity:
    """The context for a publisher's sockets and the keys they use. Without keys, streams are as open as ever.

    An allow-list needs an authenticator, which sees every connection of its context: such a publisher has a context to
    itself. Raises ValueError, naming the field, for keys that cannot be read.
    """

    def __init__(self, curve_secret_key_file: str | None, curve_client_keys: str | None) -> None:
        if curve_client_keys is not None and curve_secret_key_file is None:
            raise ValueError("curve_client_keys: needs curve_secret_key_file too")
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
        """End what was started; the sockets are closed already."""
        if self._authenticator is not None:
            self._authenticator.stop()
            self.context.term()
