"""Texts to token ids by a model's tokenizer.json: by fastokens, where that gives the same ids as `tokenizers`.

`fastokens` reads what most models have, some ten times sooner, and keeps the segments between special tokens that it
saw before. What it cannot read, or reads in another way on trial, `tokenizers` does, whose format it is.
"""

from __future__ import annotations

from hashlib import sha256
from itertools import pairwise
from struct import unpack
from typing import Any, Protocol

import structlog

from http_api.errors import RequestError
from indexer.hashing import pack_tokens
from router.tokens.errors import TokenizerUnavailableError
from router.tokens.tokenizer_check import trial_texts

log = structlog.get_logger()

# What trials have shown, by the file's hash: models share tokenizers, files are read again, and a trial takes half a
# second of processor time.
_trials: dict[bytes, str | None] = {}
_MOST_TRIALS = 64


class Encoder(Protocol):
    """What texts are tokenized with: `TextEncoder`, or what a model family has in its place.

    `vocab_size`: one more than the largest id. `special`: the texts of the tokens that are found in any text. `exact`:
    those of them that stand for themselves wherever they are, whatever else is done to a text.
    """

    vocab_size: int
    special: list[str]
    exact: list[str]

    @property
    def fast(self) -> bool: ...

    @property
    def cached_bytes(self) -> int: ...

    def encode(self, texts: list[str], *, add_special_tokens: bool = False) -> list[bytes]: ...


class TextEncoder:
    """Packed token ids of texts. Any number of threads may use one. `fast`: whether fastokens does it."""

    def __init__(self, tokenizer_json: str, cache_bytes: int = 0) -> None:
        """`cache_bytes` bounds what fastokens keeps. Raises TokenizerUnavailableError for what nobody can read."""
        from tokenizers import Tokenizer  # some tenths of a second, which who tokenizes nothing need not wait

        try:
            whole: Any = Tokenizer.from_str(tokenizer_json)
        except Exception as error:  # whatever it meets in a stranger's file it raises in its own way
            raise TokenizerUnavailableError(f"tokenizer.json cannot be read: {error}") from error
        whole.no_padding()
        whole.no_truncation()
        added = whole.get_added_tokens_decoder()
        self.special = [token.content for token in added.values() if token.content]
        self.exact = [
            token.content
            for token in added.values()
            if token.content and not (token.normalized or token.single_word or token.lstrip)
        ]
        self.vocab_size = max(whole.get_vocab().values(), default=-1) + 1
        self._whole: Any = whole
        self._fast = _fast_one(tokenizer_json, cache_bytes)
        difference = "it cannot read it" if self._fast is None else self._tried_before(tokenizer_json)
        if difference is not None:
            log.info("fastokens does not stand in for this tokenizer", reason=difference)
            self._fast = None
        else:
            self._whole = None  # of tens of megabytes
            self._fast.enable_segment_cache(cache_bytes)  # without what was tried

    @property
    def fast(self) -> bool:
        """Whether fastokens does it."""
        return self._fast is not None

    @property
    def cached_bytes(self) -> int:
        """What fastokens keeps of the texts before."""
        stats = self._fast.segment_cache_stats() if self._fast is not None else None
        return int(stats["bytes"]) if stats else 0

    def encode(self, texts: list[str], *, add_special_tokens: bool = False) -> list[bytes]:
        """The packed token ids of each text. Special tokens that stand in a text are read as such.

        Raises RequestError (400) for half of a surrogate pair, which JSON inside of JSON can smuggle into a text.
        """
        encode = self._by_fastokens if self._fast is not None else self._by_tokenizers
        try:
            return encode(texts, add_special_tokens)
        except (TypeError, UnicodeEncodeError) as error:
            raise RequestError("The prompt has half of a surrogate pair in it. Send valid Unicode.") from error

    def _by_fastokens(self, texts: list[str], add_special_tokens: bool) -> list[bytes]:
        ids, offsets = self._fast.encode_batch_flat(texts, add_special_tokens)
        if len(texts) == 1:
            return [ids]
        ends = unpack(f"<{len(texts) + 1}Q", offsets)
        return [ids[4 * start : 4 * end] for start, end in pairwise(ends)]

    def _by_tokenizers(self, texts: list[str], add_special_tokens: bool) -> list[bytes]:
        # Unlike `encode`, this lets other threads run; and it skips the offsets, a third of the work.
        encodings = self._whole.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return [pack_tokens(encoding.ids) for encoding in encodings]

    def _tried_before(self, tokenizer_json: str) -> str | None:
        """What the trial shows, or has shown: as `_difference`."""
        key = sha256(tokenizer_json.encode(errors="surrogatepass")).digest()
        if key not in _trials:
            if len(_trials) >= _MOST_TRIALS:
                _trials.clear()
            _trials[key] = self._difference()
        return _trials[key]

    def _difference(self) -> str | None:
        """What fastokens does differently; None when it does all trial texts alike, new and seen before."""
        texts = list(trial_texts(self.special))
        for add in (False, True):
            expected = self._by_tokenizers(texts, add)
            for _ in range(2):
                try:
                    found = self._by_fastokens(texts, add)
                except Exception as error:
                    return str(error)
                if found != expected:
                    text = next(text for place, text in enumerate(texts) if expected[place] != found[place])
                    return f"it reads {text!r} in another way"
        return None


def _fast_one(tokenizer_json: str, cache_bytes: int) -> Any:
    """The tokenizer by fastokens; None where there is no such package for this machine, or it cannot read it."""
    try:
        import fastokens

        fast = fastokens.Tokenizer.from_json_str(tokenizer_json)
        fast.no_padding()
        fast.no_truncation()
        fast.enable_segment_cache(cache_bytes)
    except Exception as error:
        log.debug("fastokens", reason=str(error))
        return None
    return fast
