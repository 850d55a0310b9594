"""The measured tokenizers: the bundled one, and one of the size that models have."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from router.tokens.model_files import ModelFiles
from simulator.worker.model.train import CHAT_TEMPLATE, SPECIAL_TOKENS

BUNDLED = Path("simulator/worker/model")
_VOCABULARY = 32_768
# Enough of the standard library's source for the vocabulary.
_FILES = 700
# A split of words as of current models' tokenizers.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def bundled() -> ModelFiles:
    """Return the simulated worker's tokenizer."""
    return ModelFiles.read(BUNDLED)


def large() -> ModelFiles:
    """Train a byte-level BPE of 32,768 tokens on the source of Python's standard library."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sources(), trainer)
    return ModelFiles(tokenizer.to_str(), {"default": CHAT_TEMPLATE}, {"eos_token": "<|im_end|>"})


def _sources() -> Iterator[str]:
    for path in islice(sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")), _FILES):
        yield path.read_text(encoding="utf-8", errors="replace")
