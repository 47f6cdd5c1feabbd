"""The facts a story is made of. Each knows how it is told, recalled, asked about and answered.

``tell`` states the fact for the first time; ``recall`` uses it again later in the story, which is
what teaches the base model to look back at what it has read. ``questions`` pairs a question with
its one right answer: only the fine-tuning data uses it, the base model never sees any of them.

Every fact binds one word to another (the kite to the spot where it lies, Ben to the food he
likes), and that word is told first and at most a few words before the other. A model of four
layers learns such bindings within minutes; with longer ways between the two it took far more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from dice import Dice
from world import Person, a


class Fact(Protocol):
    """One thing that is true in a story."""

    def tell(self, dice: Dice, teller: Person) -> str:
        """Returns a sentence that states the fact; the teller may take part in it."""

    def recall(self, dice: Dice, speaker: Person) -> str:
        """Returns a sentence that only somebody who knows the fact can complete."""

    def question(self) -> tuple[str, str]:
        """Returns a question about the fact and its answer."""


@dataclass(frozen=True)
class Placed:
    """A thing lies somewhere."""

    thing: str
    spot: str

    def tell(self, dice: Dice, teller: Person) -> str:
        return dice.pick(
            [
                f"{teller.name} put the {self.thing} {self.spot}.",
                f"{teller.name} left the {self.thing} {self.spot}.",
                f"{teller.name} hid the {self.thing} {self.spot}.",
                f"{teller.name} saw {a(self.thing)} {self.spot}.",
                f"There was {a(self.thing)} {self.spot}.",
            ]
        )

    def recall(self, dice: Dice, speaker: Person) -> str:
        return dice.pick(
            [
                f"{speaker.name} said: The {self.thing} is {self.spot}.",
                f"{speaker.name} looked for the {self.thing} and found it {self.spot}.",
                f"The {self.thing} was still {self.spot}.",
            ]
        )

    def question(self) -> tuple[str, str]:
        return f"Where is the {self.thing}?", f"The {self.thing} is {self.spot}."


@dataclass(frozen=True)
class Coloured:
    """A thing has a colour."""

    thing: str
    colour: str

    def tell(self, dice: Dice, teller: Person) -> str:
        return dice.pick(
            [
                f"{teller.name} painted the {self.thing} {self.colour}.",
                f"{teller.name} coloured the {self.thing} {self.colour}.",
                f"The {self.thing} was {self.colour}.",
                f"The {self.thing} looked {self.colour} in the sun.",
            ]
        )

    def recall(self, dice: Dice, speaker: Person) -> str:
        return dice.pick(
            [
                f"{speaker.name} said: The {self.thing} is {self.colour}.",
                f"{speaker.name} drew the {self.thing} and made it {self.colour}.",
                f"{speaker.name} liked the {self.thing} because it was {self.colour}.",
            ]
        )

    def question(self) -> tuple[str, str]:
        return f"What colour is the {self.thing}?", f"The {self.thing} is {self.colour}."


@dataclass(frozen=True)
class Owned:
    """A thing belongs to a person."""

    thing: str
    person: Person

    def tell(self, dice: Dice, teller: Person) -> str:
        return dice.pick(
            [
                f"{teller.name} gave the {self.thing} to {self.person.name}.",
                f"{teller.name} sold the {self.thing} to {self.person.name}.",
                f"{teller.name} brought {a(self.thing)} to {self.person.name}.",
                f"{teller.name} lent the {self.thing} to {self.person.name}.",
            ]
        )

    def recall(self, dice: Dice, speaker: Person) -> str:
        return dice.pick(
            [
                f"{speaker.name} said: The {self.thing} belongs to {self.person.name}.",
                f"{speaker.name} wanted the {self.thing} and went to {self.person.name}.",
                f"The {self.thing} belonged to {self.person.name}.",
            ]
        )

    def question(self) -> tuple[str, str]:
        return f"Who owns the {self.thing}?", f"The {self.thing} belongs to {self.person.name}."


@dataclass(frozen=True)
class Went:
    """A person went somewhere."""

    person: Person
    destination: str

    def tell(self, dice: Dice, teller: Person) -> str:
        name, there = self.person.name, f"to {self.destination}"
        return dice.pick(
            [
                f"{name} went {there}.",
                f"{name} walked {there}.",
                f"{name} ran {there}.",
                f"In the morning {name} went {there}.",
                f"{teller.name} drove {name} {there}.",
            ]
        )

    def recall(self, dice: Dice, speaker: Person) -> str:
        name = self.person.name
        return dice.pick(
            [
                f"{speaker.name} said: {name} went to {self.destination}.",
                f"{speaker.name} looked for {name} at {self.destination}.",
                f"{name} sang at {self.destination}.",
                f"In the evening {name} came back from {self.destination}.",
            ]
        )

    def question(self) -> tuple[str, str]:
        return (
            f"Where did {self.person.name} go?",
            f"{self.person.name} went to {self.destination}.",
        )


@dataclass(frozen=True)
class Likes:
    """A person likes some food."""

    person: Person
    food: str

    def tell(self, dice: Dice, teller: Person) -> str:
        name = self.person.name
        return dice.pick(
            [
                f"{name} loved {self.food}.",
                f"{name} liked {self.food} best of all.",
                f"{name} wanted {self.food} every day.",
                f"{teller.name} gave {name} {self.food}.",
            ]
        )

    def recall(self, dice: Dice, speaker: Person) -> str:
        name = self.person.name
        return dice.pick(
            [
                f"{speaker.name} said: {name} likes {self.food}.",
                f"{speaker.name} bought {name} some {self.food}.",
                f"{name} ate {self.food} for dinner.",
            ]
        )

    def question(self) -> tuple[str, str]:
        return f"What does {self.person.name} like?", f"{self.person.name} likes {self.food}."


@dataclass(frozen=True)
class Named:
    """An animal has a name."""

    animal: str
    animal_name: str

    def tell(self, dice: Dice, teller: Person) -> str:
        called = f"{a(self.animal)} called {self.animal_name}"
        return dice.pick(
            [
                f"{teller.name} had {called}.",
                f"{teller.name} met {called}.",
                f"{teller.name} fed {called}.",
                f"There was {called}.",
            ]
        )

    def recall(self, dice: Dice, speaker: Person) -> str:
        return dice.pick(
            [
                f"{speaker.name} said: The {self.animal} is called {self.animal_name}.",
                f"{speaker.name} looked at the {self.animal} and called it {self.animal_name}.",
                f"The {self.animal} named {self.animal_name} slept in the sun.",
            ]
        )

    def question(self) -> tuple[str, str]:
        return (
            f"What is the name of the {self.animal}?",
            f"The {self.animal} is called {self.animal_name}.",
        )
