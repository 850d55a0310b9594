"""The traffic: conversations that share system prompts, each of several turns that contain all answers before."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

# Words are tokens of the model's vocabulary, with the space before them: an answer made of such tokens is tokenized in
# the next turn as it was generated, which is the case for what a trained model says, and not for random tokens.
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
    """What a user says, turn by turn."""

    system: str
    questions: list[str]


def conversations(seed: int = 0) -> list[Conversation]:
    """Always the same ones for a seed; none of their texts is in another seed's."""
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
