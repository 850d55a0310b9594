"""Errors of workers that another worker may not have."""

from __future__ import annotations

from typing import Final

_NOT_FOUND: Final = 404
_INVALID: Final = 400
# SGLang refuses an adapter that it does not have as an invalid request.
_SGLANG_ADAPTER: Final = b"LoRA adapter"
_SGLANG_NOT_LOADED: Final = (b"not loaded", b"never been loaded")


def is_model_missing(status: int, body: bytes) -> bool:
    """Return whether a worker's answer to a request for inference says that it lacks the model or adapter.

    - `body`: the received beginning of the answer's body.
    """
    if status == _NOT_FOUND:
        return True
    return status == _INVALID and _SGLANG_ADAPTER in body and any(words in body for words in _SGLANG_NOT_LOADED)
