"""The demo's workload: conversations that share long system prompts, as assistants and agents send them."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

_TOPICS = (
    "invoices",
    "flight bookings",
    "lab results",
    "support tickets",
    "insurance claims",
    "code reviews",
    "rental contracts",
    "parcel tracking",
)
_VERBS = ("check", "summarise", "compare", "explain", "translate", "file", "escalate", "archive")
_THINGS = ("the last entry", "every open case", "the oldest record", "two duplicates", "a missing field", "the totals")
_RULES_A_PROMPT = 110  # about 1800 tokens


@dataclass(frozen=True, slots=True)
class Conversation:
    """A system prompt and the user's messages, each sent when the previous one is answered."""

    system: str
    questions: list[str]


def make_conversations(count: int, turns: int, seed: int) -> list[Conversation]:
    """Conversations in the order they start; neighbours seldom share a system prompt."""
    random = Random(seed)
    systems = [_system_prompt(topic, random) for topic in _TOPICS]
    return [
        Conversation(random.choice(systems), [_question(number, random) for _ in range(turns)])
        for number in range(count)
    ]


def _system_prompt(topic: str, random: Random) -> str:
    rules = (
        f"{number}. When asked to {random.choice(_VERBS)} {random.choice(_THINGS)}, do so only for {topic}."
        for number in range(1, _RULES_A_PROMPT + 1)
    )
    return f"You help with {topic}. Your rules:\n" + "\n".join(rules)


def _question(number: int, random: Random) -> str:
    wishes = ", then ".join(f"{random.choice(_VERBS)} {random.choice(_THINGS)}" for _ in range(8))
    return f"Case {number}-{random.randrange(10_000)}: please {wishes}."
