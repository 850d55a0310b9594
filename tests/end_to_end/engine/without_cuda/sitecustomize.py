"""Lets vLLM's MooncakeStoreConnector run on a CPU: it records a CUDA event before each store."""

from __future__ import annotations

from contextlib import suppress


class _Event:
    """A CUDA event that has always happened."""

    def __init__(self, *_: object, **__: object) -> None:
        """Create an event."""

    def record(self, *_: object) -> None:
        """Do nothing."""

    def synchronize(self) -> None:
        """Do nothing."""

    def query(self) -> bool:
        """Return True."""
        return True


with suppress(ImportError):  # other programs of the engine's environment have no torch
    import torch

    torch.cuda.Event = _Event
