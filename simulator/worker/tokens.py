"""The simulated model: its tokenizer and chat template, and its answers, chosen by the prompt alone.

If a prompt ends with the beginning of an answer, the answer continues there, as a real model's would.
"""

from __future__ import annotations

import json
import random
import re
from array import array
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

from simulator.worker.engine import Answer
from simulator.worker.settings import BUNDLED_MODEL

# The special tokens that chat templates know by name.
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
# A mark of the last message's end, if the message is continued.
_END_MARK = "END_OF_THE_FINAL_MESSAGE"


class TemplateError(ValueError):
    """Messages that the chat template refuses."""


class ChatTokenizer:
    """The tokenizer of a model's folder. Prompts are rendered as in vLLM."""

    def __init__(self, path: str = str(BUNDLED_MODEL)) -> None:
        """Load the tokenizer. Raises ValueError for a folder without a readable one."""
        from tokenizers import Tokenizer  # imported late, because only a running worker needs it

        try:
            self._backend: Any = Tokenizer.from_file(str(Path(path) / "tokenizer.json"))
            config = json.loads((Path(path) / "tokenizer_config.json").read_text(encoding="utf-8"))
        except Exception as error:  # tokenizers raises no specific exception
            raise ValueError(f"tokenizer: {path} has no readable tokenizer: {error}") from error
        self._backend.no_padding()
        self._backend.no_truncation()
        self._special = {name: config[name] for name in _NAMED_TOKENS if isinstance(config.get(name), str)}
        separate = Path(path) / "chat_template.jinja"
        source = separate.read_text(encoding="utf-8") if separate.exists() else config.get("chat_template") or ""
        self._template = _environment().from_string(source)
        self._template_takes_parts = self._probe_parts()

    @property
    def vocabulary_size(self) -> int:
        return int(self._backend.get_vocab_size())

    @property
    def eos_token(self) -> int | None:
        eos: int | None = self._backend.token_to_id(self._special.get("eos_token", ""))
        return eos

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        # The backend, unlike its wrapper, is thread-safe.
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
        text: str = self._backend.decode(tokens, skip_special_tokens=skip_special_tokens)
        return text

    def token_strings(self, tokens: list[int]) -> list[str]:
        return [self._backend.id_to_token(token) for token in tokens]

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template_arguments: Any,
    ) -> str:
        """Render the prompt of a conversation. Raises TemplateError if the template refuses it."""
        try:
            prepared = [self._prepared(message) for message in messages]
            if continue_final_message:
                last = prepared[-1]["content"]
                mark = [{"type": "text", "text": _END_MARK}] if isinstance(last, list) else _END_MARK
                prepared[-1]["content"] = last + mark
            text = self._rendered(
                prepared,
                tools=tools and [_normalized_tool(tool) for tool in tools],
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                **template_arguments,
            )
            if continue_final_message:
                text = text[: text.rindex(_END_MARK)]
        except Exception as error:  # templates are programs and raise any exception
            raise TemplateError(f"messages: the chat template refuses them: {error}") from error
        return text

    def _prepared(self, message: dict[str, Any]) -> dict[str, Any]:
        message = dict(message)
        content = message.get("content")
        if content is None:
            message["content"] = ""
        elif isinstance(content, list) and (message["role"] == "tool" or not self._template_takes_parts):
            message["content"] = "\n".join(part["text"] for part in content)
        if message.get("tool_calls"):
            message["tool_calls"] = [_with_parsed_arguments(call) for call in message["tool_calls"]]
        else:
            message.pop("tool_calls", None)
        return message

    def _rendered(self, messages: list[dict[str, Any]], **variables: Any) -> str:
        given = {"tools": None, "documents": None, "add_generation_prompt": False} | self._special | variables
        return str(self._template.render(messages=messages, **given))

    def _probe_parts(self) -> bool:
        """Return whether the template supports content as parts: one part then renders as its text does."""
        as_text, as_part = (
            [{"role": "user", "content": content}] for content in ("probe", [{"type": "text", "text": "probe"}])
        )
        try:
            rendered = [self._rendered(probe) for probe in (as_text, as_part)]
        except Exception:  # templates raise any exception
            return False
        return bool(rendered[0] == rendered[1])


def _environment() -> Any:
    """Return the Jinja environment that transformers uses for chat templates."""
    from jinja2 import TemplateError as JinjaError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise JinjaError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = raise_exception
    return environment


def _normalized_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool with the fields that vLLM gives a template, in its order. Absent fields are null."""
    function = tool.get("function") or {}
    shown = {name: function.get(name) for name in ("name", "description", "parameters")}
    if function.get("strict") is not None:
        shown["strict"] = function["strict"]
    return {"type": "function", "function": shown}


def _with_parsed_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """Return a tool call with parsed arguments, because templates expect an object instead of JSON text."""
    function = dict(call.get("function") or {})
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = {}
    function["arguments"] = arguments
    return {**call, "function": function}


MIN_LENGTH, MAX_LENGTH = 16, 256  # tokens of an answer that ends by itself
MAX_BEGUN = 2048  # tokens of a begun answer at the end of a prompt that can be continued


class AnswerWriter:
    """A writer of answers in ordinary tokens. The same prompt always has the same answer.

    The tokens are whole words that the tokenizer encodes to the same tokens. Therefore an answer that is part of the
    next prompt is found in the cache.
    """

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._eos = tokenizer.eos_token
        self._text: dict[int, str] = {}
        for token in range(tokenizer.vocabulary_size):
            text = tokenizer.decode([token], skip_special_tokens=True)
            if text and "\ufffd" not in text:
                self._text[token] = text
        words = [token for token, text in self._text.items() if re.fullmatch(r" [a-z]{2,}", text)]
        openings = [token for token, text in self._text.items() if re.fullmatch(r"[A-Z][a-z]+", text)]
        self._words, self._openings = (
            [token for token in tokens if tokenizer.encode(self._text[token], add_special_tokens=False) == [token]]
            or list(self._text)
            for tokens in (words, openings)
        )
        self._word_set, self._opening_set = frozenset(self._words), frozenset(self._openings)

    def answer(
        self,
        prompt: list[int],
        max_tokens: int,
        min_tokens: int = 0,
        ignore_eos: bool = False,
        adapter: str | None = None,
        choice: int = 0,
    ) -> Answer:
        """Return an answer of at most `max_tokens` tokens. If it ends by itself, its last token is the end token."""
        key = f"{choice} {adapter}".encode()
        begun = self._begun(prompt, key)
        source = _source(prompt[: len(prompt) - begun], key)
        length = max(source.randint(MIN_LENGTH, MAX_LENGTH) - begun, min_tokens)
        stops = length < max_tokens and not ignore_eos and self._eos is not None
        count = max(length, 0) if stops else max_tokens
        tokens = self._tokens(source, begun + count)[begun:]
        if stops and self._eos is not None:
            return Answer([*tokens, self._eos], "stop")
        return Answer(tokens, "length")

    def _tokens(self, source: random.Random, count: int) -> list[int]:
        return [source.choice(self._openings), *source.choices(self._words, k=max(count - 1, 0))][:count]

    def _begun(self, prompt: list[int], key: bytes) -> int:
        """Return the number of tokens at the end of a prompt that continue an answer to the tokens before them."""
        for begun in range(1, min(MAX_BEGUN, len(prompt) - 1) + 1):
            token = prompt[-begun]
            if token in self._opening_set:
                source = _source(prompt[: len(prompt) - begun], key)
                source.randint(MIN_LENGTH, MAX_LENGTH)
                return begun if self._tokens(source, begun) == prompt[-begun:] else 0
            if token not in self._word_set:
                return 0
        return 0

    def text(self, token: int) -> str:
        """Return the text of an answer's token, empty for the end token."""
        return self._text.get(token, "")


def _source(prompt: list[int], key: bytes) -> random.Random:
    seed = blake2b(array("I", prompt).tobytes(), digest_size=8)
    seed.update(key)
    return random.Random(seed.digest())


@lru_cache(maxsize=2)
def load_model(path: str) -> tuple[ChatTokenizer, AnswerWriter]:
    """Return the tokenizer of a folder and the writer of its answers, which the workers of a process share.

    Raises ValueError for a folder without a readable tokenizer.
    """
    tokenizer = ChatTokenizer(path)
    return tokenizer, AnswerWriter(tokenizer)
