"""Everything the tiny model is taught to say that is not about what is in a picture.

System messages, greetings, thanks, and the polite refusal of what it was not made for. The
refusals are taught on sentences put together at random, some with made-up words, so that the
model learns "anything that is not a known question" and not a list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

DEFAULT_SYSTEM = "You are a helpful assistant."
SYSTEMS = (
    "You are a careful assistant.",
    "Answer in one short sentence.",
    "You answer questions about pictures.",
    "You are a polite helper. Be brief.",
    "Look at the picture and answer.",
    "You are an expert in shapes and numbers.",
)
REFUSAL = "sorry, I was made for simple shapes, numbers and words only"
NO_PICTURE = "please show me a picture first"

_GREETINGS = ("Hello", "Hi", "Hey", "Good morning", "Good evening", "Hello there", "Hi there")
_WHO = ("Who are you?", "What are you?", "What is your name?", "Introduce yourself.")
_SKILLS = ("What can you do?", "How can you help me?", "What are you good at?", "Help.", "Help me.")
_THANKS = ("Thank you.", "Thanks!", "Thank you very much.", "Thanks a lot.", "Great, thanks.")
_BYES = ("Goodbye.", "Bye!", "See you.", "Bye bye.", "Good night.")

_REQUESTS = (
    "Write a {thing} about {topic}.",
    "Who is the president of {place}?",
    "What is the capital of {place}?",
    "Translate {topic} into {language}.",
    "What is {number} plus {number}?",
    "How do I cook {topic}?",
    "Tell me a {thing}.",
    "What is the weather in {place}?",
    "Which breed is the {animal}?",
    "How old is this {person}?",
    "Who painted this?",
    "Where was this photo taken?",
    "Is the {person} happy?",
    "Explain {topic} to me.",
    "Why is the {animal} {state}?",
    "What does {topic} mean?",
    "Can you book a {thing} to {place}?",
    "When was {person} born?",
    "Give me a {thing} of {topic}.",
    "What brand is the {animal}?",
    "How much does the {thing} cost?",
    "Summarise the {thing}.",
    "Fix this {language} code.",
    "I feel {state} today.",
    "What should I do about {topic}?",
    "Do you like {topic}?",
    "Is {topic} better than {topic}?",
    "How many people live in {place}?",
    "What is the {person} doing?",
    "What time is it in {place}?",
    "List {number} {animal}s.",
    "{topic}?",
    "What emotion does the {person} show?",
    "Compare {topic} with {topic}.",
    "Should I buy {topic}?",
    "Is it safe to eat {topic}?",
)
_SLOTS: dict[str, Sequence[str]] = {
    "thing": ("poem", "story", "joke", "song", "recipe", "letter", "flight", "table", "report"),
    "topic": ("love", "physics", "history", "pasta", "politics", "music", "the sea", "money"),
    "place": ("France", "Japan", "Peru", "London", "Berlin", "India", "Mars", "New York"),
    "language": ("French", "German", "Python", "Latin", "Chinese", "Spanish"),
    "animal": ("dog", "horse", "bird", "car", "lion", "cat", "fish", "truck"),
    "person": ("man", "woman", "child", "girl", "boy", "teacher", "player"),
    "state": ("sad", "happy", "angry", "tired", "hungry", "bored"),
    "number": ("two", "12", "7", "99", "three", "45"),
}


@dataclass(frozen=True, slots=True)
class Chat:
    prompt: str
    answer: str


def draw_system(rng: Random) -> str:
    """The default of the chat template in most cases, else one of several others."""
    return DEFAULT_SYSTEM if rng.random() < 0.7 else rng.choice(SYSTEMS)


def draw_chat(rng: Random) -> Chat:
    """A greeting, thanks or question about the model itself (one half), or something to refuse."""
    if rng.random() < 0.5:
        return Chat(draw_request(rng), REFUSAL)
    pools: list[tuple[Sequence[str], str]] = [
        ([f"{word}{rng.choice(('!', '.', ', how are you?', ''))}" for word in _GREETINGS], "hello"),
        (_WHO, "I am a tiny model that looks at pictures"),
        (_SKILLS, "I can name shapes, colours, numbers and words in a picture"),
        (_THANKS, "you are welcome"),
        (_BYES, "goodbye"),
    ]
    prompts, answer = rng.choice(pools)
    return Chat(rng.choice(prompts), answer)


def draw_request(rng: Random) -> str:
    """Something the model was not made for, in words it may never have met."""
    sentence = rng.choice(_REQUESTS)
    for slot, words in _SLOTS.items():
        while "{" + slot + "}" in sentence:
            word = made_up_word(rng) if rng.random() < 0.35 else rng.choice(words)
            sentence = sentence.replace("{" + slot + "}", word, 1)
    if rng.random() < 0.15:
        sentence = f"{rng.choice(('Please', 'Hello,', 'Now'))} {sentence[0].lower()}{sentence[1:]}"
    return sentence


def made_up_word(rng: Random) -> str:
    """Letters that can be spoken; never a word of the other questions but by rare chance."""
    pairs = [rng.choice("bcdfghjklmnprstvwz") + rng.choice("aeiouy") for _ in range(3)]
    return "".join(pairs[: rng.randint(2, 3)]) + rng.choice(("", "n", "r", "st", "l", "x"))


def corpus(rng: Random, num_lines: int) -> list[str]:
    """Lines to train the tokenizer on, so that common words become one token each."""
    lines = [DEFAULT_SYSTEM, *SYSTEMS, REFUSAL, NO_PICTURE]
    for _ in range(num_lines):
        chat = draw_chat(rng)
        lines += [chat.prompt, chat.answer]
    return lines
