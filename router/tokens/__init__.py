"""From prompts to token ids: tokenizers, chat templates, and their caches."""

from __future__ import annotations


class TokenizerUnavailableError(Exception):
    """The router cannot tokenize a prompt now, so the prompt is routed by load."""


class OnTrialError(TokenizerUnavailableError):
    """The local tokenizer is not yet compared with an engine, and no engine returns the tokens of a prompt."""


class TooLongForNowError(Exception):
    """A text is too long to tokenize on the event loop, so a thread tokenizes it."""
