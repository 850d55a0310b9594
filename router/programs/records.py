"""The record of a session, one call of it, and the key by which it is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec
from xxhash import xxh3_64_intdigest

from indexer import Target
from router.apis.requests import RoutedRequest
from router.programs.working_sets import NO_CONTEXT, WorkingSet

# The tenant, the name of the model or adapter, the salt of its prompts, and the session's own name.
SessionKey: TypeAlias = tuple[str, str | None, str | None, str]


def key_of(prompt: RoutedRequest, tenant: str) -> SessionKey | None:
    """Return the key of a request's session; None for names of users, and where prompts are not known."""
    identity = prompt.identity
    if identity is None or identity.by_user or len(prompt.identities) != 1 or not prompt.reads_cache:
        return None
    return tenant, prompt.name, prompt.cache_salt, identity.session


def number_of(key: SessionKey) -> int:
    """Return the number by which routers know a session."""
    return xxh3_64_intdigest(msgspec.json.encode(key)) >> 16


class Session:
    """One session.

    - `context`: the marks of its last prompt; `tokens`: their number of tokens, with its last answer.
    - `target`: the target of its last call; None if nothing of it is held there any more.
    - `announced`: the tokens of its context, if its last call announced that it continues.
    - `calls`: its calls in flight. `seen_at`: when the last one arrived. `ended_at`: when the last answer ended.
    - `charged`, `prefill`: the working sets of its target, and of the prefill worker of a pair, that it is charged to;
      None while it is not live.
    - `number`: its key as a number, which other routers know it by.
    - `name`: its own name; "" if only other routers have sent calls of it.
    - `program`: its tenant, and the name of the run that it belongs to.
    - `shared`: the name turned out to be that of many callers.
    """

    __slots__ = (
        "announced",
        "answer",
        "calls",
        "charged",
        "context",
        "ended_at",
        "name",
        "number",
        "prefill",
        "program",
        "seen_at",
        "shared",
        "strangers",
        "target",
        "tokens",
        "until",
    )

    def __init__(self, number: int) -> None:
        self.number = number
        self.name = ""
        self.program = "", ""
        self.context = NO_CONTEXT
        self.tokens = 0
        self.answer = 0
        self.announced = 0
        self.target: Target | None = None
        self.calls = 0
        self.charged: WorkingSet | None = None
        self.prefill: WorkingSet | None = None
        self.seen_at = 0.0
        self.ended_at = 0.0
        self.until = 0.0
        self.shared = False
        self.strangers = 0

    @property
    def begun(self) -> bool:
        """True once a call of it was answered or is in flight."""
        return self.calls > 0 or self.tokens > 0


class Call:
    """One call of a session, from its arrival to its end. Call it when its request ends.

    - `final`: the session announced that it ends with this call.
    - `next_call`: the announced seconds from the answer to the session's next call; None: not announced.
    - `returns`: the session announced that it continues.
    - `known`: the tokens of the session's context before it was sent.
    - `counted`: its lost tokens are counted.
    - `held`: no target had room for it when it was tried last.
    - `exempt`: it has waited for the longest time, so nothing holds it any more.
    - `subagent`: it begins a session of a program that has a live one.
    - `output`: the tokens of its answer; 0 if they are not known.
    """

    __slots__ = (
        "_ended",
        "counted",
        "exempt",
        "final",
        "held",
        "known",
        "next_call",
        "output",
        "returns",
        "session",
        "subagent",
        "tokens",
    )

    def __init__(
        self, ended: Callable[[Any, bool], None], session: Session, tokens: int, final: bool, next_call: float | None
    ) -> None:
        self._ended = ended
        self.session = session
        self.tokens = tokens
        self.final = final
        self.next_call = next_call
        self.returns = False
        self.known = 0
        self.counted = False
        self.held = False
        self.exempt = False
        self.subagent = False
        self.output = 0

    def __call__(self, failed: bool = False) -> None:
        """End the call. `failed`: its prompt was not computed."""
        self._ended(self, failed)
