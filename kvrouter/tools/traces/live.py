"""A trace replayed to a router, with prompts made from its block IDs."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import Any

import aiohttp
import msgspec

from kvevents.decoding import read_json
from kvrouter.tools.traces.results import Answer, Run, percentile
from router.http.client import connection_problem, refuse_redirects
from simulator.fleet.trace import Trace, TraceLine

# IDs that exist in every vocabulary, and are special tokens in none.
_TOKENS = range(1000, 3000)
# One token each, with the space before, in the vocabularies of most models.
_TEXT = (
    "the of and to in is that for it as was with be by on not he his but at are this have from or had an they "
    "which one you were all her she there would their we him been has when while will no more if out so up said "
    "what its about than into them can only other time new some could these two may first then do any like my now "
    "over such our man me even most made after also did many off before must well back through years much where "
)
_WORDS = tuple(_TEXT.split())


class Prompts:
    """The prompts of a replay. Prompts of different seeds share nothing."""

    def __init__(self, seed: str, block_tokens: int) -> None:
        self._seed = seed
        self._block_tokens = block_tokens
        self._block = lru_cache(maxsize=2**25 // block_tokens)(self._made)

    def token_ids(self, line: TraceLine, number: int) -> list[int]:
        """Return the prompt of a trace line as token IDs, with the trace's length. `number` is the line's position."""
        return [_TOKENS[draw % len(_TOKENS)] for draw in self._draws(line, number)]

    def text(self, line: TraceLine, number: int) -> str:
        """Return the prompt of a trace line as text, with about the trace's number of tokens."""
        return "".join(f" {_WORDS[draw % len(_WORDS)]}" for draw in self._draws(line, number))

    def _draws(self, line: TraceLine, number: int) -> array[int]:
        draws = array("H")
        for block in line.hash_ids:
            draws += self._block(str(block))
        while len(draws) < line.input_length:  # a trace may omit the last block
            draws += self._made(f"end of {number}, {len(draws)}")
        return draws[: max(line.input_length, 1)]

    def _made(self, name: str) -> array[int]:
        return array("H", Random(f"{self._seed} {name}").randbytes(2 * self._block_tokens))


AT_ONCE = 2048  # requests; further ones wait, and the report mentions it
ANSWER_SECONDS = 600.0
_ASK_SECONDS = 10.0
_LATE_SECONDS = 0.1
_MAX_LINE = 1 << 24


class ReplayError(Exception):
    """A router that accepts no requests. The message has the reason."""


@dataclass(frozen=True, slots=True)
class LiveTarget:
    """A router as the target of a replay. `model`: `None` selects its only one."""

    label: str
    url: str
    model: str | None
    api_key: str
    speed: float
    max_tokens: int
    seed: str


async def replay_live(trace: Trace, target: LiveTarget, on_answer: Callable[[], None]) -> Run:
    """Send a trace. `on_answer` is called at the end of each request. Raises ReplayError if none is accepted."""
    headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS, sock_connect=10)
    async with aiohttp.ClientSession(
        middlewares=(refuse_redirects,),
        headers=headers,
        timeout=timeout,
        connector=aiohttp.TCPConnector(limit=AT_ONCE),
        read_bufsize=_MAX_LINE,
    ) as session:
        model = target.model or await _only_model(session, target.url)
        sender = _Sender(session, target, model, Prompts(target.seed, trace.block_tokens))
        await sender.find_out_what_is_taken()
        return await sender.send(trace.lines, on_answer)


async def _only_model(session: aiohttp.ClientSession, url: str) -> str:
    try:
        async with session.get(f"{url}/v1/models", timeout=aiohttp.ClientTimeout(_ASK_SECONDS)) as response:
            response.raise_for_status()
            models = [each["id"] for each in read_json(await response.read())["data"]]
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError) as error:
        raise ReplayError(f"{url} does not list its models: {connection_problem(error)}") from error
    if len(models) != 1:
        raise ReplayError(f"{url} serves {', '.join(models) or 'no model'}: set --model")
    return str(models[0])


class _Sender:
    def __init__(self, session: aiohttp.ClientSession, target: LiveTarget, model: str, prompts: Prompts) -> None:
        self._session = session
        self._target = target
        self._model = model
        self._prompts = prompts
        self._as_tokens = True
        self._options: dict[str, Any] = {"ignore_eos": True}

    async def find_out_what_is_taken(self) -> None:
        """Find out whether the server accepts token IDs and `ignore_eos`. If not, send text and shorter answers."""
        refused = ""
        for as_tokens, options in ((True, {"ignore_eos": True}), (True, {}), (False, {})):
            self._as_tokens, self._options = as_tokens, options
            answer = Answer(0.0, 16)
            await self._ask(TraceLine(0, 16, 2, []), -1, answer, time.monotonic())
            if not answer.error:
                return
            refused = answer.error
        raise ReplayError(f"{self._target.url} accepts no completions: {refused}")

    async def send(self, lines: Sequence[TraceLine], on_answer: Callable[[], None]) -> Run:
        """Send all requests at their times."""
        answers: list[Answer] = []
        lates: list[float] = []
        begun, first = time.monotonic(), lines[0].timestamp

        in_flight = most = 0

        async def ask(line: TraceLine, number: int, answer: Answer) -> None:
            nonlocal in_flight, most
            in_flight += 1
            most = max(most, in_flight)
            await self._ask(line, number, answer, begun + answer.arrival)
            in_flight -= 1
            on_answer()

        async with asyncio.TaskGroup() as tasks:
            for number, line in enumerate(lines):
                arrival = (line.timestamp - first) / 1000 / self._target.speed
                if (left := begun + arrival - time.monotonic()) > 0:
                    await asyncio.sleep(left)
                lates.append(time.monotonic() - begun - arrival)
                answers.append(Answer(arrival, line.input_length))
                tasks.create_task(ask(line, number, answers[-1]))
        run = Run(self._target.label, answers, sorted({answer.worker for answer in answers if answer.worker}))
        if (late := percentile(lates, 0.99)) > _LATE_SECONDS:
            run.notes.append(f"One request in a hundred was sent {late:.1f} s late or more: this machine is too slow.")
        if most > AT_ONCE:
            run.notes.append(f"{most} requests were in flight at once; those beyond {AT_ONCE} waited to be sent.")
        if not self._as_tokens:
            run.notes.append(
                "The server accepts no token IDs: prompts were sent as text, of about the trace's lengths."
            )
        return run

    async def _ask(self, line: TraceLine, number: int, answer: Answer, due: float) -> None:
        wanted = min(max(line.output_length, 1), self._target.max_tokens)
        prompt = self._prompts.token_ids(line, number) if self._as_tokens else self._prompts.text(line, number)
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": wanted,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._options,
        }
        data = msgspec.json.encode(body)
        headers = {"Content-Type": "application/json"}
        if line.session_id:
            headers["x-session-id"] = line.session_id
        url = f"{self._target.url}/v1/completions"
        try:
            async with self._session.post(url, data=data, headers=headers) as response:
                answer.worker = response.headers.get("x-kvrouter-worker", "")
                if response.status != 200:
                    answer.error = f"status {response.status}: {_message(await response.read())}"
                else:
                    async for event in response.content:
                        if event.startswith(b"data: {"):
                            _note(read_json(event[6:], _Event), answer, due)
                    if answer.ttft is None and not answer.error:
                        answer.error = "the answer is empty"
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            answer.error = connection_problem(error)
        answer.seconds = time.monotonic() - due


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct):
    choices: list[msgspec.Raw] = []
    usage: _Usage | None = None
    error: msgspec.Raw | None = None


def _note(event: _Event, answer: Answer, due: float) -> None:
    if event.error is not None:
        answer.error = _message(b'{"error": %b}' % bytes(event.error))
    if answer.ttft is None and event.choices:
        answer.ttft = time.monotonic() - due
    if event.usage is not None:
        answer.prompt_tokens, answer.output_tokens = event.usage.prompt_tokens, event.usage.completion_tokens or 0
        details = event.usage.prompt_tokens_details
        answer.cached_tokens = details.cached_tokens if details else None


def _message(body: bytes) -> str:
    try:
        error = read_json(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)[:200]
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")
