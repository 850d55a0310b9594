"""Tokenizing piece by piece gives what tokenizing whole gives, for all kinds of tokenizers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from indexer.hashing import PackedPrompt, pack_tokens
from router.errors import TooLongForNowError
from router.tokens.local_tokenizer import LocalTokenizer
from router.tokens.segment_cache import SegmentCache
from router.tokens.segments import Cutter, Encode, Ends, SegmentedEncoder, ends_of
from router.tokens.tokenizer_check import AWKWARD, difference, trial_texts

CORPUS = [*AWKWARD, "the worker holds the cache of the prefix", "What holds the cache? The worker does."] * 3
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]


def special(*contents: str) -> list[AddedToken]:
    return [AddedToken(content, special=True, normalized=False) for content in contents]


def byte_level(*, add_prefix_space: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    return train(tokenizer, trainers.BpeTrainer, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())


def train(tokenizer: Tokenizer, trainer: type, **options: object) -> Tokenizer:
    options = {"vocab_size": 700, "special_tokens": special(*SPECIAL), "show_progress": False} | options
    tokenizer.train_from_iterator(CORPUS, trainer(**options))
    return tokenizer


def split_and_byte_level() -> Tokenizer:
    """As Llama 3 and Qwen: their own expression, digits by threes, no merges for known words; <s> before a text."""
    expression = (
        r"(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(expression), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    train(tokenizer, trainers.BpeTrainer, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def metaspace(scheme: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="</s>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=scheme == "always")
    train(tokenizer, trainers.BpeTrainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return tokenizer


def prepending() -> Tokenizer:
    """As Llama 2: spaces are letters, one is put before every text."""
    tokenizer = Tokenizer(models.BPE(unk_token="</s>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return train(tokenizer, trainers.BpeTrainer)


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " "), normalizers.Lowercase()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    return train(tokenizer, trainers.UnigramTrainer, unk_token="</s>")


def word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="</s>"))
    tokenizer.normalizer = normalizers.BertNormalizer(strip_accents=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    train(tokenizer, trainers.WordPieceTrainer)
    tokenizer.post_processor = processors.BertProcessing(("</s>", 1), ("<s>", 0))
    return tokenizer


def greedy_tokens() -> Tokenizer:
    """Added tokens that take their surroundings with them, contain each other, or are looked for later."""
    tokenizer = byte_level()
    tokenizer.add_special_tokens(
        [
            AddedToken("<mask>", lstrip=True, normalized=False),
            AddedToken("<right>", rstrip=True, normalized=False),
            AddedToken("<|im_end|>\n", normalized=False),
            AddedToken("x<|im_", normalized=False),
            AddedToken("<|late|>", normalized=True),
            AddedToken("[INST]", normalized=False),
        ]
    )
    tokenizer.add_tokens(
        [
            AddedToken("word", single_word=True, normalized=False),
            AddedToken("\n\n", normalized=False),
            AddedToken("\n\n\n", normalized=False),
            AddedToken("_after", normalized=False),
            AddedToken("after ", normalized=True, lstrip=True),
        ]
    )
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte level": byte_level,
    "byte level, a space before": lambda: byte_level(add_prefix_space=True),
    "split and byte level": split_and_byte_level,
    "metaspace first": lambda: metaspace("first"),
    "metaspace always": lambda: metaspace("always"),
    "metaspace never": lambda: metaspace("never"),
    "prepending": prepending,
    "unigram": unigram,
    "word piece": word_piece,
    "greedy tokens": greedy_tokens,
}


@cache
def local(kind: str) -> LocalTokenizer:
    return LocalTokenizer(PreTrainedTokenizerFast(tokenizer_object=KINDS[kind]()))


def whole(tokenizer: LocalTokenizer, texts: list[str], add_special_tokens: bool) -> list[PackedPrompt]:
    encodings = tokenizer.backend.encode_batch(texts, add_special_tokens=add_special_tokens)
    return [PackedPrompt.of(encoding.ids) for encoding in encodings]


FRAGMENTS = st.sampled_from(
    [*SPECIAL, "<mask>", "<right>", "[INST]", "<|late|>", "word", "_after", "after ", "x<|im_", "\n", " ", "  "]
)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60)
@given(parts=st.lists(FRAGMENTS | st.sampled_from(AWKWARD) | st.text(max_size=8), max_size=8), add=st.booleans())
def test_pieces_give_what_the_whole_gives(kind: str, parts: list[str], add: bool) -> None:
    tokenizer = local(kind)
    assert tokenizer.by_pieces
    texts = ["".join(parts), "".join(reversed(parts))]
    expected = whole(tokenizer, texts, add)
    assert tokenizer.encode(texts, add_special_tokens=add) == expected
    assert tokenizer.encode(texts, add_special_tokens=add) == expected  # now from the cache


def test_tiktoken_does_what_it_can() -> None:
    assert [kind for kind in KINDS if local(kind).fast] == ["byte level", "split and byte level"]


def test_a_tokenizer_whose_special_tokens_do_not_separate_is_used_whole(capsys: pytest.CaptureFixture[str]) -> None:
    loaded = PreTrainedTokenizerFast(tokenizer_object=byte_level())
    loaded.backend_tokenizer.encode_special_tokens = True  # they are text like any other
    tokenizer = LocalTokenizer(loaded)
    assert not tokenizer.by_pieces
    assert "tokenized whole" in capsys.readouterr().out
    texts = list(trial_texts(SPECIAL))
    assert tokenizer.encode(texts, add_special_tokens=True) == whole(tokenizer, texts, True)
    with pytest.raises(TooLongForNowError):
        tokenizer.encode(["three"], add_special_tokens=True, at_most=4)


@pytest.mark.derives
@pytest.mark.parametrize("kind", KINDS)
def test_the_trial_finds_cuts_that_do_not_separate(kind: str) -> None:
    tokenizer = local(kind)

    class Anywhere(Cutter):
        def cut(self, text: str, start: int = 0) -> list[str]:
            assert start == 0
            return [text[start : start + 3] for start in range(0, len(text) or 1, 3)]

    def encode(texts: list[str], *, add_special_tokens: bool) -> list[PackedPrompt]:
        return whole(tokenizer, texts, add_special_tokens)

    ends = ends_of(tokenizer.backend)
    cutter = Anywhere(tokenizer.backend)
    anywhere = SegmentedEncoder(bare(tokenizer), cutter, ends, cache_bytes=2**20)
    assert difference(encode, anywhere.encode, list(trial_texts(SPECIAL))) is not None
    # Nor may it overlook what is put around every text.
    endless = SegmentedEncoder(bare(tokenizer), Cutter(tokenizer.backend), Ends([7], []), cache_bytes=2**20)
    assert difference(encode, endless.encode, list(trial_texts(SPECIAL))) is not None


def bare(tokenizer: LocalTokenizer) -> Encode:
    return lambda texts: [prompt.tokens for prompt in whole(tokenizer, texts, False)]


def test_a_tokenizer_without_special_tokens() -> None:
    backend = train(Tokenizer(models.BPE()), trainers.BpeTrainer, special_tokens=[])
    assert Cutter(backend).boundaries == []
    assert Cutter(backend).cut("a<s>b") == ["a<s>b"]


def test_texts_are_cut_before_special_tokens_alone() -> None:
    cutter = Cutter(greedy_tokens())
    assert cutter.boundaries == [*SPECIAL, "<|im_end|>\n", "[INST]"]
    assert cutter.cut("") == [""]
    assert cutter.cut("a</s><s>b<s>") == ["a", "</s>", "<s>b", "<s>"]
    assert cutter.cut("<s>a <mask> b word \n\n\n<right>  c<|late|>d") == [
        "<s>a <mask> b word \n\n\n<right>  c<|late|>d"
    ]
    # The longest of those that begin at one place, and the first of those that overlap.
    assert cutter.cut("a<|im_end|>\n<|im_end|>b") == ["a", "<|im_end|>\n", "<|im_end|>b"]
    assert cutter.cut("x<|im_start|>x<s>") == ["x<|im_start|>x", "<s>"]


@settings(max_examples=200)
@given(
    parts=st.lists(st.sampled_from(["<", "<|", "<s>", "</s>", "<|im_end|>", "<x>", " a ", "b" * 50]), max_size=300),
    kind=st.sampled_from(["byte level", "greedy tokens"]),
)
def test_pieces_begin_where_the_special_tokens_are(parts: list[str], kind: str) -> None:
    """Whether they all begin with one character, or not, and however often that is there without one."""
    text = "".join(parts)
    cutter = Cutter(local(kind).backend)
    pieces = cutter.cut(text)
    assert "".join(pieces) == text
    found = [cutter.special_token(piece) for piece in pieces[1:]]
    assert all(found)
    if kind == "byte level":
        assert sum(text.count(token) for token in SPECIAL) == len(found) + bool(cutter.special_token(pieces[0]))


def test_thousands_of_added_tokens_make_no_long_search() -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens([*special(*(f"<unused{number}>" for number in range(5000)))])
    assert Cutter(tokenizer).cut("a<unused12>b<unused1234>c<unused12345>") == [
        "a",
        "<unused12>b",
        "<unused1234>c<unused12345>",
    ]


class Counting:
    """A tokenizer that remembers what it was asked."""

    def __init__(self) -> None:
        self.backend = byte_level()
        self.asked: list[str] = []

    def __call__(self, texts: list[str]) -> list[bytes]:
        self.asked += texts
        return [pack_tokens(encoding.ids) for encoding in self.backend.encode_batch(texts, add_special_tokens=False)]

    def encoder(self, ascii_speed: int = 1) -> SegmentedEncoder:
        return SegmentedEncoder(self, Cutter(self.backend), ends_of(self.backend), 20_000, ascii_speed)


def test_only_what_is_new_is_tokenized() -> None:
    counting = Counting()
    encoder = counting.encoder()
    first = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    second = first + "hello<|im_end|>\n<|im_start|>user\nbye<|im_end|>\n<|im_start|>assistant\n"
    encoder.encode([first], add_special_tokens=False)
    assert counting.asked == ["<|im_start|>user\nhi", "<|im_end|>\n", "<|im_start|>assistant\n"]
    counting.asked.clear()
    (found,) = encoder.encode([second], add_special_tokens=False)
    assert counting.asked == ["<|im_start|>assistant\nhello", "<|im_start|>user\nbye"]
    assert list(found) == counting.backend.encode(second, add_special_tokens=False).ids


def test_nothing_is_tokenized_when_too_much_is_new() -> None:
    counting = Counting()
    encoder = counting.encoder()
    encoder.encode(["<s>" + "known " * 100], add_special_tokens=False)
    counting.asked.clear()
    with pytest.raises(TooLongForNowError):
        encoder.encode(["<s>" + "known " * 100 + "<s>12345678"], add_special_tokens=False, at_most=10)
    assert counting.asked == []
    encoder.encode(["<s>" + "known " * 100 + "<s>1234567"], add_special_tokens=False, at_most=10)
    assert counting.asked == ["<s>1234567"]


def test_more_of_what_is_faster_is_not_too_much() -> None:
    encoder = Counting().encoder(ascii_speed=4)
    encoder.encode(["a" * 43, "b" * 40], add_special_tokens=False, at_most=20)
    for text in ("c" * 84, "é" * 21):
        with pytest.raises(TooLongForNowError):
            encoder.encode([text], add_special_tokens=False, at_most=20)


@pytest.mark.parametrize("content", ["abc", "é漢👍"])
def test_the_cache_keeps_to_its_bytes_and_forgets_what_was_used_longest_ago(content: str) -> None:
    cache = SegmentCache(10_000)
    texts = [f"{number} {content * 10}" for number in range(100)]
    for text in texts:
        cache.put({text: bytes(range(40))})
        assert cache.bytes <= 10_000
        assert cache.get([texts[0]]) == ({texts[0]: bytes(range(40))}, [])
    assert 5 < len(cache) < 50
    known, missing = cache.get([*texts, "other", "other"])
    assert list(known) == [texts[0], *texts[-len(cache) + 1 :]]
    assert missing == [*texts[1 : -len(cache) + 1], "other"]
    cache.put({"x" * 10_000: b""})  # more than all of it
    assert cache.get(texts)[0] == known


def test_a_text_remembered_twice_counts_once() -> None:
    cache = SegmentCache(10_000)
    cache.put({"a": b"1234"})
    before = cache.bytes
    cache.put({"a": b"1234"})
    assert cache.bytes == before
