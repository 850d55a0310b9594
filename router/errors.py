"""Errors inside the router. What a client sees of a bad request is `indexer.errors.RequestError`."""

from __future__ import annotations


class TokenizerUnavailableError(Exception):
    """The token ids of a prompt cannot be known now, through no fault of the client: route it by load alone."""


class KubernetesError(Exception):
    """The API server could not be asked, or said something that cannot be used; or there is no cluster around."""


class TooLongForNowError(Exception):
    """A text would hold up the event loop for too long: it is to be tokenized in a thread."""
