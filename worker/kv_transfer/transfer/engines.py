"""Engines by their names. Only the requested engine is imported."""

from __future__ import annotations

from collections.abc import Callable

from worker.kv_transfer.transfer.engine import TransferEngine


def open_engine(name: str, host: str = "127.0.0.1", secret: bytes | None = None) -> TransferEngine:
    """Open an engine that peers reach at `host`. If `secret` is given, sessions need it on both sides.

    Raises ValueError for an unknown name and an invalid host or secret. Raises ImportError, which names the extra to
    install, if the engine's library is missing.
    """
    if name not in _ENGINES:
        raise ValueError(f"transfer engine {name!r} is unknown; known: {', '.join(ENGINES)}")
    return _ENGINES[name](host, secret)


def _tcp(host: str, secret: bytes | None) -> TransferEngine:
    from worker.kv_transfer.transfer.tcp import TcpEngine

    return TcpEngine(host, secret)


def _shm(host: str, secret: bytes | None) -> TransferEngine:  # noqa: ARG001
    from worker.kv_transfer.transfer.shm import ShmEngine

    return ShmEngine(secret)


def _mooncake(host: str, secret: bytes | None) -> TransferEngine:
    from worker.kv_transfer.transfer.libraries import MooncakeEngine

    return MooncakeEngine(host, secret)


def _nixl(host: str, secret: bytes | None) -> TransferEngine:
    from worker.kv_transfer.transfer.libraries import NixlEngine

    return NixlEngine(host, secret)


_ENGINES: dict[str, Callable[[str, bytes | None], TransferEngine]] = {
    "tcp": _tcp,
    "shm": _shm,
    "mooncake": _mooncake,
    "nixl": _nixl,
}
ENGINES = tuple(_ENGINES)
"""Names that `open_engine` accepts."""
