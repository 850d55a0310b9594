"""Kimi's texts. Its own Python code is not run: tiktoken reads the file, and splits words as that code does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from indexer.hashing import pack_tokens
from router.tokens import TokenizerUnavailableError
from router.tokens.model_files import read_json

KIMI_FILE = "tiktoken.model"
_LETTERS = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_SMALL = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_WORDS = "|".join(
    (
        r"[\p{Han}]+",
        f"{_LETTERS}*{_SMALL}+{_ENDINGS}",
        f"{_LETTERS}+{_SMALL}*{_ENDINGS}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
_SPECIAL_TOKENS = 256


class KimiTexts:
    """An encoder of texts. Special tokens inside a text are recognized; none is added before or after."""

    fast = False
    cached_bytes = 0

    def __init__(self, folder: Path) -> None:
        """Load tiktoken.model. Slow: call it in a thread. Raises TokenizerUnavailableError."""
        try:
            import tiktoken
            from tiktoken.load import load_tiktoken_bpe
        except ImportError as error:
            raise TokenizerUnavailableError(
                f"{KIMI_FILE} needs another package: pip install 'kvrouter[kimi]'"
            ) from error
        try:
            ranks = load_tiktoken_bpe(str(folder / KIMI_FILE))
            named = read_json(folder / "tokenizer_config.json").get("added_tokens_decoder", {})
            names = {int(number): token["content"] for number, token in named.items()}
            first = len(ranks)
            special = {
                names.get(number, f"<|reserved_token_{number}|>"): number
                for number in range(first, first + _SPECIAL_TOKENS)
            }
            self._encoding: Any = tiktoken.Encoding(
                "kimi", pat_str=_WORDS, mergeable_ranks=ranks, special_tokens=special
            )
        except Exception as error:  # invalid files cause errors of any type
            raise TokenizerUnavailableError(f"tiktoken cannot read {KIMI_FILE}: {error}") from error
        self.vocab_size = first + _SPECIAL_TOKENS
        self.special = self.exact = list(special)

    def encode(self, texts: list[str], *, add_special_tokens: bool = False) -> list[bytes]:  # noqa: ARG002 (has none)
        """Return the packed token ids of each text."""
        return [pack_tokens(self._encoding.encode(text, allowed_special="all")) for text in texts]
