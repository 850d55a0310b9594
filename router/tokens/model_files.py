"""The files of a model that say how prompts become tokens: its tokenizer, its chat templates, its vocabulary's size."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from router.tokens.errors import TokenizerUnavailableError

# The special tokens that chat templates know by name.
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_DEFAULT = "default"


@dataclass(frozen=True)
class ModelFiles:
    """What was read of a model.

    `tokenizer` is the text of its tokenizer.json. `templates`: its chat templates by name; "default" is used, but
    "tool_use" for chats with tools where there is one. `special_tokens`: the special tokens by the names that templates
    know them by. `vocab_size` and `model_type` are those of its config.json; 0 and "" where it has none.
    """

    tokenizer: str
    templates: dict[str, str] = field(default_factory=dict)
    special_tokens: dict[str, str] = field(default_factory=dict)
    vocab_size: int = 0
    model_type: str = ""

    @classmethod
    def read(cls, folder: Path) -> ModelFiles:
        """The files in a folder. Raises TokenizerUnavailableError, naming what is missing or broken."""
        path = folder / "tokenizer.json"
        if not path.exists():
            raise TokenizerUnavailableError(f"no tokenizer can be loaded from {str(folder)!r}: no tokenizer.json there")
        try:
            return cls.beside(path.read_text(encoding="utf-8"), folder)
        except (OSError, ValueError) as error:
            raise TokenizerUnavailableError(f"no tokenizer can be loaded from {str(folder)!r}: {error}") from error

    @classmethod
    def beside(cls, tokenizer: str, folder: Path) -> ModelFiles:
        """The files in a folder beside the tokenizer. Raises OSError and ValueError."""
        config = read_json(folder / "tokenizer_config.json")
        special = _special_tokens(config, read_json(folder / "special_tokens_map.json"))
        return cls(tokenizer, _templates(folder, config), special, *model_config(folder))

    def template_for(self, tools: bool) -> str | None:
        """The chat template for conversations with or without tools; None where the model has none."""
        return (self.templates.get("tool_use") if tools else None) or self.templates.get(_DEFAULT)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; empty where there is no such file. Raises ValueError for anything else."""
    if not path.exists():
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError(f"{path.name} is no JSON object")
    return found


def model_config(folder: Path) -> tuple[int, str]:
    """The size of a model's vocabulary and its type, by its config.json. Raises OSError and ValueError."""
    config = read_json(folder / "config.json")
    text = config.get("text_config") or config
    size, kind = text.get("vocab_size"), config.get("model_type")
    return size if isinstance(size, int) else 0, kind if isinstance(kind, str) else ""


def _templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """The chat templates. Files of their own count more than the tokenizer's configuration."""
    found: dict[str, str] = {}
    given = config.get("chat_template")
    if isinstance(given, str):
        found[_DEFAULT] = given
    elif isinstance(given, list):
        found |= {
            each["name"]: each["template"]
            for each in given
            if isinstance(each, dict) and isinstance(each.get("name"), str) and isinstance(each.get("template"), str)
        }
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        found[path.stem] = path.read_text(encoding="utf-8")
    whole = folder / "chat_template.jinja"
    if whole.exists():
        found[_DEFAULT] = whole.read_text(encoding="utf-8")
    elif _DEFAULT not in found and isinstance(
        template := read_json(folder / "chat_template.json").get("chat_template"), str
    ):
        found[_DEFAULT] = template
    return found


def _special_tokens(config: dict[str, Any], older: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in _NAMED_TOKENS:
        token = config.get(name, older.get(name))
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            found[name] = token
    return found
