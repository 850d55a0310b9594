"""An engine by its name. What is not asked for is not imported."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from worker.disaggregation.transfer.engine import TransferEngine

_ENGINES = {
    "tcp": ("worker.disaggregation.transfer.tcp", "TcpEngine"),
}
ENGINES = tuple(_ENGINES)
"""Names `open_engine` knows."""


def open_engine(name: str, host: str = "127.0.0.1", secret: bytes | None = None) -> TransferEngine:
    """An engine that peers reach at `host`; sessions are only with those that know `secret`, if one is given.

    Raises ValueError for an unknown name and a host or secret that can't be used; ImportError, with the extra to
    install, for an engine whose library is missing.
    """
    if name not in _ENGINES:
        raise ValueError(f"transfer engine {name!r} is unknown; there are {', '.join(ENGINES)}")
    module, attribute = _ENGINES[name]
    make: Callable[[str, bytes | None], TransferEngine] = getattr(import_module(module), attribute)
    return make(host, secret)
