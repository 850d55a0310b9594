"""The tokenizer of one model: local if it is known to agree with the engine, else by asking an engine."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection
from enum import StrEnum

from router.apis.requests import ChatPrompt, TextPrompts
from router.tokens.engine_client import is_converted
from router.tokens.engine_tokenizer import EngineTokenizer
from router.tokens.local_tokenizer import LocalTokenizer
from router.tokens.media_reader import MediaReader
from router.tokens.probes import ProbeKind, probe_kinds

# This many consecutive equal prompts end the suspicion of a local tokenizer.
_COMPARED = 32


class PromptSource(StrEnum):
    """The sources of a prompt's tokens."""

    LOCAL = "local"
    ENGINE = "engine"
    TEXT = "text"


class SourceUsage:
    """The prompts of one source, and the seconds spent on them."""

    def __init__(self) -> None:
        self.prompts = 0
        self.seconds = 0.0

    def add(self, started: float) -> None:
        """Count a prompt. `started`: when it was begun, by `time.perf_counter`."""
        self.prompts += 1
        self.seconds += time.perf_counter() - started


class TokenizerUsage:
    """The prompts of a model by source."""

    def __init__(self) -> None:
        self.local = SourceUsage()
        self.engine = SourceUsage()
        self.text = SourceUsage()

    def by_source(self) -> dict[PromptSource, SourceUsage]:
        """Return the usage of each source."""
        return {PromptSource.LOCAL: self.local, PromptSource.ENGINE: self.engine, PromptSource.TEXT: self.text}


class ModelTokenizer:
    """One model's tokenizer: local, an engine, or both, each for some kinds of prompts.

    - `asked`: kinds of prompts for which the engine is asked although there is a local tokenizer.
    - `suspected`: the engine is asked about all prompts, because usage in responses disagreed with the local tokenizer.
    - `media`: builds prompts with media; None if engines are not asked about media.
    - `on_trial`: the engine is asked about all prompts, because the local tokenizer is not yet compared with it.
    """

    def __init__(
        self,
        local: LocalTokenizer | None = None,
        engine: EngineTokenizer | None = None,
        asked: Collection[ProbeKind] = (),
        usage: TokenizerUsage | None = None,
        suspected: bool = False,
        media: MediaReader | None = None,
        on_trial: bool = False,
    ) -> None:
        self.local = local
        self.engine = engine
        self.asked = frozenset(asked)
        self.usage = usage or TokenizerUsage()
        self.suspected = suspected
        self.media = media
        self.on_trial = on_trial
        self._compared: deque[bool] = deque(maxlen=_COMPARED)

    @property
    def route(self) -> str:
        """`local`, `engine`, `mixed`, or `text` if there is neither."""
        if self.local is None:
            return "engine" if self.engine is not None else "text"
        if self.engine is None or not (self.asked or self.suspected):
            return "local"
        return "engine" if self.suspected or ProbeKind.PLAIN in self.asked else "mixed"

    @property
    def cached_bytes(self) -> int:
        """Bytes that cached prompts occupy."""
        return sum(each.cached_bytes for each in (self.local, self.engine, self.media) if each is not None)

    def asks(self, prompt: ChatPrompt | TextPrompts) -> bool:
        """Return whether the engine is asked about a prompt."""
        if self.engine is None:
            return False
        if self.local is None or self.suspected or self.on_trial:
            return True
        return bool(self.asked) and not self.asked.isdisjoint(probe_kinds(prompt))

    def needs_rendering(self, prompt: ChatPrompt | TextPrompts) -> bool:
        """Return whether an engine's `/tokenize` may return other tokens than the engine computes."""
        if isinstance(prompt, TextPrompts):
            return False
        return self.local is None or self.local.has_chat_encoder or is_converted(prompt)

    def compare(self, equal: bool) -> None:
        """Record a comparison with the engine's tokens; enough equal ones end the suspicion."""
        self._compared.append(equal)
        if len(self._compared) == _COMPARED and all(self._compared):
            self.suspected = False
