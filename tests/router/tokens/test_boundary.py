"""Conversations are tokenized from where they can be cut, and have the token ids of the whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from indexer.hashing import pack_tokens
from router.tokens.local_tokenizer import LocalTokenizer
from router.tokens.model_files import ModelFiles
from router.tokens.prompt_cache import Boundary, find_boundary, reference_token_places, token_places
from router.tokens.text_encoder import TextEncoder

pytestmark = pytest.mark.usefixtures("short_trials")

TEMPLATE = (
    "{% for message in messages %}<|turn|>{{ message.role }}\n{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
BEGINNING = "<|turn|>system\n" + "the worker holds the cache of the prefix, " * 30
PIECES = ("<|turn|>", "<|end|>", "\n", " ", "user\n", "the cache", "<|turn", "|>", "<", "▁", "é", "漢字", "  two ", "x")


def trained(*tokens: AddedToken, **parts: object) -> Tokenizer:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = BpeTrainer(
        vocab_size=320, initial_alphabet=pre_tokenizers.ByteLevel.alphabet() + list("▁<|>"), show_progress=False
    )
    tokenizer.train_from_iterator(["the worker holds the cache of the prefix"], trainer)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokenizer.add_special_tokens(list(tokens))
    return tokenizer


def special(text: str, **flags: bool) -> AddedToken:
    return AddedToken(text, special=True, normalized=False, **flags)


TOKENS = (special("<|turn|>"), special("<|end|>"))
KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte level": lambda: trained(*TOKENS),
    "a space before the first word": lambda: trained(*TOKENS, pre_tokenizer=pre_tokenizers.ByteLevel()),
    "a mark before the first piece": lambda: trained(
        *TOKENS, pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    ),
    "a mark before each piece": lambda: trained(
        *TOKENS, pre_tokenizer=None, normalizer=normalizers.Sequence([normalizers.Prepend("▁"), normalizers.NFKC()])
    ),
    "tokens that take the space after them": lambda: trained(
        *(special(token.content, rstrip=True) for token in TOKENS)
    ),
}


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return request.param()


@pytest.fixture(scope="module")
def local(tokenizer: Tokenizer) -> LocalTokenizer:
    local = LocalTokenizer(ModelFiles(tokenizer.to_str(), {"default": TEMPLATE}))
    assert local._prompts.boundary.text == "<|turn|>"
    return local


texts = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)


@settings(max_examples=60)
@given(turns=st.lists(st.tuples(st.integers(0, 40), texts), min_size=1, max_size=6))
def test_tokens_of_cached_turns_equal_tokens_of_whole_text(
    tokenizer: Tokenizer, local: LocalTokenizer, turns: list[tuple[int, str]]
) -> None:
    text = BEGINNING
    for dropped, more in turns:
        text = text[: max(len(BEGINNING), len(text) - dropped)] + more
        (found,) = local.encode([text], add_special_tokens=False)
        assert list(found) == tokenizer.encode(text, add_special_tokens=False).ids


class Noting:
    """An encoder that keeps the texts it encoded."""

    cached_bytes = 0

    def __init__(self, encoder: TextEncoder) -> None:
        self.vocab_size, self.special, self.exact = encoder.vocab_size, encoder.special, encoder.exact
        self.fast = encoder.fast
        self.asked: list[str] = []
        self._encoder = encoder

    def encode(self, texts: list[str], *, add_special_tokens: bool = False) -> list[bytes]:
        self.asked += texts
        return self._encoder.encode(texts, add_special_tokens=add_special_tokens)


def test_next_turn_is_tokenized_from_its_last_boundary(tokenizer: Tokenizer) -> None:
    encoder = Noting(TextEncoder(tokenizer.to_str()))
    local = LocalTokenizer(ModelFiles(tokenizer.to_str(), {"default": TEMPLATE}), text_encoder=encoder)
    first = BEGINNING + "<|end|>\n<|turn|>user\nfirst<|end|>\n<|turn|>assistant\n"
    local.encode([first], add_special_tokens=False)
    encoder.asked.clear()
    local.encode([first + "an answer<|end|>\n<|turn|>user\nsecond"], add_special_tokens=False)
    third = first + "an answer<|end|>\n<|turn|>user\nthird"
    (ids,) = local.encode([third], add_special_tokens=True)
    assert encoder.asked[0] == "<|turn|>assistant\nan answer<|end|>\n<|turn|>user\nsecond"
    adds_tokens = tokenizer.encode("Hi").ids != tokenizer.encode("Hi", add_special_tokens=False).ids
    assert encoder.asked[1].startswith("<|turn|>system" if adds_tokens else "<|turn|>user\nthird")
    assert list(ids) == tokenizer.encode(third).ids


@pytest.mark.parametrize(
    "tokens",
    [
        (special("<|turn|>", single_word=True), special("<|end|>")),
        (special("<|turn|>", lstrip=True), special("<|end|>")),
        (*TOKENS, special("x<|turn")),
        (*TOKENS, special("<|turn|>user")),
        (AddedToken("<|turn|>", normalized=True), special("<|end|>")),
        (),
    ],
    ids=["whole words", "takes the space before", "another ends in it", "another has it", "normalized", "no tokens"],
)
def test_text_is_not_cut_where_a_cut_may_change_tokens(tokens: tuple[AddedToken, ...]) -> None:
    tokenizer = trained(*tokens, normalizer=normalizers.Replace("X<", "<"))
    encoder = TextEncoder(tokenizer.to_str())
    conversation = "<|turn|>user\nHi<|turn|>assistant\nHi"
    boundary = find_boundary(encoder, conversation)
    assert boundary is None


def test_first_token_that_passes_the_trial_becomes_the_boundary() -> None:
    encoder = TextEncoder(trained(*TOKENS, special("x<|turn")).to_str())
    boundary = find_boundary(encoder, "<|turn|>user\nHi<|end|><|turn|>user\nHi<|end|>")
    assert boundary.text == "<|end|>"


def test_text_with_unexpected_or_too_many_boundaries_is_not_cut() -> None:
    boundary = find_boundary(TextEncoder(trained(*TOKENS).to_str()), "<|turn|>user\nHi<|turn|>")
    text, token = "<|turn|>user\nHi<|turn|>", boundary.token
    assert boundary.marks(text, pack_tokens([token, 256, 256, 256, token])) == [(0, 0), (15, 16)]
    assert boundary.marks(text, pack_tokens([token, 256, 256, 256])) == []
    boundary, count = Boundary("|", 7), 2**14
    assert len(boundary.marks("|" * count, pack_tokens([7] * count))) == count
    assert boundary.marks("|" * (count + 1), pack_tokens([7] * (count + 1))) == []


@pytest.mark.parametrize("places", [token_places, reference_token_places])
@given(tokens=st.lists(st.sampled_from([0, 1, 256, 2**16 + 2, 2**24 * 2]), max_size=20), data=st.data())
def test_positions_of_a_token_are_found(
    places: Callable[[bytes, int, int], list[int]], tokens: list[int], data: st.DataObject
) -> None:
    token, start = data.draw(st.sampled_from([1, 256, 2**16 + 2])), data.draw(st.integers(0, len(tokens)))
    expected = [4 * place for place in range(start, len(tokens)) if tokens[place] == token]
    assert places(pack_tokens(tokens), token, 4 * start) == expected
