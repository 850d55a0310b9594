"""A resumable stream: the answer so far, and the part of each event that the client receives.

The client receives one stream: one id, one role, no token twice, and the usage of the whole. Events are forwarded
completely, so that an incomplete one can be repeated. If a chunk has content that cannot be continued (a tool call,
reasoning, log probabilities), the stream ends with its worker.
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from kvevents.decoding import json_reader
from router.forwarding.failover.resumable_request import ResumableRequest

_END_OF_EVENT: Final = re.compile(rb"\r?\n\r?\n")
_LONGEST_EVENT: Final = 2**20  # bytes; a stream with a longer event is forwarded unparsed
_DONE: Final = b"[DONE]"
# Finish reasons of a worker that is shut down or whose engine died.
_GIVEN_UP: Final = ("abort", "error")
_DELTA: Final = frozenset({"role", "content"})
# Fields with one value for the whole stream.
_NAMES: Final = ("id", "created", "model", "system_fingerprint")
# Markers of reasoning inside the text, which templates remove from earlier messages.
_REASONING: Final = ("<think", "</think", "[THINK]", "<|channel|>")
_REPLACEMENT: Final = "\ufffd"

_decode = json_reader(dict[str, Any])
_encode = msgspec.json.Encoder().encode


class ResumableStream:
    """The stream that answers a request, over one or more workers.

    - `problem`: why the worker will not complete it, if its events state that.
    - `prompt_ids`, `output_ids`: the token ids, if known.
    - `given`: the number of tokens of the text; None if unknown.
    - `tokens_before`: the number of tokens from earlier workers.
    """

    def __init__(self, request: ResumableRequest) -> None:
        self.request = request
        self.begun = False
        self.problem: str | None = None
        self.error: bytes | None = None
        self.text = ""
        self.prompt_ids: list[int] | None = None
        self.output_ids: list[int] | None = []
        self.given: int | None = 0
        self.tokens_before = 0
        self._resumed = 0  # number of workers that continued it
        self._passes_all = False  # its format is unknown, so it is forwarded unparsed
        self._exact = True
        self._unfinished = b""  # the beginning of an incomplete event
        self._held_ids: list[int] = []  # of chunks without text, such as parts of a character
        self._common: dict[str, Any] = {}
        self._object = ""
        self._role_passed = False
        self._finished = False
        self._done = False
        self._prompt_tokens: int | None = None
        self._counted: int | None = None  # by this worker, at its last chunk
        self._usage_passed = False

    def filter(self, data: bytes, ended: bool) -> bytes:
        """Return the bytes to forward after `data` is received. After a `problem` nothing is forwarded."""
        self.begun = True
        if self._passes_all:
            return data
        *events, self._unfinished = _END_OF_EVENT.split(self._unfinished + data)
        passed = []
        for event in events:
            passed.append(self._event(event))
            if self.problem is not None:
                return b"".join(passed)
        if len(self._unfinished) > _LONGEST_EVENT:
            self._passes_all, self._exact = True, False
        if ended and not (self._done or self._finished or self._passes_all):
            self.problem = "the stream ended before its answer"
            return b"".join(passed)
        if ended or self._passes_all:
            passed.append(self._unfinished)
            self._unfinished = b""
        return b"".join(passed)

    @property
    def can_go_on(self) -> bool:
        """True if the answer so far can be continued."""
        if not self._exact or self._finished or self.text.endswith(_REPLACEMENT):
            return False
        return not (self.request.is_chat and any(mark in self.text for mark in _REASONING))

    def all_ids(self) -> list[int] | None:
        """Return the token ids of the prompt and the answer so far; None if they are unknown."""
        prompt = self.prompt_ids if self.prompt_ids is not None else self.request.prompt
        return prompt + self.output_ids if isinstance(prompt, list) and self.output_ids is not None else None

    def ending(self) -> bytes | None:
        """Return the end of a stream with nothing left to generate; None if there is more, or if the end is unknown."""
        if self._done:
            return b""
        if not self._exact:
            return None
        last = b""
        if not self._finished:
            if self.given is None or self.given != self.request.max_tokens:
                return None
            last = self._last_chunk()
        if self.request.shows_usage and not self._usage_passed:
            total = self._total()
            if total is None or self._prompt_tokens is None:
                return None
            usage = {
                "prompt_tokens": self._prompt_tokens,
                "total_tokens": self._prompt_tokens + total,
                "completion_tokens": total,
            }
            last += _data({**self._beginning(), "choices": [], "usage": usage})
        return last + b"data: [DONE]\n\n"

    def goes_on(self, given: int | None) -> None:
        """Prepare for the next worker; `given` is the number of tokens so far."""
        self._resumed += 1
        self.problem = self.error = None
        self._unfinished = b""
        self._held_ids = []
        self._counted = None
        self.given = given
        self.tokens_before = given or 0

    def comment(self, worker: str) -> bytes:
        """Return a comment about the failover, which parsers of events skip."""
        return b": kvrouter: %b goes on after %d tokens\n\n" % (worker.encode(), self.tokens_before)

    # Events

    def _event(self, event: bytes) -> bytes:
        if event.startswith(b":"):
            return event + b"\n\n"
        data = event[5:].strip() if event.startswith(b"data:") else b""
        if data == _DONE:
            self._done = True
            return b"data: [DONE]\n\n"
        try:
            chunk = _decode(data)
        except msgspec.DecodeError:
            self._exact = False
            return event + b"\n\n"
        if "error" in chunk:
            return self._told_error(event, chunk["error"])
        choices = chunk.get("choices")
        if not choices:
            return self._usage_event(chunk)
        if not isinstance(choices, list) or len(choices) > 1 or not isinstance(choices[0], dict):
            self._exact = False
            return event + b"\n\n"
        return self._chunk(chunk, choices[0])

    def _told_error(self, event: bytes, error: object) -> bytes:
        code = error.get("code") if isinstance(error, dict) else None
        if self._finished or (isinstance(code, int) and code < 500):
            self._exact = False
            return event + b"\n\n"
        self.problem, self.error = "the worker sent an error", event + b"\n\n"
        return b""

    def _chunk(self, chunk: dict[str, Any], choice: dict[str, Any]) -> bytes:
        finish = choice.get("finish_reason")
        if finish in _GIVEN_UP:
            self.problem, self.error = f"the worker ended with {finish!r}", _data(chunk)
            return b""
        text, only_role = self._read_content(choice)
        self._count(chunk, choice, text, finish is not None)
        if finish is not None:
            self._finished = True
        self._take_out_ids(chunk, choice)
        self._correct_usage(chunk)
        if only_role and finish is None:
            return b""
        if self._common:
            chunk |= self._common
        else:
            self._common = {name: chunk[name] for name in _NAMES if name in chunk}
            self._object = chunk.get("object", "")
        return _data(chunk)

    def _read_content(self, choice: dict[str, Any]) -> tuple[str, bool]:
        """Return the text of a chunk, and whether a repeated role was its only content. The role is removed."""
        if choice.get("logprobs") is not None:
            self._exact = False
        if not self.request.is_chat:
            text = choice.get("text") or ""
            self.text += text
            return text, False
        delta = choice.get("delta")
        if not isinstance(delta, dict):
            self._exact = False
            return "", False
        if any(value for name, value in delta.items() if name not in _DELTA):
            self._exact = False
        again = self._role_passed and delta.pop("role", None) is not None
        self._role_passed = self._role_passed or "role" in delta
        text = delta.get("content") or ""
        self.text += text
        return text, again and not any(delta.values())

    def _count(self, chunk: dict[str, Any], choice: dict[str, Any], text: str, finished: bool) -> None:
        """Count the tokens of a chunk. Tokens without text count when text follows: otherwise they are repeated."""
        prompt_ids = chunk.get("prompt_token_ids") or choice.get("prompt_token_ids")
        if prompt_ids is not None and not self._resumed:
            self.prompt_ids, self._prompt_tokens = prompt_ids, len(prompt_ids)
        ids = choice.get("token_ids")
        if ids is not None:
            self._held_ids += ids
        elif text:
            self.output_ids = None
        usage = chunk.get("usage")
        if isinstance(usage, dict) and type(usage.get("completion_tokens")) is int:
            self._counted = usage["completion_tokens"]
            if not self._resumed:
                self._prompt_tokens = usage.get("prompt_tokens")
        if not text and not finished:
            return
        if self.output_ids is not None:
            self.output_ids += self._held_ids
            self._held_ids = []
            self.given = len(self.output_ids)
        elif self._counted is not None:
            self.given = self.tokens_before + self._counted
        else:
            self.given = None

    def _take_out_ids(self, chunk: dict[str, Any], choice: dict[str, Any]) -> None:
        if self._resumed or not self.request.shows_ids:
            chunk.pop("prompt_token_ids", None)
            choice.pop("prompt_token_ids", None)
        if not self.request.shows_ids:
            choice.pop("token_ids", None)

    # Usage

    def _total(self) -> int | None:
        if self.output_ids is not None:
            return len(self.output_ids)
        return None if self._counted is None else self.tokens_before + self._counted

    def _usage_event(self, chunk: dict[str, Any]) -> bytes:
        if not self.request.shows_usage:
            return b""
        self._usage_passed = True
        self._make_whole(chunk.get("usage"))
        return _data(chunk | self._common)

    def _correct_usage(self, chunk: dict[str, Any]) -> None:
        """Correct a chunk's usage to that of the whole answer, or remove it if the client did not ask for it."""
        if chunk.get("usage") is None:
            return
        if self.request.shows_each_usage:
            self._make_whole(chunk["usage"])
        else:
            del chunk["usage"]

    def _make_whole(self, usage: object) -> None:
        """Add the tokens of earlier workers, which this worker counts in its prompt."""
        if not self._resumed or not isinstance(usage, dict):
            return
        prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if type(prompt) is not int or type(completion) is not int:
            return
        prompt = prompt - self.tokens_before if self._prompt_tokens is None else self._prompt_tokens
        completion += self.tokens_before
        usage |= {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict) and type(details.get("cached_tokens")) is int:
            details["cached_tokens"] = min(details["cached_tokens"], prompt)

    # Chunks that the router creates

    def _beginning(self) -> dict[str, Any]:
        return {**self._common, "object": self._object}

    def _last_chunk(self) -> bytes:
        content: dict[str, Any] = {"delta": {}} if self.request.is_chat else {"text": ""}
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": "length"}
        return _data({**self._beginning(), "choices": [choice]})


def _data(chunk: dict[str, Any]) -> bytes:
    return b"data: %b\n\n" % _encode(chunk)
