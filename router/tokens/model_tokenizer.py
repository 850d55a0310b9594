"""How the prompts of one model become tokens: here, where that is known to be right, or by asking an engine."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Collection
from enum import StrEnum

from router.apis.requests import ChatPrompt, TextPrompts
from router.tokens.engine_tokenizer import EngineTokenizer
from router.tokens.local_tokenizer import LocalTokenizer
from router.tokens.media_reader import MediaReader
from router.tokens.shapes import Shape, shapes_of

# Prompts of which an engine's tokens were compared with ours, after which ours are believed again: all must be equal.
_COMPARED = 32


class Path(StrEnum):
    """The ways that a prompt may go."""

    LOCAL = "local"
    ENGINE = "engine"
    TEXT = "text"


class Usage:
    """How often a way was taken, and the seconds that took."""

    def __init__(self) -> None:
        self.prompts: Counter[Path] = Counter()
        self.seconds: dict[Path, float] = dict.fromkeys(Path, 0.0)

    def add(self, path: Path, begun: float) -> None:
        """A prompt went this way from then (by `time.perf_counter`) until now."""
        self.prompts[path] += 1
        self.seconds[path] += time.perf_counter() - begun


class ModelTokenizer:
    """One model's tokenizer: `local`, `engine`, or both, of which each has its shapes.

    `asked`: the shapes of prompts that the engine is asked about, although there is a local one. `suspected`: it is
    asked about all, since answers showed that the local one is wrong somewhere. `media`: what knows of images and the
    like in prompts that are read here.
    """

    def __init__(
        self,
        local: LocalTokenizer | None = None,
        engine: EngineTokenizer | None = None,
        asked: Collection[Shape] = (),
        usage: Usage | None = None,
        suspected: bool = False,
        media: MediaReader | None = None,
    ) -> None:
        self.local = local
        self.engine = engine
        self.asked = frozenset(asked)
        self.usage = usage or Usage()
        self.suspected = suspected
        self.media = media
        self._compared: deque[bool] = deque(maxlen=_COMPARED)

    @property
    def way(self) -> str:
        """`local`, `engine`, `mixed`, or `text` where there is neither."""
        if self.local is None:
            return "engine" if self.engine is not None else "text"
        if self.engine is None or not (self.asked or self.suspected):
            return "local"
        return "engine" if self.suspected or Shape.PLAIN in self.asked else "mixed"

    @property
    def cached_bytes(self) -> int:
        """What prompts seen before take."""
        return sum(each.cached_bytes for each in (self.local, self.engine, self.media) if each is not None)

    def asks(self, prompt: ChatPrompt | TextPrompts) -> bool:
        """Whether the engine is asked about a prompt."""
        if self.engine is None:
            return False
        if self.local is None or self.suspected:
            return True
        return bool(self.asked) and not self.asked.isdisjoint(shapes_of(prompt))

    def compare(self, equal: bool) -> None:
        """An engine's tokens were compared with ours of the same prompt. What was suspected may prove right."""
        self._compared.append(equal)
        if len(self._compared) == _COMPARED and all(self._compared):
            self.suspected = False
