"""Tokens of texts that begin as known ones: those of the whole text, whatever was seen before."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from indexer.hashing import PackedPrompt, pack_tokens
from router.tokens.segments import Cutter, SegmentedEncoder, ends_of
from router.tokens.token_cache import MIN_CHARACTERS

SPECIAL = ["<s>", "<|im_start|>", "<|im_end|>", "<|im_end|>\n", "<mask>", "<s><s><s>!"]
# Beyond the first places at which texts are remembered.
OPENING = "<|im_start|>system\n" + "the worker holds the cache of the prefix. " * (MIN_CHARACTERS // 40)


@cache
def backend() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([OPENING], trainer)
    return tokenizer


class Asked:
    """The tokenizer, and the pieces it was asked for."""

    def __init__(self, cache_bytes: int = 2**20) -> None:
        self.pieces: list[str] = []
        self.encoder = SegmentedEncoder(self._ids, Cutter(backend()), ends_of(backend()), cache_bytes)

    def _ids(self, texts: list[str]) -> list[bytes]:
        self.pieces += texts
        return [pack_tokens(encoding.ids) for encoding in backend().encode_batch(texts, add_special_tokens=False)]

    def prompt(self, text: str) -> PackedPrompt:
        (prompt,) = self.encoder.encode([text], add_special_tokens=False)
        return prompt


def whole(text: str) -> PackedPrompt:
    return PackedPrompt.of(backend().encode(text, add_special_tokens=False).ids)


def equal_in_all(found: PackedPrompt, expected: PackedPrompt) -> bool:
    """Tokens, and hashes in two namespaces, which are asked for so that the next prompt can go on from them."""
    hashes = [
        (prompt.hashes(seed, size, len(prompt) // size))[: len(prompt) // size]
        for seed, size in ((7, 4), (8, 16))
        for prompt in (found, expected)
    ]
    return found == expected and hashes[0] == hashes[1] and hashes[2] == hashes[3]


FRAGMENTS = st.sampled_from([*SPECIAL, "<|im_", "start|>", "<s", "><s>", "!", "\n", "word", "é漢👍", " ", "x" * 600])


@settings(max_examples=150)
@given(turns=st.lists(st.tuples(st.integers(0, 9), st.lists(FRAGMENTS, max_size=5)), min_size=2, max_size=7))
def test_what_begins_alike_is_tokenized_as_a_whole(turns: list[tuple[int, list[str]]]) -> None:
    """Each text goes on from anywhere in the one before, also from within a special token."""
    asked, text = Asked(), OPENING
    for cut, more in turns:
        text = text[: len(text) - cut] + "".join(more)
        assert equal_in_all(asked.prompt(text), whole(text))


def test_only_what_is_new_is_tokenized_and_hashed() -> None:
    asked = Asked()
    first = OPENING + "<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    known = asked.prompt(first)
    made = known.hashes(7, 4, len(known) // 4)
    asked.pieces.clear()
    longer = asked.prompt(first + "hello<|im_end|>\n<|im_start|>user\nbye")
    assert asked.pieces == ["<|im_start|>assistant\nhello", "<|im_start|>user\nbye"]
    common = len(backend().encode(first, add_special_tokens=False).ids) - len("assistant\n")
    assert len(made) - len("assistant\n") <= len(longer.hashes(7, 4)) <= common // 4 + 1
    assert asked.prompt(first + "hello<|im_end|>\n<|im_start|>user\nbye") is longer


@pytest.mark.parametrize("ending", ["<|im_end|>", "<|im_end|>\nx", "<s><s>", "<|im_start|>"])
def test_a_cut_that_depends_on_what_follows_is_made_anew(ending: str) -> None:
    """Special tokens that are longer when the text goes on."""
    for more in ("\n", "<s>!", "!", "user"):
        asked = Asked()
        asked.prompt(OPENING + ending)
        assert asked.prompt(OPENING + ending + more) == whole(OPENING + ending + more)


def test_two_continuations_of_one_conversation() -> None:
    asked = Asked()
    texts = [OPENING + "<|im_end|>\n"] * 2
    for turn in range(5):
        for number in range(2):
            texts[number] += f"<|im_start|>user\n{number} {turn} {'word ' * 50}<|im_end|>\n"
            assert equal_in_all(asked.prompt(texts[number]), whole(texts[number]))


def test_what_is_kept_keeps_to_its_bytes() -> None:
    limit = 200_000
    asked = Asked(limit)
    for number in range(60):
        text = OPENING + f"<|im_end|>\n<|im_start|>{number} {'word ' * 200}"
        prompt = asked.prompt(text)
        prompt.hashes(7, 1, len(prompt))
        assert asked.encoder.cached_bytes <= limit
        assert asked.prompt(text) is prompt
    assert asked.encoder.cached_bytes > limit // 4
    nothing = Asked(0)
    assert nothing.prompt(OPENING) == nothing.prompt(OPENING) == whole(OPENING)
    assert nothing.encoder.cached_bytes == 0


def test_a_conversation_that_grows_is_kept_once() -> None:
    asked, text = Asked(), OPENING
    for turn in range(40):
        text += f"<|im_start|>user {turn}<|im_end|>\n<|im_start|>assistant\n"
        asked.prompt(text)
    assert asked.encoder.cached_bytes < 20 * len(text)


def test_ends_are_put_around_what_is_known() -> None:
    encoder = SegmentedEncoder(Asked()._ids, Cutter(backend()), ends_of(backend())._replace(before=[5]), 2**20)
    for text in (OPENING, OPENING + "<s>more", OPENING):
        (bare,) = encoder.encode([text], add_special_tokens=False)
        (ended,) = encoder.encode([text], add_special_tokens=True)
        assert (bare, list(ended)) == (whole(text), [5, *whole(text)])


def test_many_threads_may_go_on_from_one_conversation() -> None:
    asked = Asked()

    def right(number: int) -> bool:
        text = OPENING + "<|im_end|>\n" + "<s>".join(f" {turn} " * 20 for turn in range(number % 9)) + f"<s>{number}"
        return equal_in_all(asked.prompt(text), whole(text))

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(right, range(200)))
