"""An engine by its name. What is not asked for is not imported."""

from __future__ import annotations

from collections.abc import Callable

from worker.disaggregation.transfer.engine import TransferEngine


def open_engine(name: str, host: str = "127.0.0.1", secret: bytes | None = None) -> TransferEngine:
    """An engine that peers reach at `host`; sessions are only with those that know `secret`, if one is given.

    Raises ValueError for an unknown name and a host or secret that can't be used; ImportError, with the extra to
    install, for an engine whose library is missing.
    """
    if name not in _ENGINES:
        raise ValueError(f"transfer engine {name!r} is unknown; there are {', '.join(ENGINES)}")
    return _ENGINES[name](host, secret)


def _tcp(host: str, secret: bytes | None) -> TransferEngine:
    from worker.disaggregation.transfer.tcp import TcpEngine

    return TcpEngine(host, secret)


def _shm(host: str, secret: bytes | None) -> TransferEngine:  # noqa: ARG001
    from worker.disaggregation.transfer.shm import ShmEngine

    return ShmEngine(secret)


def _mooncake(host: str, secret: bytes | None) -> TransferEngine:
    from worker.disaggregation.transfer.mooncake import MooncakeEngine

    return MooncakeEngine(host, secret)


def _nixl(host: str, secret: bytes | None) -> TransferEngine:
    from worker.disaggregation.transfer.nixl import NixlEngine

    return NixlEngine(host, secret)


_ENGINES: dict[str, Callable[[str, bytes | None], TransferEngine]] = {
    "tcp": _tcp,
    "shm": _shm,
    "mooncake": _mooncake,
    "nixl": _nixl,
}
ENGINES = tuple(_ENGINES)
"""Names `open_engine` knows."""
