"""The traffic: conversations that share system prompts, each of several turns that contain all answers before."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

# Each word is one token of the model's vocabulary, with the space before it. So an answer of these tokens is tokenized
# in the next turn as it was generated, like an answer of a trained model and unlike random tokens.
WORDS = """
    self return import class value error string list name file object default method data path size key index type from
    this that with when called other result call first module set number line should given time read source
"""
VOCABULARY = WORDS.split()

SYSTEM_PROMPTS = 6
CONVERSATIONS = 24
TURNS = 3


@dataclass(frozen=True)
class Conversation:
    """A system prompt and the questions of a user, turn by turn."""

    system: str
    questions: list[str]


def conversations(seed: int = 0) -> list[Conversation]:
    """Return the conversations of a seed. Conversations of different seeds share no text."""
    random = Random(seed)
    systems = [_text(random, f"Assistant {seed}.{number}:", 400) for number in range(SYSTEM_PROMPTS)]
    made = []
    for number in range(CONVERSATIONS):
        lengths = [300, *(random.randint(60, 140) for _ in range(TURNS - 1))]  # a document first, then questions
        questions = [_text(random, f"Question {seed}.{number}.{turn}:", length) for turn, length in enumerate(lengths)]
        made.append(Conversation(random.choice(systems), questions))
    return made


def _text(random: Random, start: str, words: int) -> str:
    return " ".join([start, *random.choices(VOCABULARY, k=words)])
