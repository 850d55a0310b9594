"""A model's tokenizer files from the Hugging Face Hub, or from what is cached of it on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from pathlib import Path

from router.tokens.errors import TokenizerUnavailableError

# Nothing of a model's weights, and no code.
_FILES = [
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


def is_hub_name(name: str) -> bool:
    """Whether this may be the name of a model on the Hub."""
    return _is_name(name) is not None and ".." not in name


async def fetched(name: str, seconds: float) -> Path:
    """The folder with a model's files. Raises TokenizerUnavailableError when they cannot be had in this time."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Path] = loop.create_future()

    def fetch() -> None:
        try:
            from huggingface_hub import snapshot_download

            found = Path(snapshot_download(name, allow_patterns=_FILES, etag_timeout=seconds))
        except Exception as error:  # of the library's many kinds, and the network's
            outcome: Path | Exception = error
        else:
            outcome = found
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(_settle, done, outcome)

    # Not a thread that is waited for when the process ends: the library may try again for minutes.
    threading.Thread(target=fetch, name=f"fetch {name}", daemon=True).start()
    try:
        async with asyncio.timeout(seconds):
            return await done
    except TimeoutError as error:
        raise TokenizerUnavailableError(f"the Hub did not give the files of {name!r} within {seconds:g} s") from error
    except Exception as error:
        raise TokenizerUnavailableError(f"the Hub does not give the files of {name!r}: {error}") from error


def _settle(done: asyncio.Future[Path], outcome: Path | Exception) -> None:
    if done.done():
        return
    if isinstance(outcome, Exception):
        done.set_exception(outcome)
    else:
        done.set_result(outcome)
