"""Noise in the prompts of sessions: turns that differ early, although the text behind the difference is the same.

A date, a counter or a list in another order ends the prefix that two turns share, and all tokens behind it are computed
again. A sample of sessions is compared, off the path of requests. A session counts after `_TURNS` such turns.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeAlias

import structlog

from indexer.hashing import PackedPrompt
from router.apis.requests import RoutedRequest
from router.cache_state.prompt_difference import Cause, Difference, find_difference, likely_cause

log = structlog.get_logger()

# Turns of a session with a difference, before it is noise: a user may edit a message once.
_TURNS: Final = 2
# Turns without a difference after which a session makes room for another one.
_CLEAN: Final = 16
_MOST_SESSIONS: Final = 256
_MOST_BYTES: Final = 64 * 2**20
_LONGEST: Final = 4 * 2**20
# Prompts that a turn is compared with: agents mix calls of other kinds into a session.
_KEPT_PROMPTS: Final = 2
_WAITING: Final = 512
# Seconds of one `check`, seconds until an idle session is dropped, and those until noise is forgotten.
_BUDGET: Final = 0.005
_IDLE: Final = 300.0
_FORGOTTEN: Final = 600.0
_MOST_KINDS: Final = 32
_MOST_FINDINGS: Final = 3

SessionKey: TypeAlias = tuple[str, str | None, str]  # the model, the cache salt, the session's name


class _Session:
    __slots__ = ("clean", "noisy", "prompts", "seen")

    def __init__(self) -> None:
        self.prompts: list[bytes] = []
        self.seen = 0.0
        self.clean = 0
        self.noisy: list[tuple[str, Difference]] = []  # until the session counts


class _Noise:
    """The noise of one kind: its sessions and turns, the last difference, and the tokens computed again."""

    __slots__ = ("last", "lost", "seen", "sessions", "turns")

    def __init__(self, last: Difference) -> None:
        self.last = last
        self.lost = 0
        self.seen = 0.0
        self.sessions: set[SessionKey] = set()
        self.turns = 0


class PromptNoise:
    """The sampled sessions, and the noise that was found.

    - `text_of`: returns the text of a model's tokens; None if they cannot be decoded here.
    - `shows_text`: whether log lines have the differing text.
    """

    def __init__(
        self,
        text_of: Callable[[str, bytes], str | None],
        shows_text: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._text_of = text_of
        self._shows_text = shows_text
        self._clock = clock
        self._waiting: deque[tuple[SessionKey, PackedPrompt]] = deque(maxlen=_WAITING)
        self._sessions: dict[SessionKey, _Session] = {}
        self._bytes = 0
        self._found: dict[tuple[str, str], _Noise] = {}  # by model and cause

    def sent(self, request: RoutedRequest, model: str) -> None:
        """Keep a turn of a named session for the next `check`, if its tokens are known."""
        caller = request.identity
        if caller is None or caller.by_user or request.by_text or len(request.identities) != 1:
            return
        self._waiting.append(((model, request.cache_salt, caller.session), request.identities[0]))

    def check(self) -> None:
        """Compare the turns that were sent since, for a few milliseconds. The others are dropped."""
        begun, now = time.perf_counter(), self._clock()
        while self._waiting and time.perf_counter() < begun + _BUDGET:
            key, prompt = self._waiting.popleft()
            self._compare(key, prompt.tokens, now)
        self._waiting.clear()
        for key in [key for key, session in self._sessions.items() if session.seen < now - _IDLE]:
            self._drop(key)
        for kind in [kind for kind, noise in self._found.items() if noise.seen < now - _FORGOTTEN]:
            del self._found[kind]

    def findings(self) -> list[dict[str, Any]]:
        """Return the noise that costs most, at most `_MOST_FINDINGS` kinds."""
        worst = sorted(self._found.items(), key=lambda item: item[1].lost, reverse=True)[:_MOST_FINDINGS]
        return [
            {
                "finding": "prompts_vary",
                "model": model,
                "detail": f"turns of sessions ({len(noise.sessions)} in the sample) differ after "
                f"{noise.last.place:,} tokens; {noise.last.equal:,} equal tokens follow. Likely cause: {cause}. "
                f"{noise.lost:,} tokens were computed again in {noise.turns} turns",
            }
            for (model, cause), noise in worst
        ]

    def _compare(self, key: SessionKey, tokens: bytes, now: float) -> None:
        if len(tokens) > _LONGEST:
            return
        session = self._sessions.get(key)
        if session is None:
            if len(self._sessions) >= _MOST_SESSIONS or self._bytes + len(tokens) > _MOST_BYTES:
                return
            session = self._sessions[key] = _Session()
        session.seen = now
        worst: Difference | None = None
        compared = b""
        for earlier in session.prompts:
            difference = find_difference(earlier, tokens)
            if difference is None and _shares_most(earlier, tokens):
                worst = None
                break
            if difference is not None and (worst is None or difference.equal > worst.equal):
                worst, compared = difference, earlier
        if worst is not None:
            self._add(key, session, worst, likely_cause(worst, compared, tokens, partial(self._text_of, key[0])), now)
        elif session.prompts:
            session.clean += 1
        self._keep(key, session, tokens)

    def _keep(self, key: SessionKey, session: _Session, tokens: bytes) -> None:
        self._bytes += len(tokens)
        session.prompts.append(tokens)
        if len(session.prompts) > _KEPT_PROMPTS:
            self._bytes -= len(session.prompts.pop(0))
        if session.clean >= _CLEAN or self._bytes > _MOST_BYTES:
            self._drop(key)

    def _add(self, key: SessionKey, session: _Session, difference: Difference, cause: Cause, now: float) -> None:
        session.clean = 0
        session.noisy.append((cause.name, difference))
        if len(session.noisy) < _TURNS:
            return
        for name, each in session.noisy[-_TURNS:] if len(session.noisy) == _TURNS else session.noisy[-1:]:
            kind = key[0], name
            noise = self._found.get(kind)
            if noise is None:
                if len(self._found) >= _MOST_KINDS:
                    continue
                noise = self._found[kind] = _Noise(each)
                texts = {"before": cause.removed, "after": cause.added} if self._shows_text else {}
                log.warning(
                    "turns of a session differ, and the text behind the difference is the same",
                    model=key[0],
                    place=each.place,
                    equal_tokens=each.equal,
                    likely_cause=name,
                    **texts,
                )
            noise.last, noise.seen = each, now
            noise.lost += each.equal
            noise.turns += 1
            if len(noise.sessions) < _MOST_SESSIONS:
                noise.sessions.add(key)
        del session.noisy[:-_TURNS]

    def _drop(self, key: SessionKey) -> None:
        session = self._sessions.pop(key)
        self._bytes -= sum(map(len, session.prompts))


def _shares_most(earlier: bytes, later: bytes) -> bool:
    """Return whether a turn continues another one, up to the beginning of the earlier one's answer."""
    return later.startswith(earlier[: len(earlier) * 3 // 4])
