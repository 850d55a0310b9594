"""tiktoken in the place of a model's tokenizer: for those it is the same as, and no others."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

import worker.simulated
from indexer.hashing import pack_tokens
from router.tokens.fast_bpe import CHARACTERS, FastPieces, UnfitError, grouped, trial_characters
from router.tokens.segments import Cutter

BUNDLED = Path(worker.simulated.__file__).parent / "model" / "tokenizer.json"
# The letters that stand for bytes; their ids are their places here.
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


@cache
def bundled() -> Tokenizer:
    return Tokenizer.from_file(str(BUNDLED))


def byte_level(merges: list[tuple[str, str]], ids: dict[str, int] | None = None, **options: Any) -> Tokenizer:
    """A tokenizer of these merges, whose tokens are numbered in their order unless `ids` says otherwise."""
    tokens = dict.fromkeys([*BYTES, *(left + right for left, right in merges)])
    vocabulary = {token: number for number, token in enumerate(tokens)} | (ids or {})
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, **options))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


class Slowly:
    """The tokenizer itself, and which texts it was asked for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.asked: list[str] = []

    def __call__(self, texts: list[str]) -> list[bytes]:
        self.asked += texts
        return [pack_tokens(self.tokenizer.encode(text, add_special_tokens=False).ids) for text in texts]


def fast(tokenizer: Tokenizer) -> tuple[FastPieces, Slowly]:
    slowly = Slowly(tokenizer)
    return FastPieces(tokenizer, Cutter(tokenizer), slowly), slowly


@cache
def bundled_fast() -> FastPieces:
    return fast(bundled())[0]


TOKENS = st.sampled_from(
    sorted(token for token in json.loads(BUNDLED.read_text())["model"]["vocab"] if "|" not in token)
)


@settings(max_examples=300)
@given(tokens=st.lists(TOKENS, max_size=12))
def test_tokens_in_any_order_are_merged_alike(tokens: list[str]) -> None:
    text = decoders.ByteLevel().decode(tokens)
    assert bundled_fast()([text]) == Slowly(bundled())([text])


def test_every_character_it_is_used_for_is_read_alike() -> None:
    pieces, slowly = fast(bundled())
    texts = list(trial_characters())
    assert len(texts) == len(CHARACTERS) > 600
    assert pieces(texts) == Slowly(bundled())(texts)
    assert slowly.asked == []
    nfc = normalizers.NFC()
    assert [character for character in CHARACTERS if nfc.normalize_str(character) != character] == []


@pytest.mark.parametrize("text", ["漢字", "e\u0301", "\u2003", "a \ud7ff", "👍"])
def test_other_characters_are_left_to_the_tokenizer(text: str) -> None:
    pieces, slowly = fast(bundled())
    assert pieces(["first", text, "<|im_end|>\n"]) == Slowly(bundled())(["first", text, "<|im_end|>\n"])
    assert slowly.asked == [text]


def test_added_tokens_with_a_will_of_their_own_are_left_to_the_tokenizer() -> None:
    tokenizer = Tokenizer.from_str(bundled().to_str())
    tokenizer.add_tokens([AddedToken("<wide>", lstrip=True, normalized=False), AddedToken("<late>", normalized=True)])
    pieces, slowly = fast(tokenizer)
    texts = ["<|im_start|>user", "<|im_start|>a <wide>", "a<late>b", "<wide>"]
    assert pieces(texts) == Slowly(tokenizer)(texts)
    assert slowly.asked == texts[1:]


@pytest.mark.parametrize(
    ("tokenizer", "reason"),
    [
        # "bc" is merged first, and then nothing makes "abc" of "a" and "bc". tiktoken would know "abc".
        (byte_level([("b", "c"), ("a", "b"), ("ab", "c")]), "'abc' is not what its own text becomes"),
        (byte_level([("b", "c"), ("a", "b"), ("ab", "c")], ignore_merges=True), "'abc' is not what"),
        (byte_level([("a", "b"), ("c", "d")], {"ab": 257, "cd": 256}), "in another order"),
        (byte_level([("ab", "c"), ("a", "b")]), "in another order"),
        (Tokenizer(models.WordPiece({"a": 0}, unk_token="a")), "not a plain BPE"),
        (byte_level([], dropout=0.1), "not a plain BPE"),
        (byte_level([], byte_fallback=True), "not a plain BPE"),
    ],
)
def test_whose_ids_would_differ_is_refused(tokenizer: Tokenizer, reason: str) -> None:
    with pytest.raises(UnfitError, match=reason):
        fast(tokenizer)


@st.composite
def merges(draw: st.DrawFn) -> list[tuple[str, str]]:
    """Merges of a few letters, of bytes and what was merged before, in any order of usefulness."""
    made, found = ["a", "b", "c"], dict[tuple[str, str], None]()
    for _ in range(draw(st.integers(1, 9))):
        pair = (draw(st.sampled_from(made)), draw(st.sampled_from(made)))
        found[pair] = None
        made.append("".join(pair))
    return sorted(found, key=lambda pair: made.index("".join(pair)))


@settings(max_examples=300)
@given(merges=merges(), ignore=st.booleans(), texts=st.lists(st.text("abc", max_size=24), min_size=8, max_size=8))
def test_whoever_is_not_refused_is_read_alike(merges: list[tuple[str, str]], ignore: bool, texts: list[str]) -> None:
    tokenizer = byte_level(merges, ignore_merges=ignore)
    try:
        pieces, slowly = fast(tokenizer)
    except UnfitError:
        return
    texts += ["".join(pair) for pair in merges]
    assert pieces(texts) == Slowly(tokenizer)(texts)
    assert slowly.asked == []


def test_who_changes_texts_is_refused() -> None:
    lowers = byte_level([])
    lowers.normalizer = normalizers.Lowercase()
    spaced = byte_level([])
    spaced.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    digits = byte_level([])
    digits.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(False)])
    bare = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for tokenizer, reason in ((lowers, "normalizes"), (spaced, "words"), (digits, "words"), (bare, "lacks bytes")):
        with pytest.raises(UnfitError, match=reason):
            fast(tokenizer)


@pytest.mark.parametrize("ignore_merges", [False, True])
def test_a_token_may_be_made_in_several_ways(ignore_merges: bool) -> None:
    """As in vocabularies that come from tiktoken: every way to make a token is a merge."""
    merges = [("b", "c"), ("a", "b"), ("a", "bc"), ("ab", "c"), ("a", "a"), ("aa", "a"), ("a", "aa")]
    tokenizer = byte_level(merges, ignore_merges=ignore_merges)
    pieces, slowly = fast(tokenizer)
    texts = ["abc", "abcabc", "aabc", "aaaaaaa", "bcabcaab", "aab", "aaa"]
    assert pieces(texts) == Slowly(tokenizer)(texts)
    assert slowly.asked == []


@pytest.mark.parametrize("text", [" " * 300_000 + "x", "a" * 100_000, "\n" * 100_000, "ab1" * 50_000])
def test_long_words_are_no_trouble(text: str) -> None:
    pieces, slowly = fast(bundled())
    assert pieces([text]) == Slowly(bundled())([text])
    assert slowly.asked == []


def test_it_may_be_used_by_other_threads_than_its_first() -> None:
    pieces, slowly = fast(bundled())
    pieces.renew()
    pieces.claim()
    texts = ["<|im_start|>user\n it's  12 ?!\n\n", "\0kvrouter\0", "a\0kvrouter\0 b\0", *trial_characters()]
    with ThreadPoolExecutor(2) as threads:
        found = [pieces(texts), *threads.map(pieces, [texts] * 4)]
    assert found == [Slowly(bundled())(texts)] * 5
    assert slowly.asked == []


# As models have them.
GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


@pytest.mark.parametrize(
    ("words", "as_one", "others"),
    [
        (LLAMA, LLAMA.removesuffix(r"|\s+(?!\S)|\s+"), r"|\s+(?!\S)|\s+"),
        (r"a|b(?=c|d)|e", "a", r"|b(?=c|d)|e"),
        (r"\||[|(]|(?:b|[)])|[]|]|[^]|]|c(?<!d)", r"\||[|(]|(?:b|[)])|[]|]|[^]|]", "|c(?<!d)"),
    ],
)
def test_alternatives_that_look_at_nothing_around_them_are_one(words: str, as_one: str, others: str) -> None:
    assert grouped(words) == f"(?:{as_one}){others}"


@pytest.mark.parametrize(
    "words",
    [
        r"a|b",  # nothing looks around
        r"a(?!b)|c",  # the first does
        r"(?i)a|b|c(?!d)",  # what comes later is read in another way
        r"[a&&[b|c]]|d|e(?!f)",  # where a set ends takes more to tell
    ],
)
def test_other_expressions_stay_as_they_are(words: str) -> None:
    assert grouped(words) == words


@settings(max_examples=200)
@given(text=st.text(st.sampled_from("aB1 \n\r\t'.,sltvé"), max_size=40), words=st.sampled_from([LLAMA, GPT2]))
def test_a_group_splits_the_same_words(text: str, words: str) -> None:
    one, other = (_encoding(each) for each in (words, grouped(words)))
    assert one.encode_ordinary(text) == other.encode_ordinary(text)


@cache
def _encoding(words: str) -> tiktoken.Encoding:
    """Every word of two bytes is a token."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    pairs = {bytes(pair): 256 + place for place, pair in enumerate(product(range(128), repeat=2))}
    return tiktoken.Encoding("test", pat_str=words, mergeable_ranks=ranks | pairs, special_tokens={})
