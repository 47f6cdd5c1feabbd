"""The facts a story is made of. Each knows how it is told, recalled, asked about and answered.

``tell`` states the fact for the first time; ``recall`` uses it again later in the story, which is
what teaches the base model to look back at what it has read. ``questions`` pairs a question with
its one right answer: only the fine-tuning data uses it, the base model never sees any of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from dice import Dice
from world import Person, a


class Fact(Protocol):
    """One thing that is true in a story."""

    def tell(self, dice: Dice) -> str:
        """Returns a sentence that states the fact."""

    def recall(self, dice: Dice, speaker: Person) -> str:
        """Returns a sentence that only somebody who knows the fact can complete."""

    def questions(self) -> list[tuple[str, str]]:
        """Returns every (question, answer) about the fact."""


def _colour_recalls(thing: str, colour: str, speaker: Person) -> list[str]:
    return [
        f"{speaker.name} said: The {thing} is {colour}.",
        f"{speaker.name} drew the {thing} and made it {colour}.",
        f"The {thing} looked very {colour} in the sun.",
        f"{speaker.name} said: I like the {thing} because it is {colour}.",
    ]


@dataclass(frozen=True)
class Placed:
    """A coloured thing lies somewhere."""

    person: Person
    colour: str
    thing: str
    spot: str

    def tell(self, dice: Dice) -> str:
        name, item = self.person.name, f"{self.colour} {self.thing}"
        return dice.pick(
            [
                f"{name} put the {item} {self.spot}.",
                f"{name} left the {item} {self.spot}.",
                f"{name} hid the {item} {self.spot}.",
                f"{name} saw {a(item)} {self.spot}.",
                f"{name} took {a(item)} and put it {self.spot}.",
                f"There was {a(item)} {self.spot}.",
                f"The {item} was {self.spot}.",
            ]
        )

    def recall(self, dice: Dice, speaker: Person) -> str:
        where = [
            f"{speaker.name} said: The {self.thing} is {self.spot}.",
            f"{speaker.name} looked for the {self.thing} and found it {self.spot}.",
            f"{speaker.name} remembered that the {self.thing} was {self.spot}.",
            f"The {self.thing} was still {self.spot}.",
            f"{speaker.name} looked {self.spot} and saw the {self.colour} {self.thing}.",
        ]
        colour = _colour_recalls(self.thing, self.colour, speaker)
        return dice.pick(colour if dice.chance(0.35) else where)

    def questions(self) -> list[tuple[str, str]]:
        return [
            (f"Where is the {self.thing}?", f"The {self.thing} is {self.spot}."),
            (f"What colour is the {self.thing}?", f"The {self.thing} is {self.colour}."),
        ]


@dataclass(frozen=True)
class Owned:
    """A person has a coloured thing."""

    person: Person
    colour: str
    thing: str

    def tell(self, dice: Dice) -> str:
        name, item = self.person.name, f"{self.colour} {self.thing}"
        return dice.pick(
            [
                f"{name} had {a(item)}.",
                f"{name} got {a(item)}.",
                f"{name} made {a(item)}.",
                f"{name} bought {a(item)}.",
                f"{name} carried {a(item)}.",
                f"{name} owned {a(item)}.",
            ]
        )

    def recall(self, dice: Dice, speaker: Person) -> str:
        name = self.person.name
        owner = [
            f"{speaker.name} said: {name} has the {self.thing}.",
            f"{speaker.name} said: The {self.thing} belongs to {name}.",
            f"The {self.thing} belonged to {name}.",
            f"{speaker.name} wanted to see the {self.thing}, so {speaker.he} ran to {name}.",
            f"{name} still had the {self.colour} {self.thing}.",
        ]
        colour = _colour_recalls(self.thing, self.colour, speaker)
        return dice.pick(colour if dice.chance(0.35) else owner)

    def questions(self) -> list[tuple[str, str]]:
        return [
            (f"Who owns the {self.thing}?", f"The {self.thing} belongs to {self.person.name}."),
            (f"What colour is the {self.thing}?", f"The {self.thing} is {self.colour}."),
        ]


@dataclass(frozen=True)
class Went:
    """A person went somewhere."""

    person: Person
    destination: str

    def tell(self, dice: Dice) -> str:
        name, there = self.person.name, f"to {self.destination}"
        return dice.pick(
            [
                f"{name} went {there}.",
                f"{name} walked {there}.",
                f"{name} ran {there}.",
                f"{name} hurried {there}.",
                f"In the morning {name} went {there}.",
                f"After lunch {name} drove {there}.",
            ]
        )

    def recall(self, dice: Dice, speaker: Person) -> str:
        name = self.person.name
        return dice.pick(
            [
                f"{speaker.name} said: {name} went to {self.destination}.",
                f"{speaker.name} looked for {name} at {self.destination}.",
                f"{name} was at {self.destination}.",
                f"In the evening {name} came back from {self.destination}.",
                f"{name} sang at {self.destination}.",
            ]
        )

    def questions(self) -> list[tuple[str, str]]:
        name = self.person.name
        return [(f"Where did {name} go?", f"{name} went to {self.destination}.")]


@dataclass(frozen=True)
class Likes:
    """A person likes some food."""

    person: Person
    food: str

    def tell(self, dice: Dice) -> str:
        name = self.person.name
        return dice.pick(
            [
                f"{name} loved {self.food}.",
                f"{name} liked {self.food}.",
                f"{name} enjoyed {self.food} every day.",
                f"{name} liked {self.food} best of all.",
                f"{name} loved {self.food} more than anything.",
            ]
        )

    def recall(self, dice: Dice, speaker: Person) -> str:
        name = self.person.name
        return dice.pick(
            [
                f"{speaker.name} said: {name} likes {self.food}.",
                f"{speaker.name} gave {name} some {self.food}.",
                f"{name} had {self.food} for dinner.",
                f"So {name} ate {self.food}.",
            ]
        )

    def questions(self) -> list[tuple[str, str]]:
        name = self.person.name
        return [(f"What does {name} like?", f"{name} likes {self.food}.")]


@dataclass(frozen=True)
class Pet:
    """A person has an animal with a name."""

    person: Person
    animal: str
    animal_name: str

    def tell(self, dice: Dice) -> str:
        name, called = self.person.name, f"called {self.animal_name}"
        return dice.pick(
            [
                f"{name} had {a(self.animal)} {called}.",
                f"{name} met {a(self.animal)} {called}.",
                f"{name} fed {a(self.animal)} {called}.",
                f"{name} saw {a(self.animal)} {called}.",
            ]
        )

    def recall(self, dice: Dice, speaker: Person) -> str:
        return dice.pick(
            [
                f"{speaker.name} said: The {self.animal} is called {self.animal_name}.",
                f"{speaker.name} looked at the {self.animal} and called it {self.animal_name}.",
                f"The {self.animal} named {self.animal_name} slept in the sun.",
                f"The {self.animal} came when {speaker.name} called for {self.animal_name}.",
            ]
        )

    def questions(self) -> list[tuple[str, str]]:
        return [
            (
                f"What is the name of the {self.animal}?",
                f"The {self.animal} is called {self.animal_name}.",
            )
        ]
