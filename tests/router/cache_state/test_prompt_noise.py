"""Noise in the prompts of sessions is found with its place and its likely cause, and clean sessions have none."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise

import pytest
import structlog

from indexer.hashing import TOKEN_BYTES, PackedPrompt, pack_tokens
from router.apis.identities import Identity
from router.apis.requests import RoutedRequest
from router.cache_state.prompt_noise import PromptNoise
from simulator.worker.tokens import ChatTokenizer

TURNS = 10
RULES = "You are a careful coding agent. " * 40
WORDS = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu", "chi")
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday"]
TOOLS = [f'{{"name": "tool_{word}", "description": "{" ".join(WORDS[place:])}"}}' for place, word in enumerate(WORDS)]
END, BEGIN = "<|im_end|>\n", "<|im_start|>"


@cache
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer()


def words(seed: int, count: int) -> str:
    chosen = random.Random(seed)
    return " ".join(chosen.choice(WORDS) for _ in range(count))


def chat(system: str, history: list[str]) -> str:
    """Return the text of a conversation, which ends where the answer begins."""
    roles = ("user", "assistant")
    turns = [f"{BEGIN}{roles[place % 2]}\n{text}{END}" for place, text in enumerate(history)]
    return f"{BEGIN}system\n{system}{END}{''.join(turns)}{BEGIN}assistant\n"


def history(turn: int, seed: int = 0) -> list[str]:
    return [words(seed * 100 + place, 60) for place in range(2 * turn + 1)]


def shuffled(turn: int) -> str:
    tools = TOOLS[:]
    random.Random(turn).shuffle(tools)
    return "\n".join(tools)


# By the likely cause: the system prompt of a turn.
HEADS: dict[str, list[Callable[[int], str]]] = {
    "a date or time": [
        lambda turn: f"Now: 2026-11-28 10:{turn:02}. {RULES}",
        lambda turn: f"{RULES}The time is {turn + 9}:30. {RULES}",
        lambda turn: f"<env>\nToday's date: 11/{turn + 1}/2026\n</env>\n{RULES}",
        lambda turn: f"time={1764340000 + 37 * turn}\n{RULES}",
        lambda turn: f"It is {DAYS[turn % 5]}. {RULES}",
    ],
    "a counter": [
        lambda turn: f"Turn {turn} of this session. {RULES}",
        lambda turn: f"{RULES}tokens_left={200000 - turn * 1317} {RULES}",
        lambda turn: f"request #{turn * 7}: {RULES}",
        lambda turn: f"{words(3, 200)} step({turn}) {RULES}",
    ],
    "a path, such as the working directory": [
        lambda turn: f"cwd: /home/{WORDS[turn]}/project {RULES}",
        lambda turn: f"{RULES}Working directory: C:\\work\\{WORDS[turn]} {RULES}",
        lambda turn: f"<cwd>/srv/{words(turn, 1)}-{WORDS[turn]}/x</cwd> {RULES}",
    ],
    "a list in another order, such as tools or files": [
        lambda turn: f"{RULES}# Tools\n{shuffled(turn)}\n{RULES}",
        lambda turn: f"# Tools\n{shuffled(turn + 100)}\n{RULES}",
    ],
    "cache marks that move": [
        lambda turn: (
            f'{words(1, 20 * turn)} {{"cache_control": {{"type": "ephemeral"}}}} {words(2, 20 * (9 - turn))}{RULES}'
        ),
        lambda turn: f"{RULES}<cache_control at={turn}> {RULES}",
    ],
    "a random id": [
        lambda turn: f"session call_{random.Random(turn).getrandbits(64):x}ab7 {RULES}",
        lambda turn: f"{RULES}id=f{random.Random(turn).getrandbits(96):x}q0 {RULES}",
    ],
    "the billing line of Claude Code": [
        lambda turn: f"x-anthropic-billing-header: cc_version=2.1.36.{turn:03x}; cch={turn * 977:05x};\n{RULES}",
    ],
    "text that is removed from history": [lambda turn: f"{RULES}{words(9, 400 - 40 * turn)}\n{RULES}"],
}
NOISY = [(cause, number) for cause, heads in HEADS.items() for number in range(len(heads))]


def clean_sessions() -> Iterator[list[str]]:
    """Yield sessions without noise, as texts of their turns."""
    for seed in range(8):  # each turn continues the one before it
        yield [chat(RULES, history(turn, seed)) for turn in range(TURNS)]
    for seed in range(4):  # an answer is asked for again, with another last message
        yield [chat(RULES, [*history(turn // 2, seed), words(turn, 3), words(900 + turn, 30)]) for turn in range(TURNS)]
    for seed in range(3):  # the history becomes a summary
        yield [
            chat(RULES, [words(seed + 7 * (turn // 4), 300), *history(turn % 4, seed + turn // 4)])
            for turn in range(TURNS)
        ]
    for _ in range(2):  # calls of another kind between the turns
        yield [
            chat(RULES, history(turn // 2)) if turn % 2 else f"Name this chat: {words(turn, 100)}"
            for turn in range(TURNS)
        ]
    yield [chat(words(turn, 300), history(0, turn)) for turn in range(TURNS)]  # new conversations of one name
    yield [chat(RULES, history(TURNS - turn)) for turn in range(TURNS)]  # it returns to earlier turns
    yield [chat(RULES, history(3)) for _ in range(TURNS)]  # it is sent again


def examined(turns: list[str], **options: bool) -> tuple[PromptNoise, list[bytes]]:
    """Send a session's turns, and return what compared them, and the tokens of each."""
    noise = PromptNoise(text_of, **options)
    sent = [pack_tokens(tokenizer().encode(text, False)) for text in turns]
    for tokens in sent:
        request = RoutedRequest("m", identity=Identity("one")).tokenized([PackedPrompt(tokens)])
        noise.sent(request, "m")
        noise.check()
    return noise, sent


def text_of(_: str, tokens: bytes) -> str | None:
    return tokenizer().decode(list(PackedPrompt(tokens)))


def place_of_difference(one: bytes, other: bytes) -> int:
    pairs = zip(PackedPrompt(one), PackedPrompt(other), strict=False)
    return next(place for place, (left, right) in enumerate(pairs) if left != right)


def test_there_are_twenty_cases_of_each_kind() -> None:
    assert len(NOISY) == len(list(clean_sessions())) == 20


@pytest.mark.parametrize(("cause", "number"), NOISY)
def test_noise_is_found_with_its_place_and_its_cause(cause: str, number: int) -> None:
    noise, sent = examined([chat(HEADS[cause][number](turn), history(turn)) for turn in range(TURNS)])
    found = noise.findings()
    assert len(found) == 1
    place = place_of_difference(sent[-2], sent[-1])
    assert f"differ after {place:,} tokens" in found[0]["detail"]
    assert f"Likely cause: {cause}. " in found[0]["detail"]
    assert f"in {TURNS - 1} turns" in found[0]["detail"]


def test_equal_tokens_and_loss_are_counted() -> None:
    noise, sent = examined([chat(f"Turn {turn}. {RULES}", history(turn)) for turn in range(3)])
    equal = [len(earlier) // TOKEN_BYTES - place_of_difference(earlier, later) - 1 for earlier, later in pairwise(sent)]
    detail = noise.findings()[0]["detail"]
    assert f"{equal[-1]:,} equal tokens follow" in detail
    assert f"{sum(equal):,} tokens were computed again in 2 turns" in detail


@pytest.mark.parametrize("turns", list(clean_sessions()), ids=range(20))
def test_sessions_without_noise_have_no_finding(turns: list[str]) -> None:
    assert examined(turns)[0].findings() == []


def test_names_of_users_are_no_sessions() -> None:
    noise = PromptNoise(text_of)
    for turn in range(TURNS):
        tokens = pack_tokens(tokenizer().encode(chat(HEADS["a counter"][0](turn), history(turn)), False))
        noise.sent(RoutedRequest("m", identity=Identity("u", by_user=True)).tokenized([PackedPrompt(tokens)]), "m")
        noise.check()
    assert noise.findings() == []


@pytest.mark.parametrize("shown", [False, True])
def test_logs_have_the_words_that_differ_only_if_allowed(shown: bool) -> None:
    with structlog.testing.capture_logs() as lines:
        examined([chat(f"Turn secret{turn}. {RULES}", history(turn)) for turn in range(3)], shows_text=shown)
    assert len(lines) == 1
    assert ("secret" in str(lines)) is shown
