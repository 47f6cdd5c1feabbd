"""The small world the demo's stories are about: who lives there, what there is, and where."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Person:
    """Somebody in a story, with the pronouns that go with the name."""

    name: str
    he: str
    him: str
    his: str


def _words(text: str) -> list[str]:
    return text.split()


GIRLS = _words("Anna Clara Ella Grace Hanna Iris Julia Lily Mia Nora Rosa Zoe")
BOYS = _words("Adam Ben Carl David Emil Felix Hugo Jack Leo Max Oscar Tom")
PEOPLE = [Person(name, "she", "her", "her") for name in GIRLS] + [
    Person(name, "he", "him", "his") for name in BOYS
]

THINGS = _words(
    "ball basket book bottle box candle clock coat cup doll drum flute hammer hat kite lamp map "
    "mirror pen pillow plate puzzle ring scarf shoe spoon sword toy trumpet whistle"
)
COLOURS = _words("black blue brown green grey orange pink purple red silver white yellow")

# A spot is where a thing can lie; it follows "is" and "put it" alike.
SPOTS = [
    f"{preposition} the {noun}"
    for preposition, nouns in (
        ("under", "bed bench chair sofa table tree"),
        ("behind", "barn chair door fence piano wall"),
        ("in", "barn cave garden kitchen shed tower"),
        ("on", "bed bench piano shelf table wall"),
        ("near", "fence fountain pond tree well window"),
    )
    for noun in nouns.split()
]

# A destination is where a person can go to, be found at, and come back from.
DESTINATIONS = [
    f"the {noun}"
    for noun in _words(
        "bakery beach castle cinema circus farm forest harbour island lake library market mill "
        "museum palace park school station theatre zoo"
    )
]
FOODS = _words(
    "apples beans berries bread cake carrots cheese cherries chocolate fish grapes honey lemons "
    "melons nuts pancakes pears pizza plums rice salad soup"
)
ANIMALS = _words(
    "bird cat cow dog donkey duck fox frog goat horse mouse parrot pig rabbit snail turtle"
)
ANIMAL_NAMES = _words(
    "Bingo Buddy Coco Daisy Dusty Ginger Lucky Misty Pepper Pip Poppy Rex Shadow Snowy Toffee Ziggy"
)


def a(phrase: str) -> str:
    """Returns the phrase with its indefinite article, such as "an orange hat"."""
    return f"{'an' if phrase[0] in 'aeiou' else 'a'} {phrase}"
