"""Chats of plain texts, put together without their template: what it prints around the contents is known.

What a template prints around contents that it only prints depends on nothing but the roles of the messages, in their
order (router/tokens/opaque_texts.py). So it renders each order of roles once, and from then on the contents are put
into what it printed. Chats with more to them than a role and a text that is not empty are left to the template.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jinja2

from router.apis.message_normalization import BILLING_HEADER
from router.tokens.incremental_render import pieces_of
from router.tokens.opaque_texts import PROBES, OpaqueRendering, OpaqueText, Place

Message = dict[str, Any]

# In longer chats what is new is rendered (router/tokens/incremental_render.py).
MAX_MESSAGES = 64
# So many orders of roles are kept.
_MOST = 512
# Those that templates know; a client may send any others.
_ROLES = frozenset(("system", "user", "assistant", "tool"))


class Skeleton:
    """What a template prints for one order of roles."""

    def __init__(self, parts: list[str | Place]) -> None:
        self._parts = [part if isinstance(part, str) else "" for part in parts]
        # Where contents belong among them: which ones, and those without the spaces around them.
        self._whole = [(at, part.content) for at, part in enumerate(parts) if isinstance(part, Place)]
        self._stripped = [at for at, part in enumerate(parts) if isinstance(part, Place) and part.stripped]

    def text(self, contents: list[str]) -> str:
        """The chat's text."""
        parts = self._parts.copy()
        for at, content in self._whole:
            parts[at] = contents[content]
        for at in self._stripped:
            parts[at] = parts[at].strip()
        return "".join(parts)


class Skeletons:
    """The skeletons of one chat template, for chats that set none of its variables but whether an answer is begun.

    Any number of threads may use one.
    """

    def __init__(
        self,
        opaque: OpaqueRendering,
        template: jinja2.Template,
        variables: Callable[[bool], dict[str, Any]],
        prepare: Callable[[list[Message]], list[Message]],
    ) -> None:
        """`variables`: all that the template may read but the messages. `prepare`: the messages as it takes them."""
        self._opaque = opaque
        self._template = template
        self._variables = variables
        self._prepare = prepare
        self._open: dict[tuple[str, ...], Skeleton | None] = {}
        self._closed: dict[tuple[str, ...], Skeleton | None] = {}

    def text(self, messages: list[Message], begins_answer: bool) -> str | None:
        """The text of a chat; None where the template has to render it."""
        if not 0 < len(messages) <= MAX_MESSAGES:
            return None
        roles: list[str] = []
        contents: list[str] = []
        for message in messages:
            content = message.get("content")
            if len(message) != 2 or not isinstance(content, str) or not content:
                return None
            if content.startswith(BILLING_HEADER):  # of which something is left out
                return None
            roles.append(message["role"])
            contents.append(content)
        order = tuple(roles)
        known = self._open if begins_answer else self._closed
        if order not in known:
            if not _ROLES.issuperset(order):
                return None
            if len(known) >= _MOST:
                known.clear()
            known[order] = self._skeleton(order, begins_answer)
        skeleton = known.get(order)
        return None if skeleton is None else skeleton.text(contents)

    def _skeleton(self, roles: tuple[str, ...], begins_answer: bool) -> Skeleton | None:
        variables = self._variables(begins_answer)
        try:
            opaque = [OpaqueText(Place(number, False)) for number in range(len(roles))]
            parts = self._opaque.parts({**variables, "messages": self._messages(roles, opaque)})
            if parts is None:
                return None
            skeleton = Skeleton(parts)
            # What was found is tried out, too.
            for probe in PROBES:
                texts = [probe.replace("0", str(number)) for number in range(len(roles))]
                rendered = pieces_of(self._template, {**variables, "messages": self._messages(roles, texts)})
                if "".join(rendered) != skeleton.text(texts):
                    return None
        except Exception:
            return None  # a rendering of the whole says why, in the template's words
        return skeleton

    def _messages(self, roles: tuple[str, ...], contents: list[Any]) -> list[Message]:
        """Messages of these contents, whatever they are, as the template takes them."""
        prepared = self._prepare([{"role": role, "content": "text"} for role in roles])
        for message, content in zip(prepared, contents, strict=True):
            if isinstance(message["content"], str):
                message["content"] = content
            else:
                message["content"][0]["text"] = content
        return prepared
