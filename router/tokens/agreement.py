"""Does the router read prompts as an engine does? Each shape of prompt is tried: what agrees is read here.

The engine's own rendering is what counts. An engine that does not offer it computes the probes, each with an answer of
one token, and tells the ids it computed. Where it does neither, its `/tokenize` is believed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import zip_longest

from http_api.errors import RequestError
from indexer.hashing import PackedPrompt
from router.apis.endpoints import CHAT
from router.apis.requests import ChatPrompt, TextPrompts
from router.tokens.engine_client import EngineClient, NotOfferedError, PromptRefusedError
from router.tokens.errors import TokenizerUnavailableError
from router.tokens.local_tokenizer import LocalTokenizer
from router.tokens.prompt_cache import common_tokens
from router.tokens.shapes import PROBES, Probe, Shape


class Way(StrEnum):
    """How prompts of a shape become tokens.

    LOCAL: here, as the engine does. UNTRIED: here, since the engine does not tell. ENGINE: it is asked. GUESSED: here,
    although it differs, since the engine cannot be asked. REFUSED: the engine takes no such prompts. NONE: not at all.
    """

    LOCAL = "local"
    UNTRIED = "untried"
    ENGINE = "engine"
    GUESSED = "guessed"
    REFUSED = "refused"
    NONE = "none"


class Truth(StrEnum):
    """What tells how an engine reads prompts, the best first."""

    RENDER = "render"
    COMPUTED = "computed"
    TOKENIZE = "tokenize"
    NOTHING = "nothing"


@dataclass(frozen=True)
class ShapeReport:
    """How one shape becomes tokens, and how the router's reading differs; "" where it does not."""

    way: Way
    difference: str = ""


@dataclass
class Agreement:
    """What was found in a trial: by which means, and of each shape. `askable`: the engine tells tokens of prompts."""

    truth: Truth = Truth.NOTHING
    askable: bool = False
    shapes: dict[Shape, ShapeReport] = field(default_factory=dict)

    def of_way(self, *ways: Way) -> frozenset[Shape]:
        """The shapes that become tokens in these ways."""
        return frozenset(shape for shape, report in self.shapes.items() if report.way in ways)

    @property
    def exact(self) -> int:
        """How many shapes are read here as the engine reads them."""
        return len(self.of_way(Way.LOCAL))


_BADNESS = {
    way: place for place, way in enumerate((Way.LOCAL, Way.REFUSED, Way.UNTRIED, Way.ENGINE, Way.GUESSED, Way.NONE))
}


def merged(agreements: Iterable[Agreement]) -> Agreement:
    """What was found in all trials: of each shape the worst."""
    found = Agreement()
    for agreement in agreements:
        if found.truth is Truth.NOTHING:
            found.truth = agreement.truth
        for shape, report in agreement.shapes.items():
            if shape not in found.shapes or _BADNESS[report.way] > _BADNESS[found.shapes[shape].way]:
                found.shapes[shape] = report
    return found


class Trial:
    """The probes as one engine reads them. Asks once; any number of tokenizers can be compared with the answers."""

    def __init__(self, client: EngineClient, url: str, computes: bool = False) -> None:
        """`computes`: let the engine compute the probes where it does not render them."""
        self._client = client
        self._computes = computes
        self._url = url
        self._truth = Truth.NOTHING
        self._expected: dict[Shape, list[PackedPrompt] | None] = {}  # None: the engine refuses it
        self._askable: dict[Shape, list[PackedPrompt]] = {}
        self._not_offered: set[Truth] = set()

    async def ask(self, probes: Iterable[Probe] = PROBES) -> None:
        """Ask the engine. Raises TokenizerUnavailableError when it does not answer at all."""
        for probe in probes:
            await self._ask(probe.shape, probe.prompt())
            if probe.shape in self._expected and self._expected[probe.shape] is None and probe.unused_tools:
                # An engine that is not told how to read calls takes tools only when none may be used.
                del self._expected[probe.shape]
                await self._ask(probe.shape, probe.unused_tools.prompt())

    async def _ask(self, shape: Shape, prompt: ChatPrompt | TextPrompts) -> None:
        ways = {
            Truth.RENDER: self._client.rendered,
            Truth.COMPUTED: self._client.computed,
            Truth.TOKENIZE: self._client.tokenized,
        }
        for truth, ask in ways.items():
            if truth in self._not_offered or (
                truth is Truth.COMPUTED and not (self._computes and Truth.RENDER in self._not_offered)
            ):
                continue
            try:
                found = await ask(self._url, prompt)
            except NotOfferedError:
                if truth is not Truth.COMPUTED:  # which some APIs alone offer
                    self._not_offered.add(truth)
                continue
            except PromptRefusedError:
                # What is refused by /tokenize may be computed all the same.
                if truth is not Truth.TOKENIZE or shape not in self._expected:
                    self._expected.setdefault(shape, None)
                if truth is not Truth.TOKENIZE:
                    return
                continue
            if self._truth is Truth.NOTHING:
                self._truth = truth
            if shape not in self._expected and (truth is not Truth.TOKENIZE or not self._converted(prompt)):
                self._expected[shape] = found
            if truth is not Truth.COMPUTED:
                self._askable.setdefault(shape, found)

    @staticmethod
    def _converted(prompt: ChatPrompt | TextPrompts) -> bool:
        """Whether it came by another API than chats: `/tokenize` knows it only as the router has converted it."""
        return isinstance(prompt, ChatPrompt) and prompt.call is not None and prompt.call[0] != CHAT

    def compare(self, local: LocalTokenizer | None, probes: Iterable[Probe] = PROBES) -> Agreement:
        """What a tokenizer of ours makes of the probes, beside the engine's answers. For a thread."""
        found = Agreement(self._truth, bool(self._askable))
        for probe in probes:
            found.shapes[probe.shape] = self._report(probe, local)
        return found

    def _report(self, probe: Probe, local: LocalTokenizer | None) -> ShapeReport:
        shape = probe.shape
        ours, problem = _ours(local, probe.prompt())
        if shape in self._expected and self._expected[shape] is None:
            return ShapeReport(Way.REFUSED)
        expected = self._expected.get(shape)
        if expected is None:
            return ShapeReport(Way.UNTRIED if ours is not None else Way.NONE, problem)
        if ours == expected:
            return ShapeReport(Way.LOCAL)
        difference = problem if ours is None else _difference(ours[0], expected[0])
        if self._askable.get(shape) == expected:
            return ShapeReport(Way.ENGINE, difference)
        return ShapeReport(Way.GUESSED if ours is not None else Way.NONE, difference)


def _ours(local: LocalTokenizer | None, prompt: ChatPrompt | TextPrompts) -> tuple[list[PackedPrompt] | None, str]:
    """The prompts as read here; or None, and why not."""
    if local is None:
        return None, "there is no local tokenizer"
    try:
        return local.tokenize(prompt), ""
    except (TokenizerUnavailableError, RequestError) as error:
        return None, str(error)


def _difference(ours: PackedPrompt, theirs: PackedPrompt) -> str:
    """Where two prompts differ first, in words."""
    place = common_tokens(ours, theirs)
    here, there = next(
        ((a, b) for number, (a, b) in enumerate(zip_longest(ours, theirs)) if number == place), (None, None)
    )
    names = [f"token {token}" if token is not None else "the end" for token in (here, there)]
    return f"at {place} of {len(theirs)} tokens: {names[0]} here, {names[1]} there"
