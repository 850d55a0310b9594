"""Comparison of the router's tokenizer with an engine's, for each kind of prompt.

The engine's own rendering is the reference. An engine without a render endpoint computes the probes, each with an
answer of one token, and returns the ids it computed. An engine that offers neither is compared by its `/tokenize`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import zip_longest

from http_api.errors import RequestError
from indexer.hashing import PackedPrompt
from router.apis.requests import ChatPrompt, TextPrompts
from router.tokens import TokenizerUnavailableError
from router.tokens.engine_client import EngineClient, NotOfferedError, PromptRefusedError, is_converted
from router.tokens.local_tokenizer import LocalTokenizer
from router.tokens.probes import PROBES, Probe, ProbeKind
from router.tokens.prompt_cache import common_tokens

# Seconds between two checks that an engine and the router tokenize alike.
CHECK_SECONDS = 60.0


class TokenizerRoute(StrEnum):
    """The route by which prompts of a kind become tokens.

    - LOCAL: the router's tokenizer, which agrees with the engine.
    - UNTRIED: the router's tokenizer, because the engine returns no ids.
    - ENGINE: the engine is asked.
    - GUESSED: the router's tokenizer, although it differs, because the engine cannot be asked.
    - REFUSED: none, because the engine refuses these prompts.
    - NONE: none.
    """

    LOCAL = "local"
    UNTRIED = "untried"
    ENGINE = "engine"
    GUESSED = "guessed"
    REFUSED = "refused"
    NONE = "none"


class Reference(StrEnum):
    """The source of an engine's token ids, the best first."""

    RENDER = "render"
    COMPUTED = "computed"
    TOKENIZE = "tokenize"
    NOTHING = "nothing"


@dataclass(frozen=True)
class ProbeReport:
    """The tokenizer route of a kind of prompt, and how the router's tokens differ; "" if they do not."""

    route: TokenizerRoute
    difference: str = ""


@dataclass
class Agreement:
    """The result of a trial. `askable` says that the engine returns the tokens of prompts."""

    reference: Reference = Reference.NOTHING
    askable: bool = False
    probes: dict[ProbeKind, ProbeReport] = field(default_factory=dict)

    def with_route(self, *routes: TokenizerRoute) -> frozenset[ProbeKind]:
        """Return the kinds of prompts with one of these routes."""
        return frozenset(kind for kind, report in self.probes.items() if report.route in routes)

    @property
    def exact(self) -> int:
        """The number of kinds for which the router's tokenizer agrees with the engine."""
        return len(self.with_route(TokenizerRoute.LOCAL))


# The routes from the best to the worst.
_BEST_TO_WORST = (
    TokenizerRoute.LOCAL,
    TokenizerRoute.REFUSED,
    TokenizerRoute.UNTRIED,
    TokenizerRoute.ENGINE,
    TokenizerRoute.GUESSED,
    TokenizerRoute.NONE,
)
_SEVERITY = {route: place for place, route in enumerate(_BEST_TO_WORST)}


def merged(agreements: Iterable[Agreement]) -> Agreement:
    """Merge the results of several trials: for each kind the worst."""
    found = Agreement()
    for agreement in agreements:
        if found.reference is Reference.NOTHING:
            found.reference = agreement.reference
        for kind, report in agreement.probes.items():
            if kind not in found.probes or _SEVERITY[report.route] > _SEVERITY[found.probes[kind].route]:
                found.probes[kind] = report
    return found


class Trial:
    """The probes and one engine's tokens of them. The engine is asked once; several tokenizers can be compared."""

    def __init__(self, client: EngineClient, url: str, computes: bool = False) -> None:
        """Prepare a trial. `computes` lets the engine compute the probes if it does not render them."""
        self._client = client
        self._computes = computes
        self._url = url
        self._reference = Reference.NOTHING
        self._expected: dict[ProbeKind, list[PackedPrompt] | None] = {}  # None if the engine refuses it
        self._askable: dict[ProbeKind, list[PackedPrompt]] = {}
        self._not_offered: set[Reference] = set()

    async def ask(self, probes: Iterable[Probe] = PROBES) -> None:
        """Ask the engine. Raises TokenizerUnavailableError if it does not answer at all."""
        for probe in probes:
            await self._ask(probe.kind, probe.prompt())
            if probe.kind in self._expected and self._expected[probe.kind] is None and probe.unused_tools:
                # An engine without a tool call parser accepts tools only if none may be called.
                del self._expected[probe.kind]
                await self._ask(probe.kind, probe.unused_tools.prompt())

    async def _ask(self, kind: ProbeKind, prompt: ChatPrompt | TextPrompts) -> None:
        questions = {
            Reference.RENDER: self._client.rendered,
            Reference.COMPUTED: self._client.computed,
            Reference.TOKENIZE: self._client.tokenized,
        }
        for reference, ask in questions.items():
            if reference in self._not_offered or (
                reference is Reference.COMPUTED and not (self._computes and Reference.RENDER in self._not_offered)
            ):
                continue
            try:
                found = await ask(self._url, prompt)
            except NotOfferedError:
                if reference is not Reference.COMPUTED:  # only some APIs offer it
                    self._not_offered.add(reference)
                continue
            except PromptRefusedError:
                # The engine may compute a prompt that its /tokenize refuses.
                if reference is not Reference.TOKENIZE or kind not in self._expected:
                    self._expected.setdefault(kind, None)
                if reference is not Reference.TOKENIZE:
                    return
                continue
            if self._reference is Reference.NOTHING:
                self._reference = reference
            if kind not in self._expected and (reference is not Reference.TOKENIZE or not is_converted(prompt)):
                self._expected[kind] = found
            if reference is not Reference.COMPUTED:
                self._askable.setdefault(kind, found)

    def compare(self, local: LocalTokenizer | None, probes: Iterable[Probe] = PROBES) -> Agreement:
        """Compare a local tokenizer's tokens of the probes with the engine's. Call it in a thread."""
        found = Agreement(self._reference, bool(self._askable))
        for probe in probes:
            found.probes[probe.kind] = self._report(probe, local)
        return found

    def _report(self, probe: Probe, local: LocalTokenizer | None) -> ProbeReport:
        kind = probe.kind
        ours, problem = _tokenize_locally(local, probe.prompt())
        if kind in self._expected and self._expected[kind] is None:
            return ProbeReport(TokenizerRoute.REFUSED)
        expected = self._expected.get(kind)
        if expected is None:
            return ProbeReport(TokenizerRoute.UNTRIED if ours is not None else TokenizerRoute.NONE, problem)
        if ours == expected:
            return ProbeReport(TokenizerRoute.LOCAL)
        difference = problem if ours is None else _difference(ours[0], expected[0])
        if self._askable.get(kind) == expected:
            return ProbeReport(TokenizerRoute.ENGINE, difference)
        return ProbeReport(TokenizerRoute.GUESSED if ours is not None else TokenizerRoute.NONE, difference)


def _tokenize_locally(
    local: LocalTokenizer | None, prompt: ChatPrompt | TextPrompts
) -> tuple[list[PackedPrompt] | None, str]:
    """Return the local tokens of the prompts; or None, and the reason."""
    if local is None:
        return None, "no local tokenizer is available"
    try:
        return local.tokenize(prompt), ""
    except (TokenizerUnavailableError, RequestError) as error:
        return None, str(error)


def _difference(ours: PackedPrompt, theirs: PackedPrompt) -> str:
    place = common_tokens(ours, theirs)
    here, there = next(
        ((a, b) for number, (a, b) in enumerate(zip_longest(ours, theirs)) if number == place), (None, None)
    )
    names = [f"token {token}" if token is not None else "the end" for token in (here, there)]
    return f"at {place} of {len(theirs)} tokens: the router has {names[0]}, the engine {names[1]}"
