"""The doctor's prompts as the router would tokenize them, and as the engine did."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from http_api.errors import RequestError
from kvevents import BlockStored
from router.apis.requests import ChatPrompt, TextPrompts
from router.tokens.tokenizers import Tokenizers, TokenizerUnavailableError

# Random texts may begin alike: what the engine knows may share some tokens more than the one a prompt is held against.
_BY_CHANCE = 4


@dataclass(frozen=True, slots=True)
class NewPrompt:
    """The token ids of a prompt that nobody sent before, but for the first `shared`, which others like it may have."""

    token_ids: list[int]
    shared: int


async def new_prompt(
    tokenizers: Tokenizers, model: str, prompt: TextPrompts | ChatPrompt, another: TextPrompts | ChatPrompt
) -> NewPrompt | None:
    """A prompt beside another as new; None where the router has no tokenizer or chat template for the model."""
    try:
        token_ids, others = [list((await tokenizers.token_ids(model, each))[0]) for each in (prompt, another)]
    except (TokenizerUnavailableError, RequestError):
        return None
    return NewPrompt(token_ids, _equal(token_ids, others) + _BY_CHANCE)


def stored(prompt: NewPrompt, events: Iterable[BlockStored]) -> BlockStored | None:
    """The event that stores the first blocks of a prompt, after those that may have been cached before."""
    return next((event for event in events if _stores(event, prompt)), None)


def _stores(event: BlockStored, prompt: NewPrompt) -> bool:
    """Whether an event stores blocks from one of the shared tokens on, and a new one among them."""
    size, stored_ids = event.block_size, event.token_ids
    if size <= 0:
        return False
    for start in (0,) if event.parent_block_hash is None else range(size, prompt.shared + 1, size):
        expected = prompt.token_ids[start : start + len(stored_ids)]
        is_new = len(expected) >= size and start + len(expected) > prompt.shared
        if is_new and stored_ids[: len(expected)] == expected:
            return True
    return False


def difference(expected: Sequence[int], events: Iterable[BlockStored]) -> str:
    """Where the sequence that an engine began last parts from what was expected."""
    roots = [event for event in events if event.parent_block_hash is None and event.token_ids]
    found = roots[-1].token_ids if roots else []
    at = _equal(expected, found)
    if at == min(len(expected), len(found)):
        return "the engine's events begin no sequence with it"
    return f"token {at} is {expected[at]} here and {found[at]} in the engine's events"


def _equal(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two sequences begin with alike."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
