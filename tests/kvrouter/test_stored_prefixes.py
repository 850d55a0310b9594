"""The prefixes that an engine stored since its start, which decide what counts as a ghost."""

from __future__ import annotations

from typing import Any, cast

import pytest

from kvevents import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventBatch
from kvrouter.tools.doctor.probes import NewPrompt, new_prompt
from kvrouter.tools.doctor.probes import stored as of_new_prompt
from kvrouter.tools.replay.expected_matches import StoredPrefixes
from router.apis.requests import ChatPrompt, TextPrompts
from router.tokens.tokenizers import Tokenizers

TOKENS = [1, 2, 3, 4, 5, 6]


@pytest.fixture
def stored() -> StoredPrefixes:
    return StoredPrefixes()


def apply(stored: StoredPrefixes, *events: Event) -> None:
    stored.apply(EventBatch(0.0, list(events)))


def block(names: list[Any], tokens: list[int], parent: Any = None, **fields: Any) -> BlockStored:
    return BlockStored(names, parent, tokens, 2, **fields)


def test_prefix_ends_at_first_unstored_block(stored: StoredPrefixes) -> None:
    assert stored.longest(TOKENS, None, None, 2) == 0
    apply(stored, block([1, 2], [1, 2, 3, 4]), block([3], [5, 6], 2), block([9], [9, 9], 1))
    assert stored.longest([*TOKENS, 7], None, None, 2) == 6
    assert stored.longest([1, 2, 9, 9, 5], None, None, 2) == 4
    assert stored.longest([3, 4], None, None, 2) == 0
    assert stored.longest([1], None, None, 2) == 0


def test_removed_blocks_count_as_stored(stored: StoredPrefixes) -> None:
    apply(stored, block([1, 2], [1, 2, 3, 4]), BlockRemoved([1, 2]))
    assert stored.longest(TOKENS, None, None, 2) == 4


def test_restart_forgets_stored_prefixes(stored: StoredPrefixes) -> None:
    apply(stored, block([1, 2], [1, 2, 3, 4]))
    stored.restart()
    assert stored.longest(TOKENS, None, None, 2) == 0
    apply(stored, block([2], [3, 4], 1))
    assert stored.longest(TOKENS, None, None, 2) == 0


def test_clear_forgets_stored_prefixes(stored: StoredPrefixes) -> None:
    apply(stored, block([1], [1, 2]), AllBlocksCleared("CPU"))
    assert stored.longest(TOKENS, None, None, 2) == 2
    apply(stored, AllBlocksCleared())
    assert stored.longest(TOKENS, None, None, 2) == 0


def test_adapters_and_salts_have_separate_prefixes(stored: StoredPrefixes) -> None:
    apply(stored, block([1], [1, 2], lora_name="a"), block([2], [3, 4], 1, lora_name="a", extra_keys=[["a"]]))
    apply(stored, block([3], [1, 2], cache_salt="s"), block([4], [1, 2], extra_keys=[["t"]]))
    found = {key: stored.longest(TOKENS, *key, 2) for key in [("a", None), (None, "s"), (None, "t"), (None, None)]}
    assert found == {("a", None): 4, (None, "s"): 2, (None, "t"): 2, (None, None): 0}


@pytest.mark.parametrize(
    "event",
    [
        block([1], [1, 2], kv_cache_spec_kind="sliding_window"),
        block([1], [1, 2], "nobody"),
        block([1, 2], [1, 2]),
        BlockStored([1], None, [], 0),
        block([1], [1, 2], extra_keys=[["x"], ["y"]]),
    ],
    ids=["window", "no parent", "too few tokens", "no tokens", "too many keys"],
)
def test_blocks_without_known_prefix_are_dropped(stored: StoredPrefixes, event: BlockStored) -> None:
    apply(stored, event)
    assert stored.longest(TOKENS, None, None, 2) == 0


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
    assert of_new_prompt(prompt, [event(0, [7] * 8), expected]) is expected


async def test_shared_tokens_do_not_identify_stored_prompt(prompt: NewPrompt) -> None:
    assert of_new_prompt(prompt, [event(0, PROMPT[: 2 * BLOCK])]) is None
    assert of_new_prompt(prompt, [event(BLOCK, [*PROMPT[BLOCK : 3 * BLOCK], 7, 7, 7, 7])]) is None
