"""Little stories whose later sentences depend on their earlier ones.

A story has two parts: a *beginning* that tells a few facts (who has the kite, where the blue cup
is), and a *rest* in which people act on them, between weather, talk and play.
"""

from __future__ import annotations

from dataclasses import dataclass

from dice import Dice
from facts import Fact, Likes, Owned, Pet, Placed, Went
from world import (
    ANIMAL_NAMES,
    ANIMALS,
    COLOURS,
    DESTINATIONS,
    FOODS,
    PEOPLE,
    SPOTS,
    THINGS,
    Person,
)

KINDS: tuple[type[Fact], ...] = (Placed, Owned, Went, Likes, Pet)
OPENINGS = (
    "It was a warm day.",
    "It was a cold morning.",
    "The sun was shining.",
    "It rained all day.",
    "Snow fell in the night.",
    "It was the first day of spring.",
    "Once there was a quiet street.",
    "It was a long summer.",
    "The wind was strong.",
    "One day a story began.",
)
ENDINGS = (
    "Then it was time for bed.",
    "They all went home.",
    "It was a good day.",
    "They laughed and sang until night.",
    "And that was the end of the day.",
    "Everybody was happy.",
    "The stars came out, and all was quiet.",
)


@dataclass(frozen=True)
class Story:
    """A story and what is true in it.

    Attributes:
        facts: What the beginning tells, in the order of telling.
        beginning: An opening, maybe, and one sentence or two for every fact.
        rest: What happens then, recalling facts of the beginning, up to the ending.
    """

    facts: tuple[Fact, ...]
    beginning: str
    rest: str


def make_story(dice: Dice) -> Story:
    """Returns a new story of two to four facts."""
    facts = make_facts(dice, dice.between(2, 4))
    return Story(facts, tell_beginning(dice, facts), _tell_rest(dice, facts))


def make_story_of_one_kind(dice: Dice) -> Story:
    """Returns a story of four to six facts of one kind: who went where, or who likes what.

    Nothing in it can be guessed; to recall a fact one has to know whom it was told of.
    """
    facts = _facts_of_kinds(dice, [dice.pick(KINDS)] * dice.between(4, 6))
    return Story(facts, tell_beginning(dice, facts), _tell_rest(dice, facts, small_talk=0.0))


def make_facts(dice: Dice, count: int) -> tuple[Fact, ...]:
    """Returns facts about different people, things, colours and places.

    At least two of them are of one kind, so that one cannot tell who or what a question means
    without reading.
    """
    kinds = dice.sample(KINDS, count - 1)
    return _facts_of_kinds(dice, dice.shuffled([*kinds, kinds[0]]))


def _facts_of_kinds(dice: Dice, kinds: list[type[Fact]]) -> tuple[Fact, ...]:
    count = len(kinds)
    people = dice.sample(PEOPLE, count)
    things, colours = dice.sample(THINGS, count), dice.sample(COLOURS, count)
    spots, destinations = dice.sample(SPOTS, count), dice.sample(DESTINATIONS, count)
    foods = dice.sample(FOODS, count)
    animals, animal_names = dice.sample(ANIMALS, count), dice.sample(ANIMAL_NAMES, count)
    facts: list[Fact] = []
    for i, kind in enumerate(kinds):
        if kind is Placed:
            facts.append(Placed(people[i], colours[i], things[i], spots[i]))
        elif kind is Owned:
            facts.append(Owned(people[i], colours[i], things[i]))
        elif kind is Went:
            facts.append(Went(people[i], destinations[i]))
        elif kind is Likes:
            facts.append(Likes(people[i], foods[i]))
        else:
            facts.append(Pet(people[i], animals[i], animal_names[i]))
    return tuple(facts)


def tell_beginning(dice: Dice, facts: tuple[Fact, ...]) -> str:
    """Returns the sentences that tell the facts, after an opening in one story of three."""
    opening = [dice.pick(OPENINGS)] if dice.chance(1 / 3) else []
    return " ".join([*opening, *(fact.tell(dice) for fact in facts)])


def _tell_rest(dice: Dice, facts: tuple[Fact, ...], small_talk: float = 0.3) -> str:
    speakers = dice.sample(PEOPLE, 2) if dice.chance(0.3) else [f.person for f in facts]
    recalled = dice.shuffled(facts) + dice.sample(facts, dice.between(0, len(facts)))
    sentences = []
    for fact in recalled:
        others = [p for p in speakers if p != fact.person]
        sentences.append(fact.recall(dice, dice.pick(others)))
        if dice.chance(small_talk):
            sentences.append(_small_talk(dice, *dice.sample(speakers, 2)))
    return " ".join([*sentences, dice.pick(ENDINGS)])


def _small_talk(dice: Dice, one: Person, other: Person) -> str:
    """Returns a line that depends on no fact; it makes words such as "where" and "who" known."""
    return dice.pick(
        [
            f"{one.name} and {other.name} played a game.",
            f"{one.name} told {other.name} a funny story.",
            f"{one.name} sat down next to {other.name}.",
            f"{one.name} was tired, but {one.he} did not want to sleep.",
            f"{one.name} smiled, and {other.name} smiled too.",
            f"A bird sang, and {one.name} began to dance.",
            f"{one.name} called: Where are you? {other.name} said: Here.",
            f"{one.name} asked: Where did the time go? {other.name} did not know.",
            f"{one.name} asked: Who is there? {other.name} laughed.",
            f"{one.name} asked: Who owns the moon? {other.name} did not know.",
            f"{one.name} said: What a fine day! {other.name} smiled.",
            f"{one.name} sang: What colour is the sky? {other.name} looked up.",
            f"{one.name} asked: What is the name of this song? {other.name} did not know.",
            f"{one.name} asked: What does it mean? {other.name} thought about it.",
            f"{one.name} said: We are like two birds. {other.name} laughed.",
        ]
    )
