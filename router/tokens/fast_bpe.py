"""Byte-level BPE by tiktoken: the ids of a model's own tokenizer, several times sooner, where they are the same.

Merges of `tokenizers` are pairs, in an order; tiktoken merges any two neighbours that make a known token, the smallest
id first. That is the same when ids grow along the merges, every part of a merge is a byte or was made by a merge before
it, and each token's own bytes are encoded as that token: if two neighbours made a token t without being its pair, then
the bytes of t alone would come to those two neighbours as well (merges inside of them never look outside), stay so, and
not become t. A token that has all its splits among the merges needs no such argument.

How a text is split into words depends on tables of Unicode, which libraries have in different versions: so this is used
for texts in the characters that a trial went through one by one, and what else a tokenizer has (other normalizers, a
space before each text, added tokens with a will of their own) is left to itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import tiktoken
from tokenizers import models

from indexer.hashing import pack_tokens
from router.tokens.segments import Cutter, Encode

# Latin script and its punctuation. No normalization to NFC changes any of it.
CHARACTERS = [chr(code) for code in (*range(0x250), *range(0x2010, 0x2028), *range(0x2030, 0x205F), 0x20AC)]
_only_those = re.compile("[\\0-\u024f\u2010-\u2027\u2030-\u205e\u20ac]*").fullmatch

# About how many times faster than the tokenizer itself it is.
ASCII_SPEED = 4

# How the ByteLevel pre-tokenizer splits words.
_GPT2_WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# A special token that no text is searched for: without any, tiktoken stops at every character.
_NO_TOKEN = "\0kvrouter\0"


class UnfitError(Exception):
    """A tokenizer that tiktoken does not stand in for; says why."""


class FastPieces:
    """Packed token ids of pieces of text (as a `Cutter` cuts them): by tiktoken, or else by the tokenizer itself."""

    def __init__(self, backend: Any, cutter: Cutter, otherwise: Encode) -> None:
        """`backend` is of `tokenizers`. Raises UnfitError."""
        words, ranks = _readable(backend)
        special = {_NO_TOKEN: max(ranks.values(), default=0) + 1}
        words = grouped(words)
        self._made = partial(tiktoken.Encoding, "model", pat_str=words, mergeable_ranks=ranks, special_tokens=special)
        try:
            self._encoding = self._made()
        except ValueError as error:
            raise UnfitError(f"tiktoken cannot read it: {error}") from error
        self._otherwise = otherwise
        self._cutter = cutter
        self._special = {content: pack_tokens([backend.token_to_id(content)]) for content in cutter.boundaries}

    def renew(self) -> None:
        """Be as if never used. Takes as long as a vocabulary is large."""
        self._encoding = self._made()

    def claim(self) -> None:
        """Be the fastest in this thread, if nobody used it yet.

        The expression that splits words keeps its working memory for the thread that is the first to use it; all others
        get theirs from under a lock, and take half as long again.
        """
        self._encode(" it's 12 ?!\n\n  x\n ")  # each part of the expression has its own

    def __call__(self, pieces: list[str]) -> list[bytes]:
        """The token ids of each piece."""
        encoded = [self._fast(piece) for piece in pieces]
        slow = [piece for piece, ids in zip(pieces, encoded, strict=True) if ids is None]
        slowly = iter(self._otherwise(slow) if slow else ())
        return [next(slowly) if ids is None else ids for ids in encoded]

    def _fast(self, piece: str) -> bytes | None:
        special = self._cutter.special_token(piece)
        text = piece[len(special) :]
        if not (text.isascii() or _only_those(text)) or self._cutter.has_added_token(text):
            return None
        ids = self._encode(text)
        return self._special[special] + ids if special else ids

    def _encode(self, text: str) -> bytes:
        if not text:
            return b""
        # Without a list of numbers, which takes a lot of memory here and there.
        ids: bytes = self._encoding.encode_to_numpy(text, disallowed_special=()).astype("<u4", copy=False).tobytes()
        return ids


def trial_characters() -> Iterator[str]:
    """Every character that tiktoken is used for, in the surroundings that decide where a word ends."""
    for character in CHARACTERS:
        yield f"{character}a{character} {character}1{character}\n{character}.{character}{character} s'{character}"


def _readable(backend: Any) -> tuple[str, dict[bytes, int]]:
    """What tiktoken needs: the expression that splits words, and the id of each token. Raises UnfitError."""
    tokenizer = json.loads(backend.to_str())
    model = tokenizer["model"]
    if model.get("type") != "BPE" or any(model.get(option) for option in _OPTIONS):
        raise UnfitError("not a plain BPE")
    if tokenizer["normalizer"] not in (None, {"type": "NFC"}):
        raise UnfitError("it normalizes")
    words = _words(tokenizer["pre_tokenizer"])
    added = {token["content"] for token in tokenizer["added_tokens"]}
    vocabulary = {token: number for token, number in model["vocab"].items() if token not in added}
    merges = [_pair(merge) for merge in model["merges"]]
    _check_merges(vocabulary, merges, ignore_merges=model.get("ignore_merges", False))
    try:
        return words, {bytes(_BYTES[character] for character in token): number for token, number in vocabulary.items()}
    except KeyError as error:
        raise UnfitError(f"no byte is written {error}") from error


_OPTIONS = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")


def _pair(merge: str | list[str]) -> tuple[str, str]:
    """A merge as files have it: "left right" in older ones, ["left", "right"] in newer ones."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right


def _words(pre_tokenizer: dict[str, Any] | None) -> str:
    """The expression that splits a text into words."""
    match pre_tokenizer:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
            return _GPT2_WORDS
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": str(words)}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        }:
            return words
    raise UnfitError("its words are not split by one expression, or are not bytes")


_PARTS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\[\]\\])*\]|.", re.DOTALL)
_LOOKS_AROUND = re.compile(r"\(\?<?[=!]")
_FLAGS_FROM_HERE_ON = re.compile(r"\(\?[-a-zA-Z]+\)")


def grouped(words: str) -> str:
    """The same expression, with its alternatives before the first that looks around as a group of their own.

    tiktoken's engine of expressions goes through a group that looks at nothing around it in one go, and else tries one
    alternative after the other, which takes longer.
    """
    looks = _LOOKS_AROUND.search(words)
    if looks is None or _FLAGS_FROM_HERE_ON.search(words):
        return words
    depth = end = 0
    for part in _PARTS.finditer(words, 0, looks.start()):
        if part[0] == "[":
            return words  # a set inside a set
        if part[0] == "|" and depth == 0:
            end = part.start()
        depth += (part[0] == "(") - (part[0] == ")")
    return f"(?:{words[:end]}){words[end:]}" if end else words


def _check_merges(vocabulary: dict[str, int], merges: list[tuple[str, str]], *, ignore_merges: bool) -> None:
    """Raises UnfitError unless what the module's docstring asks of them is so."""
    if not _BYTES.keys() <= vocabulary.keys():
        raise UnfitError("it lacks bytes")
    made, last = set(_BYTES), -1
    for left, right in merges:
        token = left + right
        if token not in vocabulary or not {left, right} <= made or vocabulary[token] < last:
            raise UnfitError("its merges are in another order than their tokens")
        last = vocabulary[token]
        made.add(token)
    encode = models.BPE(vocab=vocabulary, merges=merges).tokenize
    pairs = set(merges)
    for token in vocabulary:
        if len(encode(token)) > 1 and not (
            ignore_merges
            and all(
                (token[:cut], token[cut:]) in pairs
                for cut in range(1, len(token))
                if token[:cut] in vocabulary and token[cut:] in vocabulary
            )
        ):
            raise UnfitError(f"its token {token!r} is not what its own text becomes")


def _alphabet() -> dict[str, int]:
    """The character that stands for each byte in a byte-level vocabulary: itself where it can be seen."""
    seen = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTES = _alphabet()
