"""Results of tokenizer trials on disk, so that each file is tried once on a machine, not at each start.

Each result is a file in `kvrouter/trials` of the user's cache folder (`XDG_CACHE_HOME`, else `~/.cache`). A missing,
damaged or unreadable file means another trial.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
import structlog

from kvevents.decoding import read_json

log = structlog.get_logger()

# A result has at most some kilobytes: its reason quotes one trial text.
_MAX_RESULTS: Final = 64
_MAX_BYTES: Final = 65_536


class TrialResult(msgspec.Struct, forbid_unknown_fields=True):
    """The result of the trial with this key: how the tokenizers differ, None if they agree."""

    key: str
    difference: str | None


def read_result(key: str) -> TrialResult | None:
    """Return the stored result of a key, None without a readable one."""
    try:
        with open(_folder() / key, "rb") as file:
            result = read_json(file.read(_MAX_BYTES), TrialResult)
    except (OSError, RuntimeError, msgspec.DecodeError):
        return None
    return result if result.key == key else None


def write_result(result: TrialResult) -> None:
    """Store a result, and delete the oldest results beyond a limit. Without a folder for it, it is not stored."""
    try:
        data = msgspec.json.encode(result)
        if len(data) > _MAX_BYTES:
            return
        folder = _folder()
        folder.mkdir(parents=True, exist_ok=True)
        number, path = tempfile.mkstemp(dir=folder)
        try:
            with open(number, "wb") as file:
                file.write(data)
            os.replace(path, folder / result.key)  # readers see a whole file or none
        except OSError:
            os.unlink(path)
            raise
        _delete_oldest(folder)
    except (OSError, RuntimeError, UnicodeError) as error:
        log.debug("the result of a tokenizer trial is not stored", reason=str(error))


def _folder() -> Path:
    """Return the folder of the results. Raises RuntimeError if the user has no home."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "kvrouter" / "trials"


def _delete_oldest(folder: Path) -> None:
    """Delete the oldest files beyond the limit. Other processes may delete them too."""
    ages = []
    for path in folder.iterdir():
        with suppress(OSError):
            ages.append((path.stat().st_mtime, path))
    for _, path in sorted(ages)[:-_MAX_RESULTS]:
        path.unlink(missing_ok=True)
