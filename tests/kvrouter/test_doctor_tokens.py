"""The doctor's recognition of its own prompts in an engine's events."""

from __future__ import annotations

from typing import cast

import pytest

from kvevents import BlockStored
from kvrouter.tools.doctor.probes import NewPrompt, new_prompt, stored
from router.apis.requests import ChatPrompt, TextPrompts
from router.tokens.tokenizers import Tokenizers

BLOCK = 4
COMMON = list(range(BLOCK * 2 - 1))  # what all prompts begin with, but for one token of a block
PROMPT = [*COMMON, *range(100, 120)]


class _ByText:
    """Tokenizes the two texts there are."""

    async def token_ids(self, _model: str, prompt: TextPrompts | ChatPrompt) -> list[list[int]]:
        return [PROMPT if prompt == TextPrompts(["prompt"]) else [*COMMON, *range(200, 220)]]


@pytest.fixture
async def prompt() -> NewPrompt:
    prompt = await new_prompt(cast(Tokenizers, _ByText()), "m", TextPrompts(["prompt"]), TextPrompts(["another"]))
    assert prompt is not None
    return prompt


def event(start: int, token_ids: list[int]) -> BlockStored:
    return BlockStored(list(range(len(token_ids) // BLOCK)), 99 if start else None, token_ids, BLOCK)


@pytest.mark.parametrize("cached", [0, BLOCK, 2 * BLOCK])
async def test_prompt_is_found_from_last_cached_block_on(prompt: NewPrompt, cached: int) -> None:
    """An earlier prompt may share blocks with this one by chance."""
    expected = event(cached, PROMPT[cached : 6 * BLOCK])
    assert stored(prompt, [event(0, [7] * 8), expected]) is expected


async def test_shared_tokens_do_not_identify_stored_prompt(prompt: NewPrompt) -> None:
    assert stored(prompt, [event(0, PROMPT[: 2 * BLOCK])]) is None
    assert stored(prompt, [event(BLOCK, [*PROMPT[BLOCK : 3 * BLOCK], 7, 7, 7, 7])]) is None
