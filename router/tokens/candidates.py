"""The possible tokenizers for a model's files, the likely one first. A trial against an engine decides between them.

Models without a tokenizer.json have Mistral's tekken.json or Kimi's tiktoken.model.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from router.tokens import TokenizerUnavailableError
from router.tokens.deepseek_v32 import USER, DeepSeekV32
from router.tokens.harmony import Harmony
from router.tokens.kimi import KIMI_FILE, KimiTexts
from router.tokens.local_tokenizer import LocalTokenizer
from router.tokens.mistral import Mistral
from router.tokens.model_files import ModelFiles, model_config, read_by_transformers

# Loads a tokenizer with a cache of the given bytes. Slow; raises TokenizerUnavailableError.
Load = Callable[[int], LocalTokenizer]


def candidates(folder: Path, sglang: bool = False) -> list[Load]:
    """Return loaders for the files in a folder, which tokenize as vLLM or SGLang does.

    Raises TokenizerUnavailableError without any.
    """
    try:
        vocab_size, model_type = model_config(folder)
    except (OSError, ValueError) as error:
        raise TokenizerUnavailableError(f"{folder}: {error}") from error
    found: list[Load] = []

    def mistral(cache_bytes: int) -> LocalTokenizer:
        encoder = Mistral(folder)
        files = ModelFiles("", vocab_size=vocab_size)
        return LocalTokenizer(files, cache_bytes, encoder, encoder.texts, "mistral-common")

    def harmony(cache_bytes: int) -> LocalTokenizer:
        return LocalTokenizer(ModelFiles.read(folder), cache_bytes, Harmony(), method="harmony")

    def deepseek_v32(cache_bytes: int) -> LocalTokenizer:
        return LocalTokenizer(ModelFiles.read(folder), cache_bytes, DeepSeekV32(), method="deepseek_v32")

    def kimi(cache_bytes: int) -> LocalTokenizer:
        encoder = KimiTexts(folder)
        try:
            files = ModelFiles.beside("", folder)
        except (OSError, ValueError) as error:
            raise TokenizerUnavailableError(f"{folder}: {error}") from error
        return LocalTokenizer(files, cache_bytes, text_encoder=encoder, method="tiktoken", sglang=sglang)

    def as_it_is(cache_bytes: int) -> LocalTokenizer:
        return LocalTokenizer.load(str(folder), cache_bytes, sglang)

    def by_transformers(cache_bytes: int) -> LocalTokenizer:
        return LocalTokenizer(read_by_transformers(folder), cache_bytes, method="transformers", sglang=sglang)

    if (folder / "tekken.json").exists():
        found.append(mistral)
    if model_type == "gpt_oss":
        found.append(harmony)
    if (folder / "tokenizer.json").exists():
        files = ModelFiles.read(folder)
        if not files.templates and USER in files.tokenizer:
            found.append(deepseek_v32)
        found.append(as_it_is)
    elif (folder / KIMI_FILE).exists():
        found.append(kimi)
    if (folder / "tokenizer_config.json").exists():
        found.append(by_transformers)
    if not found:
        raise TokenizerUnavailableError(f"no tokenizer can be loaded from {str(folder)!r}: no tokenizer.json there")
    return found
