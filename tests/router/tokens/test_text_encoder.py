"""tokenizer.json by fastokens, where it does the same as tokenizers on trial, and by tokenizers otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fastokens
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from indexer.hashing import pack_tokens
from router.tokens import TokenizerUnavailableError, text_encoder
from router.tokens.text_encoder import TextEncoder

SPECIAL = ("<s>", "<|end|>")
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def trained(normalizer: Any = None, begin: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the worker holds the cache of the prefix, it's 1234 tokens\n\n"] * 3, trainer)
    if begin:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the results of these trials away from the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture(scope="module", params=[None, normalizers.NFC()], ids=["plain", "nfc"])
def reference(request: pytest.FixtureRequest) -> Tokenizer:
    return trained(request.param, begin=True)


@pytest.fixture(scope="module")
def encoder(reference: Tokenizer) -> TextEncoder:
    return TextEncoder(reference.to_str(), 2**20)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    texts=st.lists(
        st.text() | st.text("<|>send \n12'") | st.sampled_from([*SPECIAL, "a<|end|>b"]), min_size=1, max_size=4
    ),
    add=st.booleans(),
)
def test_token_ids_equal_those_of_tokenizers(
    encoder: TextEncoder, reference: Tokenizer, texts: list[str], add: bool
) -> None:
    assert encoder.fast
    expected = [pack_tokens(each.ids) for each in reference.encode_batch(texts, add_special_tokens=add)]
    for _ in range(2):  # new, and seen before
        assert encoder.encode(texts, add_special_tokens=add) == expected


def test_cache_of_words_is_bounded(reference: Tokenizer) -> None:
    encoder = TextEncoder(reference.to_str(), 20_000)
    assert encoder.cached_bytes == 0  # what was tried is forgotten
    for number in range(300):
        encoder.encode([f"<s>the worker {number} holds the prefix<|end|>" * 20])
    assert 0 < encoder.cached_bytes <= 20_000


@pytest.mark.parametrize("padded", [True, False])
def test_padding_and_truncation_of_the_file_are_ignored(padded: bool) -> None:
    tokenizer, text = trained(), "the worker holds the cache " * 20
    expected = [pack_tokens(tokenizer.encode(text).ids)]
    tokenizer.enable_truncation(4)
    if padded:
        tokenizer.enable_padding(length=500)
    assert TextEncoder(tokenizer.to_str()).encode([text]) == expected


class _Differs:
    """A tokenizer of fastokens that does one text otherwise."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode_batch_flat(self, texts: list[str], add: bool = False) -> Any:
        return self._tokenizer.encode_batch_flat([text.replace("ﬁ", "fi") for text in texts], add)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


@pytest.mark.derives
@pytest.mark.parametrize("problem", ["it differs", "it cannot read it", "it fails"])
def test_encoder_that_fails_the_trial_is_not_used(monkeypatch: pytest.MonkeyPatch, problem: str) -> None:
    tokenizer = trained()

    def made(source: str, _: int) -> Any:
        fast = fastokens.Tokenizer.from_json_str(source)
        return {"it differs": _Differs(fast), "it cannot read it": None, "it fails": object()}[problem]

    monkeypatch.setattr(text_encoder, "_fast_one", made)
    monkeypatch.setattr(text_encoder, "_trials", {})
    encoder = TextEncoder(tokenizer.to_str())
    assert not encoder.fast
    assert encoder.cached_bytes == 0
    assert encoder.encode(["ﬁne <|end|>"]) == [pack_tokens(tokenizer.encode("ﬁne <|end|>").ids)]


def test_each_file_has_one_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    source, tried = trained().to_str(), list[str]()
    monkeypatch.setattr(text_encoder, "_trials", {})
    monkeypatch.setattr(text_encoder, "trial_texts", lambda _: tried.append("once") or ["a text"])
    assert [TextEncoder(source).fast for _ in range(3)] == [True] * 3
    assert tried == ["once"]


def test_kind_unknown_to_fastokens_uses_tokenizers() -> None:
    tokenizer = Tokenizer(models.WordLevel({"the": 0, "cache": 1, "[UNK]": 2}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    encoder = TextEncoder(tokenizer.to_str())
    assert encoder.encode(["the cache holds"]) == [pack_tokens([0, 1, 2])]
    assert encoder.vocab_size == 3


@pytest.mark.parametrize("text", ["", "{}", json.dumps({"model": {"type": "Magic"}}), "not json"])
def test_error_names_an_unreadable_file(text: str) -> None:
    with pytest.raises(TokenizerUnavailableError, match=r"tokenizer\.json cannot be read"):
        TextEncoder(text)


@pytest.mark.derives
def test_later_processes_use_the_stored_result_of_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    source, tried = trained().to_str(), list[str]()
    difference = TextEncoder._difference
    monkeypatch.setattr(TextEncoder, "_difference", lambda *known: tried.append("once") or difference(*known))
    for _ in range(2):
        monkeypatch.setattr(text_encoder, "_trials", {})  # as a new process has it
        assert TextEncoder(source).fast
    assert tried == ["once"]
    monkeypatch.setattr(text_encoder, "_trials", {})
    monkeypatch.setattr(text_encoder, "version", lambda name: f"{name} after an upgrade")
    assert TextEncoder(source).fast
    assert tried == ["once", "once"]
