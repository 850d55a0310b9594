"""A tokenizer as transformers reads it: where there is no tokenizer.json, or engines read that as transformers does."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from router.tokens.errors import TokenizerUnavailableError
from router.tokens.model_files import ModelFiles, model_config


def read_by_transformers(folder: Path) -> ModelFiles:
    """The files of a model in a folder. Slow: call it in a thread. Raises TokenizerUnavailableError."""
    # It would advise to install PyTorch.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise TokenizerUnavailableError(
            "this tokenizer wants another package: pip install 'kvrouter[transformers]'"
        ) from error
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # whatever it meets in a stranger's files it raises in its own way
        raise TokenizerUnavailableError(f"transformers cannot read {str(folder)!r}: {error}") from error
    if not tokenizer.is_fast:
        raise TokenizerUnavailableError(f"{type(tokenizer).__name__} of {str(folder)!r} has no form as tokenizer.json")
    try:
        return files_of(tokenizer, *model_config(folder))
    except (OSError, ValueError) as error:
        raise TokenizerUnavailableError(f"{str(folder)!r}: {error}") from error


def files_of(tokenizer: Any, vocab_size: int = 0, model_type: str = "") -> ModelFiles:
    """What a tokenizer of transformers has read. `vocab_size` and `model_type`: those of the model's configuration."""
    template = tokenizer.chat_template
    templates = template if isinstance(template, dict) else {} if template is None else {"default": template}
    special = dict(tokenizer.special_tokens_map)
    return ModelFiles(tokenizer.backend_tokenizer.to_str(), templates, special, vocab_size, model_type)
