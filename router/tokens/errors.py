"""Errors of tokenizers that routing answers by routing without tokens, or in a thread."""

from __future__ import annotations


class TokenizerUnavailableError(Exception):
    """The router has no tokenizer for a prompt now, so the prompt is routed by load alone."""


class TooLongForNowError(Exception):
    """A text is too long to tokenize on the event loop, so a thread tokenizes it."""
