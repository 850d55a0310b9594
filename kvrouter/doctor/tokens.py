"""The doctor's prompts as the router would tokenize them, and as the engine did."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from indexer.errors import RequestError
from kvevents import BlockStored
from router.apis.requests import ChatPrompt, TextPrompts
from router.tokens.tokenizers import Tokenizers, TokenizerUnavailableError


async def text_tokens(tokenizers: Tokenizers, model: str, text: str) -> list[int] | None:
    """A text's token ids; None where the router has no tokenizer for the model."""
    try:
        return list((await tokenizers.token_ids(model, TextPrompts([text])))[0])
    except (TokenizerUnavailableError, RequestError):
        return None


async def chat_tokens(tokenizers: Tokenizers, model: str, messages: list[dict[str, Any]]) -> list[int] | None:
    """A conversation's token ids; None where the router has no chat template for the model."""
    try:
        return list((await tokenizers.token_ids(model, ChatPrompt(messages)))[0])
    except (TokenizerUnavailableError, RequestError):
        return None


def stored_at_root(token_ids: Sequence[int], events: Iterable[BlockStored]) -> BlockStored | None:
    """The event that stores the first blocks of a prompt."""
    for event in events:
        if event.token_ids and event.parent_block_hash is None:
            shared = min(len(event.token_ids), len(token_ids))
            if (
                event.block_size <= shared
                and list(token_ids[: event.block_size]) == event.token_ids[: event.block_size]
            ):
                return event
    return None


def difference(expected: Sequence[int], events: Iterable[BlockStored]) -> str:
    """Where the sequence that an engine began last parts from what was expected."""
    roots = [event for event in events if event.parent_block_hash is None and event.token_ids]
    found = roots[-1].token_ids if roots else []
    at = next((at for at, (ours, theirs) in enumerate(zip(expected, found, strict=False)) if ours != theirs), None)
    if at is None:
        return "the engine's events begin no sequence with it"
    return f"token {at} is {expected[at]} here and {found[at]} in the engine's events"
