"""Errors inside the router. What a client sees of a bad request is `indexer.errors.RequestError`."""

from __future__ import annotations

from indexer.errors import RequestError, error_body

__all__ = ["RequestError", "TokenizerUnavailableError", "error_body"]


class TokenizerUnavailableError(Exception):
    """The token ids of a prompt cannot be known now, through no fault of the client: route it by load alone."""
