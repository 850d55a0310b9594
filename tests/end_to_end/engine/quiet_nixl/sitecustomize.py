"""Lets the progress thread of NIXL's agents wait for events. Without a delay it polls, and takes a core while idle."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

_DELAY = 1000  # microseconds

with suppress(ImportError):  # other programs of the engine's environment have no NIXL
    from nixl_cu12 import _bindings

    _agent = _bindings.nixlAgent

    def _waiting_agent(name: str, settings: Any) -> Any:
        settings.pthrDelay = _DELAY
        return _agent(name, settings)

    _bindings.nixlAgent = _waiting_agent
