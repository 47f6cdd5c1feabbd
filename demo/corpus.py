"""The documents the base model is trained on.

Most are stories. At first, though, many are told again: a small model trained on stories alone
learns to write fluent sentences and never finds out that it pays to look back (after 7 million
tokens it still guessed who would speak next among all 48 names). Stories retold in another order
and lists said three times reward looking back at every word, and the habit stays.
"""

from __future__ import annotations

from collections.abc import Iterator

from dice import Dice
from stories import Story, make_story, make_story_of_one_kind
from world import ANIMAL_NAMES, ANIMALS, COLOURS, DESTINATIONS, FOODS, PEOPLE, SPOTS, THINGS

BOS, END, PAD, USER, ASSISTANT = "<|bos|>", "<|end|>", "<|pad|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = (PAD, BOS, END, USER, ASSISTANT)

# The part of the corpus, from its start, in which most documents repeat themselves.
REPEATING_PART = 0.2
# One story of four is cut in two and given to two speakers: the user begins it and the assistant
# goes on with it. So the base model knows the chat markers, but no question and answer.
DIALOGUE_SHARE = 0.25
# Stories of four to six facts of one kind, in which nothing can be guessed.
ONE_KIND_SHARE = 0.3

WORDS = [
    *(person.name for person in PEOPLE),
    *THINGS,
    *COLOURS,
    *ANIMALS,
    *ANIMAL_NAMES,
    *FOODS,
    *(destination.removeprefix("the ") for destination in DESTINATIONS),
    *(spot.rpartition(" ")[2] for spot in SPOTS),
]


def documents(seed: int, count: int) -> Iterator[str]:
    """Yields `count` documents as text with their special tokens, without the leading BOS."""
    dice = Dice(seed)
    for i in range(count):
        repeating = i < REPEATING_PART * count
        if dice.chance(0.35 if repeating else 0.02):
            yield _list_said_again(dice)
            continue
        story = (
            make_story_of_one_kind(dice)
            if not repeating and dice.chance(ONE_KIND_SHARE)
            else make_story(dice)
        )
        if dice.chance(0.5 if repeating else 0.05):
            yield _told_again(dice, story)
        elif dice.chance(DIALOGUE_SHARE):
            yield f"{USER} {story.beginning}{END}{ASSISTANT} {story.rest}{END}"
        else:
            yield f"{story.beginning} {story.rest}{END}"


def _list_said_again(dice: Dice) -> str:
    words = " ".join(dice.sample(WORDS, dice.between(6, 16)))
    return f"{words} {words} {words}{END}"


def _told_again(dice: Dice, story: Story) -> str:
    sentences = story.beginning.removesuffix(".").split(". ")
    again = [f"{sentence}." for _ in range(2) for sentence in dice.shuffled(sentences)]
    return f"{story.beginning} {' '.join(again)}{END}"
