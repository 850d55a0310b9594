"""A model's tokenizer files: from its folder, by transformers, or from the Hugging Face Hub."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from router.tokens import TokenizerUnavailableError

# The special tokens that chat templates use by name.
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_DEFAULT = "default"
# The longest wait for a model's files from the Hub. `HF_HUB_OFFLINE=1` disables the Hub.
_HUB_SECONDS = 10.0
# No weights and no code.
_HUB_FILES = [
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    "tekken.json",
    "tiktoken.model",
]
_is_name = re.compile(r"[\w.-]+/[\w.-]+").fullmatch


@dataclass(frozen=True)
class ModelFiles:
    """The tokenizer files of a model.

    - `tokenizer`: the text of its tokenizer.json.
    - `templates`: its chat templates by name. "default" is used; "tool_use" for chats with tools if it exists.
    - `special_tokens`: special tokens by their names in templates.
    - `vocab_size`, `model_type`: from its config.json; 0 and "" if missing.
    """

    tokenizer: str
    templates: dict[str, str] = field(default_factory=dict)
    special_tokens: dict[str, str] = field(default_factory=dict)
    vocab_size: int = 0
    model_type: str = ""

    @classmethod
    def read(cls, folder: Path) -> ModelFiles:
        """Read the files in a folder. Raises TokenizerUnavailableError that names the missing or invalid file."""
        path = folder / "tokenizer.json"
        if not path.exists():
            raise TokenizerUnavailableError(f"no tokenizer can be loaded from {str(folder)!r}: no tokenizer.json there")
        try:
            return cls.beside(path.read_text(encoding="utf-8"), folder)
        except (OSError, ValueError) as error:
            raise TokenizerUnavailableError(f"no tokenizer can be loaded from {str(folder)!r}: {error}") from error

    @classmethod
    def beside(cls, tokenizer: str, folder: Path) -> ModelFiles:
        """Read the other files of a folder for this tokenizer. Raises OSError and ValueError."""
        config = read_json(folder / "tokenizer_config.json")
        special = _special_tokens(config, read_json(folder / "special_tokens_map.json"))
        return cls(tokenizer, _templates(folder, config), special, *model_config(folder))

    def template_for(self, tools: bool) -> str | None:
        """Return the chat template for conversations with or without tools; None if the model has none."""
        return (self.templates.get("tool_use") if tools else None) or self.templates.get(_DEFAULT)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file; empty if the file does not exist. Raises ValueError if it is no object."""
    if not path.exists():
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError(f"{path.name} is not a JSON object")
    return found


def model_config(folder: Path) -> tuple[int, str]:
    """Return a model's vocabulary size and type from its config.json. Raises OSError and ValueError."""
    config = read_json(folder / "config.json")
    text = config.get("text_config") or config
    size, kind = text.get("vocab_size"), config.get("model_type")
    return size if isinstance(size, int) else 0, kind if isinstance(kind, str) else ""


def _templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Return the chat templates. Separate files take precedence over the tokenizer's configuration."""
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


def read_by_transformers(folder: Path) -> ModelFiles:
    """Read a folder's files by transformers, which needs no tokenizer.json: slow, so in a thread.

    Raises TokenizerUnavailableError.
    """
    # Suppress its advice to install PyTorch.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise TokenizerUnavailableError(
            "this tokenizer needs another package: pip install 'kvrouter[transformers]'"
        ) from error
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # invalid files cause errors of any type
        raise TokenizerUnavailableError(f"transformers cannot read {str(folder)!r}: {error}") from error
    if not tokenizer.is_fast:
        raise TokenizerUnavailableError(
            f"{type(tokenizer).__name__} of {str(folder)!r} cannot be converted to tokenizer.json"
        )
    try:
        return files_of(tokenizer, *model_config(folder))
    except (OSError, ValueError) as error:
        raise TokenizerUnavailableError(f"{str(folder)!r}: {error}") from error


def files_of(tokenizer: Any, vocab_size: int = 0, model_type: str = "") -> ModelFiles:
    """Return the files of a transformers tokenizer, and of its model's configuration."""
    template = tokenizer.chat_template
    templates = template if isinstance(template, dict) else {} if template is None else {"default": template}
    special = dict(tokenizer.special_tokens_map)
    return ModelFiles(tokenizer.backend_tokenizer.to_str(), templates, special, vocab_size, model_type)


def is_hub_name(name: str) -> bool:
    """Return whether this may be the name of a model on the Hub."""
    return _is_name(name) is not None and ".." not in name


async def fetch_from_hub(name: str, seconds: float = _HUB_SECONDS) -> Path:
    """Return a folder with a model's files, from Hub or cache. Raises TokenizerUnavailableError after `seconds`."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Path] = loop.create_future()

    def fetch() -> None:
        try:
            from huggingface_hub import snapshot_download

            found = Path(snapshot_download(name, allow_patterns=_HUB_FILES, etag_timeout=seconds))
        except Exception as error:  # the library and the network raise many types
            outcome: Path | Exception = error
        else:
            outcome = found
        with contextlib.suppress(RuntimeError):  # the loop may have ended
            loop.call_soon_threadsafe(_settle, done, outcome)

    # A daemon thread, because the library can retry for minutes and must not delay the process's end.
    threading.Thread(target=fetch, name=f"fetch {name}", daemon=True).start()
    try:
        async with asyncio.timeout(seconds):
            return await done
    except TimeoutError as error:
        raise TokenizerUnavailableError(f"the Hub did not return the files of {name!r} within {seconds:g} s") from error
    except Exception as error:
        raise TokenizerUnavailableError(f"the Hub did not return the files of {name!r}: {error}") from error


def _settle(done: asyncio.Future[Path], outcome: Path | Exception) -> None:
    if done.done():
        return
    if isinstance(outcome, Exception):
        done.set_exception(outcome)
    else:
        done.set_result(outcome)
